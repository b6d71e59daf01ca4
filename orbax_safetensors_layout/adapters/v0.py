"""Orbax v0: the handler for `ocp.Checkpointer` and `ocp.CheckpointManager`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from orbax.checkpoint import future

from orbax_safetensors_layout.format import MANIFEST
from orbax_safetensors_layout.load import LoadRequest, telling_others
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions, WriteOptions

from . import _orbax, settings
from .folder_creation import folders_being_made
from .item import ItemSave, begin_load, is_orbax_item, loads_orbax_item
from .metadata import metadata_v0
from .resized import begin_resized
from .settings import Settings
from .v0_args import (
    abstract_tree_of,
    given_leaves,
    is_partial,
    leaf_dtypes,
    restore_orbax_item,
)
from .v1 import SafetensorsHandler, item_name


class SafetensorsCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores safetensors checkpoints in Orbax v0; each process its own shards' bytes.

    Args:
        mapping: What leaves are made of, where neither the arguments of a save or restore nor a
            `using(mapping=...)` block say otherwise.
        read: How to read, where no `using(read=...)` block says otherwise. Its `strict` does not
            count: in v0, `partial_restore` of the restore arguments decides that.
        write: How to write, where no `using(write=...)` block says otherwise.

    Attributes:
        own: The settings that it was made with.
        used_items: The folder of the steps and the name of each item that it saved or restored.

    Examples:
        >>> import tempfile, jax, numpy as np, orbax.checkpoint as ocp
        >>> folder = f"{tempfile.mkdtemp()}/checkpoint"
        >>> checkpointer = ocp.Checkpointer(SafetensorsCheckpointHandler())
        >>> state = {"layer": {"weight": np.arange(4.0, dtype=np.float32)}, "step": 3}
        >>> checkpointer.save(folder, args=SafetensorsSave(state))
        >>> checkpointer.restore(folder)
        {'layer': {'weight': array([0., 1., 2., 3.], dtype=float32)}, 'step': 3}
        >>> tree = {"layer": {"weight": jax.ShapeDtypeStruct((4,), np.float32)}, "step": 0}
        >>> checkpointer.restore(folder, args=SafetensorsRestore(tree))
        {'layer': {'weight': array([0., 1., 2., 3.], dtype=float32)}, 'step': 3}
    """

    def __init__(
        self,
        *,
        mapping: LeafMapping | None = None,
        read: ReadOptions | None = None,
        write: WriteOptions | None = None,
    ) -> None:
        self.own = Settings(read=read, write=write, mapping=mapping)
        self.used_items: set[tuple[str, str]] = set()

    @classmethod
    def typestr(cls) -> str:
        """Name that steps record; the v1 handler's, so that each API restores the other's."""
        return str(_orbax.typestr(SafetensorsHandler))

    async def async_save(
        self, directory: os.PathLike[str], args: ocp.args.CheckpointArgs
    ) -> list[future.Future]:
        """Copies this process's shards to the host; the result waits until all have written."""
        self.used_items.add(item_of(directory))
        async with folders_being_made(directory) as wait:
            save = self._begin(directory, args, wait)
        return [_Commit(await asyncio.to_thread(save.start, directory))]

    def save(self, directory: os.PathLike[str], args: ocp.args.CheckpointArgs) -> None:
        """Saves, and waits for it; also inside a running event loop."""
        self._begin(directory, args, None).start(directory).result()

    def _begin(
        self, directory: os.PathLike[str], args: Any, wait: Callable[[], None] | None
    ) -> ItemSave:
        return ItemSave(
            directory,
            args.item,
            settings.current(self.own).write or WriteOptions(),
            mapping=self._mapping(args),
            custom=getattr(args, "custom_metadata", None),
            dtypes=leaf_dtypes(args),
            wait=wait,
        )

    def _mapping(self, args: Any) -> LeafMapping | None:
        return getattr(args, "mapping", None) or settings.current(self.own).mapping

    def restore(
        self, directory: os.PathLike[str], args: ocp.args.CheckpointArgs | None = None
    ) -> Any:
        """Restores the tree that the arguments ask for, or everything, as `osl.load` does."""
        self.used_items.add(item_of(directory))
        mapping = self._mapping(args)
        options = settings.current(self.own).read or ReadOptions()
        if loads_orbax_item(directory, lambda: abstract_tree_of(args), mapping, options):
            return restore_orbax_item(directory, args)
        partial = is_partial(args)
        request: Any = args
        if getattr(args, "fallback_sharding", None) is not None and request.item is None:
            args = dataclasses.replace(request, item=metadata_v0(directory, mapping))

        def begin(abstract: Any) -> Callable[[], Any]:
            return begin_load(
                directory,
                abstract,
                mapping,
                dataclasses.replace(options, strict=not partial),
                partial=partial,
                resizes="`strict=False` (in `StandardRestore` or `ArrayRestoreArgs`)",
                leaves_out="`SafetensorsRestore(..., partial_restore=True)`",
            )

        if mapping is not None:  # which says what is cut or padded
            return begin(abstract_tree_of(args))()
        loose = not getattr(args, "strict", True)
        with telling_others(directory, LoadRequest(abstract_tree_of(args), None, None, options)):
            is_recorded = (ocp_v1.path.Path(directory) / MANIFEST).exists()
        tree = abstract_tree_of(args, is_recorded=is_recorded)
        restored = begin_resized(directory, tree, begin, options=options, loose=loose)()
        return given_leaves(restored, tree, args) if partial else restored

    def metadata(self, directory: os.PathLike[str]) -> Any:
        """A `TreeMetadata`, which also serves as the tree to restore."""
        if is_orbax_item(directory):
            return ocp.StandardCheckpointHandler().metadata(ocp_v1.path.Path(directory))
        return metadata_v0(directory, self._mapping(None))


