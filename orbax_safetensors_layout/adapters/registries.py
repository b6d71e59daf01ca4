"""Assigns items of a checkpoint to the safetensors handlers: a v0 registry, and a v1 context."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions, WriteOptions, require

from . import _orbax
from .background import in_background
from .folder_creation import folders_being_made
from .v0 import SAVE_AND_RESTORE, SafetensorsCheckpointHandler, item_of
from .v1 import SafetensorsHandler, item_name

_DEFAULT = "default"  # v0's name of the item of a manager without named items
_ONCE_STATE = "pytree"  # v1's name of the item of `ocp.save` before it was "state"
_ORBAXS: Any = (
    (ocp_v0.StandardCheckpointHandler, (ocp_v0.args.StandardSave, ocp_v0.args.StandardRestore)),
    (ocp_v0.PyTreeCheckpointHandler, (ocp_v0.args.PyTreeSave, ocp_v0.args.PyTreeRestore)),
)


def handler_registry(
    *item_names: str,
    mapping: LeafMapping | None = None,
    read: ReadOptions | None = None,
    write: WriteOptions | None = None,
) -> ocp_v0.handlers.DefaultCheckpointHandlerRegistry:
    """A registry that gives these items of a `CheckpointManager` to the safetensors handler.

    A pipeline's `StandardSave`, `StandardRestore`, `PyTreeSave` and `PyTreeRestore` calls work
    unchanged with it, and so do `restore(step)` without arguments and `item_metadata(step)`. Steps
    that Orbax saved before, in its own format, are restored as well. Other items keep Orbax's
    handlers, and what this package saved is restored under any name. To save one before each
    registered item was saved or restored is a warning; it is an error where no step can have the
    registered ones (`handler_registry("state")` and a manager without named items, or `"default"`
    and one with them).

    Args:
        *item_names: The items; `"default"` is the one of a manager without named items.
        mapping: What leaves are made of; see `SafetensorsCheckpointHandler`.
        read: How to read.
        write: How to write.

    Examples:
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
    item_names = _checked(item_names, '("default" for an item without a name)')
    handler = SafetensorsCheckpointHandler(mapping=mapping, read=read, write=write)
    registry = ocp_v0.handlers.DefaultCheckpointHandlerRegistry()
    for name in item_names:
        for args in SAVE_AND_RESTORE:
            registry.add(name, args, handler)
    for orbaxs, kinds in _ORBAXS:
        watched = _watched_v0(orbaxs(), handler, item_names)
        for args in kinds:
            registry.add(None, args, watched)
    return registry


def _watched_v0(handler: Any, ours: SafetensorsCheckpointHandler, names: tuple[str, ...]) -> Any:
    """Watches a handler of Orbax; it keeps its class, by which Orbax finds its arguments."""

    def report(directory: Any) -> None:
        root, item = item_of(directory)
        used = {name for folder, name in ours.used_items if folder == root}
        # A manager has either named items or a single one without a name.
        never = not ours.used_items and (item == _DEFAULT or names == (_DEFAULT,))
        _report_unused(item, names, used, never=never, function="osl.handler_registry")

    def restore(directory: Any, args: Any = None) -> Any:
        """Restores what this package saved whatever it is registered for."""
        is_ours = is_safetensors_checkpoint(directory)
        return ours.restore(directory, args) if is_ours else restore_orbaxs(directory, args=args)

    restore_orbaxs = handler.restore
    handler.restore = restore
    handler.async_save = partial(_save_reported, report, handler.async_save)
    return handler


class _NoTree(ocp_v0.AsyncCheckpointHandler):
    """Refuses an item that is registered as a tree, and is saved or restored as something else."""

    def __init__(self, item: str, args: Any) -> None:
        self._error = SafetensorsLayoutError(
            f'item "{item}" is registered as a tree, and {type(args).__name__} is not for trees',
            hint="Name only the items that are trees in `osl.handler_registry`.",
        )

    async def async_save(self, directory: Any, args: Any) -> Any:
        async with folders_being_made(directory):
            raise self._error

    def save(self, directory: Any, args: Any) -> None:
        raise self._error

    def restore(self, directory: Any, args: Any = None) -> Any:
        raise self._error


_orbax.replace_missing_handler(SafetensorsCheckpointHandler, _NoTree)


