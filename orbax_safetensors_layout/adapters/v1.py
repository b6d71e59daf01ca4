"""Orbax v1: the handler for items of checkpoints in Orbax's own layout.

    with osl.context("state"):
        ocp.save(path, state)
        state = ocp.load(path)

    with ocp.training.Checkpointer(root, context=osl.context("state")) as training:
        training.save(step, state)

The other way is the layout; see `layout` and `install`. Both leave the same folder.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Awaitable
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.utils import TMP_DIR_SUFFIX

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import SafetensorsLayoutError

from . import _orbax, settings
from .background import in_background
from .item_save import ItemSave
from .metadata import CheckpointMetadata, StoredArrayMetadata
from .orbax_item import is_orbax_item
from .restore_args import HostArray
from .save_args import storage_dtypes
from .settings import Settings
from .strictness import load_item, open_item

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax
_VALUES = (bool, int, float, str)


class SafetensorsHandler(ocp.CheckpointableHandler[Any, Any]):
    """The `CheckpointableHandler` for an item whose folder holds safetensors files.

    As with Orbax's own handler, a tree that does not name the whole checkpoint is an error unless
    `ctx.pytree.loading.partial_load` is set.

    Orbax makes handlers itself, without arguments; `using(mapping=..., read=..., write=...)` and
    the `memory` options of Orbax's context say how to read and write. The `dtype` of its
    `array.saving` options is the one in which arrays are written; numbers stay as they are.

    Args:
        own: What the layout that chose this handler was made with.

    Example:
        >>> import tempfile, numpy as np, orbax_safetensors_layout as osl
        >>> path = f"{tempfile.mkdtemp()}/checkpoint"
        >>> with osl.context("state"):
        ...     ocp.save(path, {"weight": np.arange(4.0, dtype=np.float32), "step": 3})
        ...     ocp.load(path)
        {'weight': array([0., 1., 2., 3.], dtype=float32), 'step': 3}
    """

    def __init__(self, own: Settings = settings.NOTHING) -> None:
        self._own = own

    async def save(
        self, directory: ocp.path.PathAwaitingCreation, checkpointable: Any
    ) -> Awaitable[None]:
        """Copies what this process writes to the host; files are written when awaited.

        Args:
            directory: The item's folder.
            checkpointable: Any pytree that `osl.save` takes.

        Raises:
            ValueError: The tree is an empty container, or an option of Orbax's context is invalid.
            SafetensorsLayoutError: Leaves that cannot be saved, or Orbax's context leaves out
                some of the processes.
        """
        making = _orbax.folders_being_made()
        try:
            _check_processes()
            _note_use(directory.path)
            save = ItemSave(
                directory.path,
                checkpointable,
                settings.write_options_v1(self._own),
                mapping=settings.current(self._own).mapping,
                dtypes=storage_dtypes(checkpointable),
                making=making,
            )
        except BaseException:
            await _orbax.abandon_folders(directory)
            raise
        if save.is_captured:
            return _write(save, directory, making)
        # More than the memory budget: the caller waits until files have taken up the rest.
        return _finish(save.start(await _folder(directory, making)))

    async def load(
        self, directory: ocp.path.Path, abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        """Loads the item; here settings are taken and headers checked, the rest when awaited.

        Args:
            directory: The item's folder; or an item in Orbax's own format, as a run's earlier steps
                may be, which Orbax's own handler loads.
            abstract_checkpointable: The wanted tree; None loads everything: what this package saved
                as it was saved, a checkpoint of others as a flat dict of numpy arrays.
        """
        _note_use(directory)
        if await in_background(is_orbax_item, directory):
            orbaxs: Any = ocp.handlers.PyTreeHandler()
            return cast(Awaitable[Any], await orbaxs.load(directory, abstract_checkpointable))
        options, mapping = settings.read_options_v1(self._own), settings.current(self._own).mapping
        # Of what is raised later Orbax says that the handler is incompatible.
        opening = await in_background(
            open_item, directory, abstract_checkpointable, mapping, options
        )
        return in_background(
            load_item,
            directory,
            abstract_checkpointable,
            opening=opening,
            mapping=mapping,
            options=options,
            partial=_orbax.get_context().pytree.loading.partial_load,
            switch="`context.pytree.loading.partial_load = True`",
        )

    async def metadata(self, directory: ocp.path.Path) -> Any:
        """Shapes, dtypes and shardings, as `describe` gives them."""
        if await in_background(is_orbax_item, directory):
            return await ocp.handlers.PyTreeHandler().metadata(directory)
        mapping = settings.current(self._own).mapping
        return describe(await in_background(CheckpointMetadata.read, directory, mapping))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is a tree of leaves that `osl.save` takes."""
        leaves = jax.tree.leaves(checkpointable)
        return bool(leaves) and all(map(_is_leaf, leaves))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it is a tree of leaves that `osl.load` takes."""
        # Orbax silently turns to its own pytree handler for what is refused here.
        return all(map(_is_abstract_leaf, jax.tree.leaves(abstract_checkpointable)))


def item_name(directory: str | os.PathLike[str]) -> str:
    """The name of an item whose folder may have one of Orbax's temporary names."""
    return os.path.basename(os.fspath(directory)).split(TMP_DIR_SUFFIX)[0]


