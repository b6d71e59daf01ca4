"""The registry that gives items of a `CheckpointManager` of Orbax v0 to the safetensors handler."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import orbax.checkpoint as ocp

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions, WriteOptions

from . import _orbax
from .v0 import (
    SAVE_AND_RESTORE,
    SafetensorsCheckpointHandler,
    item_of,
)

_DEFAULT = "default"  # what Orbax calls the item of a manager without named items
_ORBAXS: Any = (
    (ocp.StandardCheckpointHandler, (ocp.args.StandardSave, ocp.args.StandardRestore)),
    (ocp.PyTreeCheckpointHandler, (ocp.args.PyTreeSave, ocp.args.PyTreeRestore)),
)


def handler_registry(
    *item_names: str,
    mapping: LeafMapping | None = None,
    read: ReadOptions | None = None,
    write: WriteOptions | None = None,
) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """A registry that gives these items of a `CheckpointManager` to the safetensors handler.

    A pipeline's `StandardSave`, `StandardRestore`, `PyTreeSave` and `PyTreeRestore` calls work
    unchanged with it, and so do `restore(step)` without arguments and `item_metadata(step)`. Steps
    that Orbax saved before, in its own format, are restored as well. Other items keep Orbax's
    handlers. To save one before each registered item was saved or restored is a warning; it is an
    error where no step can have the registered ones (`handler_registry("state")` and a manager
    without named items, or `"default"` and one with them).

    Args:
        *item_names: The items; `"default"` is the one of a manager without named items.
        mapping: What leaves are made of; see `SafetensorsCheckpointHandler`.
        read: How to read.
        write: How to write.

    Example:
        >>> import tempfile, numpy as np, orbax.checkpoint as ocp
        >>> registry = handler_registry("default")
        >>> manager = ocp.CheckpointManager(tempfile.mkdtemp(), handler_registry=registry)
        >>> state = {"weight": np.arange(4.0, dtype=np.float32)}
        >>> manager.save(7, args=ocp.args.StandardSave(state))
        True
        >>> manager.wait_until_finished()
        >>> manager.restore(manager.latest_step())
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    if not item_names:
        raise ValueError(
            'handler_registry needs the items\' names; one without names is "default".'
        )
    handler = SafetensorsCheckpointHandler(mapping=mapping, read=read, write=write)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name in item_names:
        for args in SAVE_AND_RESTORE:
            registry.add(name, args, handler)
    for orbaxs, kinds in _ORBAXS:
        watched = _watched(orbaxs(), handler, item_names)
        for args in kinds:
            registry.add(None, args, watched)
    return registry


def _watched(handler: Any, ours: SafetensorsCheckpointHandler, names: tuple[str, ...]) -> Any:
    """Lets a handler of Orbax, for all other items, report that it saves while ours is not used.

    It stays of Orbax's own class, by which Orbax finds its arguments and what a step records.
    """
    async_save = handler.async_save

    async def save(directory: Any, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)  # the step's other items begin before this one goes on
        try:
            _report_unused(directory, names, ours.used_items)
        except BaseException:
            await _orbax.abandon_folders(directory)
            raise
        return await async_save(directory, *args, **kwargs)

    handler.async_save = save
    return handler


def _report_unused(directory: Any, names: tuple[str, ...], used: set[tuple[str, str]]) -> None:
    """Reports that an item is saved by Orbax, and some that are registered were not used.

    Raises:
        SafetensorsLayoutError: None was, and none will be: a manager has either named items or a
            single one without a name.
    """
    root, item = item_of(directory)
    unused = ", ".join(f'"{name}"' for name in names if (root, name) not in used)
    if not unused:
        return
    text = f'item "{item}" is not registered, and some that are registered have not been used'
    hint = f'handler_registry("{item}") saves it as safetensors.'
    if not used and (item == _DEFAULT or names == (_DEFAULT,)):
        raise SafetensorsLayoutError(text, expected=unused, found=f'"{item}"', hint=hint)
    warnings.warn(f"{text} ({unused}): it is saved in Orbax's own format. {hint}", stacklevel=2)