def _checked(item_names: tuple[str, ...], usual: str) -> tuple[str, ...]:
    """Return the names, each once."""
    are_texts = item_names and all(isinstance(name, str) for name in item_names)
    are_names = are_texts and all(name and "/" not in name for name in item_names)
    require(are_names, "item_names", f"names of items {usual}", item_names)
    return tuple(dict.fromkeys(item_names))


def context(*item_names: str, base: ocp.Context | None = None) -> ocp.Context:
    """A new Orbax context that gives these items to `SafetensorsHandler`.

    All else is as in `base`, a program's own context, which stays as it is; without one, as in
    `ocp.Context()`. A context that a program enters within this one takes its place: there,
    `with osl.context("state", base=its_context)`.

    Other items keep Orbax's handlers. To save a pytree under another name before each of these
    items was saved or loaded in the context is a warning; it is an error for `context("pytree")`
    and `ocp.save`, whose item is "state".

    Args:
        *item_names: The items; `"state"` is the one that `ocp.save`, `ocp.load` and
            `ocp.training.Checkpointer` use where none is named.
        base: The context whose options and handlers of other items are taken over.

    Examples:
        >>> with context("state") as ctx:
        ...     ctx.checkpointables.registry.get("state")
        <class 'orbax_safetensors_layout.adapters.v1.SafetensorsHandler'>
    """
    item_names = _checked(item_names, '("state" for that of `ocp.load`)')
    require(base is None or isinstance(base, ocp.Context), "base", "an `ocp.Context`", base)
    new_context = ocp.Context(base)
    known = new_context.checkpointables.registry
    registry = ocp.handlers.local_registry(include_global_registry=False)
    for handler, name in known.get_all_entries():
        if name not in item_names:
            typestrs = known.get_secondary_typestrs(handler)
            if issubclass(handler, ocp.handlers.PyTreeHandler):
                handler = _watched_v1(handler, item_names)
            registry.add(handler, checkpointable_name=name, secondary_typestrs=typestrs)
    for name in item_names:
        registry.add(SafetensorsHandler, checkpointable_name=name)
    new_context.checkpointables.registry = registry
    return new_context


def _watched_v1(handler: Any, names: tuple[str, ...]) -> Any:
    """A subclass of a handler of Orbax, of the same name, by which a step records what saved it."""
    used: set[str] = getattr(handler, "used_items", set())  # `SafetensorsHandler` adds to it

    def report(directory: Any) -> None:
        item = item_name(directory.path)
        never = not used and item == _orbax.STATE and _ONCE_STATE in names
        _report_unused(item, names, used, never=never, function="osl.context")

    async def save(self: Any, directory: Any, checkpointable: Any) -> Any:
        return await _save_reported(report, partial(handler.save, self), directory, checkpointable)

    async def read(name: str, self: Any, directory: Any, *args: Any) -> Any:
        """Loads what this package saved, or its metadata, whatever it is registered for."""
        if await in_background(is_safetensors_checkpoint, directory):
            return await getattr(SafetensorsHandler(), name)(directory, *args)
        return await getattr(handler, name)(self, directory, *args)

    async def load(self: Any, directory: Any, abstract_checkpointable: Any = None) -> Any:
        return await read("load", self, directory, abstract_checkpointable)

    async def metadata(self: Any, directory: Any) -> Any:
        return await read("metadata", self, directory)

    place = {"__module__": handler.__module__, "__qualname__": handler.__qualname__}
    return type(
        handler.__name__,
        (handler,),
        {"save": save, "load": load, "metadata": metadata, "used_items": used, **place},
    )


async def _save_reported(
    report: Callable[[Any], None], save: Any, directory: Any, *args: Any, **kwargs: Any
) -> Any:
    await asyncio.sleep(0)  # the step's other items begin before this one goes on
    async with folders_being_made(directory):  # and are not if this raises
        report(directory)
    return await save(directory, *args, **kwargs)


def _report_unused(
    item: str, names: tuple[str, ...], used: set[str], *, never: bool, function: str
) -> None:
    """Warns that Orbax saves an item while not all registered `names` are used; refuses `never`."""
    unused = ", ".join(f'"{name}"' for name in names if name not in used)
    if not unused:
        return
    text = f'item "{item}" is not registered, and some that are registered have not been used'
    hint = f'`{function}("{item}")` saves it as safetensors.'
    if never:
        raise SafetensorsLayoutError(text, expected=unused, found=f'"{item}"', hint=hint)
    warnings.warn(f"{text} ({unused}): it is saved in Orbax's own format. {hint}", stacklevel=2)
