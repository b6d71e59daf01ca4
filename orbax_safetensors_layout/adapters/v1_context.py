"""The context of Orbax v1 that gives items of checkpoints to the safetensors handler."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.errors import SafetensorsLayoutError

from . import _orbax
from .v1 import SafetensorsHandler, item_name

_ONCE_STATE = "pytree"


def context(*item_names: str) -> ocp.Context:
    """A new Orbax context that gives these items to `SafetensorsHandler`.

    Other items keep Orbax's handlers. To save a pytree under another name before each of these
    items was saved or loaded in the context is a warning; it is an error for `context("pytree")`
    and `ocp.save`, whose item is "state".

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
    """A handler of Orbax that reports where it saves while a named item has not been used.

    It has the name of the handler's own class, by which a checkpoint records what saved it.
    """
    used: set[str] = set()

    async def save(self: Any, directory: Any, checkpointable: Any) -> Awaitable[None]:
        await asyncio.sleep(0)  # the step's other items begin before this one goes on
        try:
            _report_unused(item_name(directory.path), names, used)
        except BaseException:
            await _orbax.abandon_folders(directory)
            raise
        writing: Awaitable[None] = await handler.save(self, directory, checkpointable)
        return writing

    place = {"__module__": handler.__module__, "__qualname__": handler.__qualname__}
    return type(handler.__name__, (handler,), {"save": save, "used_items": used, **place})


def _report_unused(item: str, names: tuple[str, ...], used: set[str]) -> None:
    """Reports that an item is saved by Orbax, and some that are registered were not used.

    Raises:
        SafetensorsLayoutError: None was, and "pytree" is registered, which is what Orbax called
            the item of `ocp.save` before it was "state".
    """
    unused = ", ".join(f'"{name}"' for name in names if name not in used)
    if not unused:
        return
    text = f'item "{item}" is not registered, and some that are registered have not been used'
    hint = f'`osl.context("{item}")` saves it as safetensors.'
    if not used and item == _orbax.STATE and _ONCE_STATE in names:
        raise SafetensorsLayoutError(text, expected=unused, found=f'"{item}"', hint=hint)
    warnings.warn(f"{text} ({unused}): it is saved in Orbax's own format. {hint}", stacklevel=2)