class _Commit(future.Future):
    """A save that is being written; one that is cancelled runs to its end, and is not committed."""

    def __init__(self, writing: concurrent.futures.Future[None]) -> None:
        self._writing = writing
        self._is_cancelled = False

    def result(self, timeout: float | None = None) -> None:
        self._writing.result(timeout)
        if self._is_cancelled:
            raise concurrent.futures.CancelledError("the save was cancelled")

    def cancel(self) -> None:
        self._is_cancelled = True


def item_of(directory: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder of the steps that an item is in, and the item's name."""
    return os.path.dirname(os.path.dirname(os.fspath(directory))), item_name(directory)


@ocp.args.register_with_handler(SafetensorsCheckpointHandler, for_save=True)
@dataclasses.dataclass
class SafetensorsSave(ocp.args.CheckpointArgs):
    """Arguments of a save as a safetensors checkpoint.

    Attributes:
        item: Any pytree of `jax.Array`s (plain, or of typed PRNG keys), numpy arrays and scalars,
            and Python numbers, booleans and strings.
        save_args: A tree of the item's structure of `ocp.SaveArgs`, or None in their place; their
            `dtype` is the one that an array is written in; not with a mapping.
        mapping: What the leaves are made of, as for `osl.save`.
        custom_metadata: A JSON value, given back by `metadata`.
        state: The item, as `ocp.StandardCheckpointer.save` calls it.
        ocdbt_target_data_file_size: Ignored, as without OCDBT; see `WriteOptions.max_file_bytes`.
    """

    item: Any = None
    save_args: Any = None
    _: dataclasses.KW_ONLY
    mapping: LeafMapping | None = None
    custom_metadata: Any = None
    state: dataclasses.InitVar[Any] = None
    ocdbt_target_data_file_size: int | None = None

    def __post_init__(self, state: Any) -> None:
        if state is not None:
            self.item = state


@ocp.args.register_with_handler(SafetensorsCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class SafetensorsRestore(ocp.args.CheckpointArgs):
    """Arguments of a restore from a safetensors checkpoint.

    Attributes:
        item: The abstract tree. Leaves may be all that `osl.load` takes: abstract or
            concrete arrays, `...`, Python scalars and strings, the leaves of `metadata`. Without
            an item, `restore_args` gives the structure; without either, everything is loaded.
        restore_args: A tree of the item's structure of `ocp.RestoreArgs` and
            `ocp.ArrayRestoreArgs`; what they say of a leaf overrides the item.
        mapping: What the leaves are made of, as for `osl.load`.
        partial_restore: Let the checkpoint hold tensors that the item does not name; otherwise
            they are an error. Leaves that the checkpoint lacks come back as they are given.
        transforms: `{}` is `partial_restore=True`, as with Orbax; others are refused, and so are
            the next two where they change anything.
        transforms_default_to_original: See `transforms`.
        legacy_transform_fn: See `transforms`.
        target: The item, as `ocp.StandardCheckpointer.restore` calls it.
        strict: Whether arrays of other shapes than the item's are an error; else they are cut, or
            filled up with zeros.
        support_layout: Whether device layouts of the item's arrays count.
        fallback_sharding: For arrays whose sharding is not given, or is not to be had.
    """

    item: Any = None
    restore_args: Any = None
    _: dataclasses.KW_ONLY
    mapping: LeafMapping | None = None
    partial_restore: bool = False
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    target: dataclasses.InitVar[Any] = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None

    def __post_init__(self, target: Any) -> None:
        if target is not None:
            self.item = target


SAVE_AND_RESTORE = (
    *(SafetensorsSave, ocp.args.StandardSave, ocp.args.PyTreeSave),
    *(SafetensorsRestore, ocp.args.StandardRestore, ocp.args.PyTreeRestore),
)
_orbax.add_args(SafetensorsCheckpointHandler, SAVE_AND_RESTORE)
