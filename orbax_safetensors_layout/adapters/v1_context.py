"""The context of Orbax v1 that gives items of checkpoints to the safetensors handler."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.adapters.v1 import SafetensorsHandler, steps_begun
from orbax_safetensors_layout.errors import SafetensorsLayoutError


def context(*item_names: str) -> ocp.Context:
    """A new Orbax context that gives these items to `SafetensorsHandler`.

    Other items keep Orbax's handlers. A save of pytrees in which none of these items is, is an
    error: it would be in Orbax's own format alone.

    Args:
        *item_names: The items; `"state"` is the one that `ocp.save`, `ocp.load` and
            `ocp.training.Checkpointer` use where none is named.

    Example:
        >>> with context("state") as ctx:
        ...     ctx.checkpointables.registry.get("state")
        <class 'orbax_safetensors_layout.adapters.v1.SafetensorsHandler'>
    """
    if not item_names:
        raise ValueError('context needs the items\' names; the one of `ocp.load` is "state".')
    known = ocp.handlers.global_registry()
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for handler, name in known.get_all_entries():
        if name not in item_names:
            typestrs = known.get_secondary_typestrs(handler)
            if issubclass(handler, ocp.handlers.PyTreeHandler):
                handler = _watched(handler, item_names)
            registry.add(handler, checkpointable_name=name, secondary_typestrs=typestrs)
    for name in item_names:
        registry.add(SafetensorsHandler, checkpointable_name=name)
    made = ocp.Context()
    made.checkpointables.registry = registry
    return made


def _watched(handler: Any, names: tuple[str, ...]) -> Any:
    """A handler of Orbax that refuses to save where none of the named items is saved as well.

    It has the name of the handler's own class, by which a checkpoint records what saved it.
    """

    async def save(self: Any, directory: Any, checkpointable: Any) -> Awaitable[None]:
        await asyncio.sleep(0)  # the step's other items begin before this one goes on
        step, folder = os.path.split(os.fspath(directory.path))
        item = folder.split(ocp_v0.utils.TMP_DIR_SUFFIX)[0]
        if step not in steps_begun:
            raise SafetensorsLayoutError(
                f'item "{item}" is not registered, and none that is registered is saved with it',
                expected=", ".join(f'"{name}"' for name in names),
                found=f'"{item}"',
                hint=f'`osl.context("{item}")` saves it as safetensors; a context without'
                " registered items in Orbax's own format.",
            )
        writing: Awaitable[None] = await handler.save(self, directory, checkpointable)
        return writing

    place = {"__module__": handler.__module__, "__qualname__": handler.__qualname__}
    return type(handler.__name__, (handler,), {"save": save, **place})
