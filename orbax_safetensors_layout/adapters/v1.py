"""Orbax v1: the handler for items of Orbax's own layout; `layout` leaves the same folder."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.utils import TMP_DIR_SUFFIX

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions

from . import _orbax, settings
from .background import in_background
from .folder_creation import folders_being_made
from .item import ItemSave, begin_load, is_orbax_item, loads_orbax_item
from .metadata import metadata_v1
from .orbaxs_boxes import BoxFitting, unfitted
from .resized import begin_resized
from .settings import NOTHING, Settings

_VALUES = (bool, int, float, str)
_LEAVES = (jax.Array, np.ndarray, np.generic, *_VALUES)


class SafetensorsHandler(ocp.CheckpointableHandler[Any, Any]):
    """The `CheckpointableHandler` for an item whose folder holds safetensors files.

    As with Orbax's own handler, a tree that does not name the whole checkpoint is an error unless
    `ctx.pytree.loading.partial_load` is set.

    Orbax makes handlers itself, without arguments; `using(mapping=..., read=..., write=...)` and
    the `memory` options of Orbax's context say how to read and write. The `dtype` of its
    `array.saving` options is the one in which arrays are written; numbers stay as they are.

    Args:
        own: What the layout that chose this handler was made with.

    Examples:
        >>> import tempfile, numpy as np, orbax_safetensors_layout as osl
        >>> path = f"{tempfile.mkdtemp()}/checkpoint"
        >>> with osl.context("state"):
        ...     ocp.save(path, {"weight": np.arange(4.0, dtype=np.float32), "step": 3})
        ...     ocp.load(path)
        {'weight': array([0., 1., 2., 3.], dtype=float32), 'step': 3}
    """

    def __init__(self, own: Settings = NOTHING) -> None:
        self._own = own

    async def save(
        self, directory: ocp.path.PathAwaitingCreation, checkpointable: Any
    ) -> Awaitable[None]:
        """Copies this process's shards to the host; files are written when awaited."""
        async with folders_being_made(directory) as wait:
            _check_processes()
            _note_use(directory.path)
            options = settings.write_options_v1(self._own)
            save = ItemSave(
                directory.path,
                checkpointable,
                options,
                mapping=settings.current(self._own).mapping,
                dtypes=settings.storage_dtypes_v1(checkpointable),
                wait=wait,
            )

        async def folder() -> ocp.path.Path:
            return directory.path if wait else await directory.await_creation()

        async def write() -> None:
            await in_background(save.write, await folder())

        if options.memory_budget_bytes is None:
            return write()
        # The caller waits until files have taken up what the budget cannot hold; on all processes,
        # which meet in the order of the items, also where this one holds everything.
        writing = save.start(await folder())

        async def join() -> None:
            await asyncio.wrap_future(writing)  # for the loop that waits, not the one that began

        return join()

    async def load(
        self, directory: ocp.path.Path, abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        """Holds the tree against the headers; loads as `osl.load` when awaited."""
        _note_use(directory)
        options, mapping = settings.read_options_v1(self._own), settings.current(self._own).mapping
        request = directory, lambda: abstract_checkpointable, mapping, options
        if await in_background(loads_orbax_item, *request):  # as a run's earlier steps may be
            return await _load_orbaxs(directory, abstract_checkpointable)
        strict = not _orbax.get_context().pytree.loading.partial_load
        # Orbax reports whatever is raised later as an incompatible handler.
        begin = begin_load_v1(
            directory,
            abstract_checkpointable,
            mapping,
            dataclasses.replace(options, strict=strict),
            "`context.pytree.loading.partial_load = True`",
        )
        return in_background(await in_background(begin))

    async def metadata(self, directory: ocp.path.Path) -> Any:
        """Shapes, dtypes and shardings, as `metadata_v1` gives them."""
        if await in_background(is_orbax_item, directory):
            return await ocp.handlers.PyTreeHandler().metadata(directory)
        mapping = settings.current(self._own).mapping
        return (await in_background(metadata_v1, directory, mapping)).tree

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it is a tree of leaves that `osl.save` takes."""
        leaves = jax.tree.leaves(checkpointable)
        return bool(leaves) and all(isinstance(leaf, _LEAVES) for leaf in leaves)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it is a tree of leaves that `osl.load` takes."""
        # Orbax silently turns to its own pytree handler for what is refused here.
        return all(map(_is_abstract_leaf, jax.tree.leaves(abstract_checkpointable)))


async def _load_orbaxs(directory: ocp.path.Path, abstract: Any) -> Awaitable[Any]:
    """Loads an item in Orbax's own format, leaves with or without the boxes that were saved."""
    orbaxs: Any = ocp.handlers.PyTreeHandler()
    if abstract is None:
        return cast(Awaitable[Any], await orbaxs.load(directory))
    boxes = await in_background(BoxFitting, directory)
    fitted = boxes.fitted(abstract)
    loading = await orbaxs.load(directory, fitted)

    async def load() -> Any:
        return unfitted(abstract, fitted, await loading)

    return load()


def begin_load_v1(
    path: ocp.path.Path,
    abstract: Any,
    mapping: LeafMapping | None,
    options: ReadOptions,
    leaves_out: str | None = None,
) -> Callable[[], Callable[[], Any]]:
    """Return `begin_load` for these, or where Orbax's context resizes arrays `begin_resized`."""
    context = _orbax.get_context()
    partial = context.pytree.loading.partial_load
    begin = functools.partial(
        begin_load,
        path,
        mapping=mapping,
        options=options,
        partial=partial,
        resizes="`context.array.loading.enable_padding_and_truncation = True`",
        leaves_out=leaves_out,
    )
    resizes = context.array.loading.enable_padding_and_truncation
    if not resizes or mapping is not None or abstract is None:  # a mapping says what is cut
        return functools.partial(begin, abstract)
    return functools.partial(
        begin_resized,
        path,
        abstract,
        begin,
        options=options,
        loose=True,
    )


def item_name(directory: str | os.PathLike[str]) -> str:
    """The name of an item whose folder may have one of Orbax's temporary names."""
    return os.path.basename(os.fspath(directory)).split(TMP_DIR_SUFFIX)[0]


def _note_use(directory: str | os.PathLike[str]) -> None:
    """Tells the handlers of Orbax that watch the context's items; see `registries`."""
    for handler, _ in _orbax.get_context().checkpointables.registry.get_all_entries():
        used: set[str] = getattr(handler, "used_items", set())
        used.add(item_name(directory))


_orbax.count_as_data(lambda directory: in_background(is_safetensors_checkpoint, directory))


def _check_processes() -> None:
    """All processes write their shares of one checkpoint, and the first one all other files."""
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


def _is_abstract_leaf(leaf: Any) -> bool:
    if isinstance(leaf, type):
        return issubclass(leaf, _VALUES)
    if leaf is ... or isinstance(leaf, _VALUES) or hasattr(leaf, "restore_type"):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