def _note_use(directory: str | os.PathLike[str]) -> None:
    """Tells the handlers of Orbax that watch the context's items; see `v1_context`."""
    for handler, _ in _orbax.get_context().checkpointables.registry.get_all_entries():
        used: set[str] = getattr(handler, "used_items", set())
        used.add(item_name(directory))


async def _holds_data(directory: ocp.path.Path) -> bool:
    return await in_background(is_safetensors_checkpoint, directory)


_orbax.count_as_data(_holds_data)


def _check_processes() -> None:
    """All processes write their shares of one checkpoint, and the first what is written once."""
    options, count = _orbax.get_context().multiprocessing, jax.process_count()
    active = options.active_processes
    if active is not None and set(active) != {*range(count)}:
        raise SafetensorsLayoutError(
            "all processes must take part in a save",
            expected=f"context.multiprocessing.active_processes: None, or all of {count}",
            found=sorted(active),
        )
    if options.primary_host is None and count > 1:
        raise SafetensorsLayoutError(
            "the processes must save to storage that all of them share",
            expected="context.multiprocessing.primary_host: 0",
            found=None,
        )


async def _folder(
    directory: ocp.path.PathAwaitingCreation, making: _orbax.FoldersBeingMade | None
) -> ocp.path.Path:
    """The item's folder, which `ItemSave` waits for if it is being made."""
    return await directory.await_creation() if making is None else directory.path


async def _write(
    save: ItemSave,
    directory: ocp.path.PathAwaitingCreation,
    making: _orbax.FoldersBeingMade | None,
) -> None:
    await in_background(save.write, await _folder(directory, making))


async def _finish(writing: concurrent.futures.Future[None]) -> None:
    await asyncio.wrap_future(writing)  # for the loop that waits, not the one that began


def describe(contents: CheckpointMetadata) -> Any:
    """The tree of a checkpoint, which also serves as the tree to load.

    Arrays are `jax.ShapeDtypeStruct`s, with the sharding that they were saved with where this
    program has the devices; numpy arrays have a shape and a dtype alone; numbers and strings are
    their types. A checkpoint that others wrote is a flat dict from tensor name to
    `jax.ShapeDtypeStruct`.
    """

    def array(stored: StoredArrayMetadata) -> Any:
        if stored.on_host:
            return HostArray(stored.shape, stored.dtype)
        return _struct(stored.shape, stored.dtype, sharding=stored.placement)

    return contents.tree(array, lambda _, value: type(value))


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | str)


def _is_abstract_leaf(leaf: Any) -> bool:
    if isinstance(leaf, type):
        return issubclass(leaf, _VALUES)
    if leaf is ... or isinstance(leaf, _VALUES) or hasattr(leaf, "restore_type"):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
