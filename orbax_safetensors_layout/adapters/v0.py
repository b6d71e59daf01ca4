"""Orbax v0: the handler for `ocp.Checkpointer` and `ocp.CheckpointManager`.

An existing pipeline writes safetensors, and restores them, with one line changed:

    manager = ocp.CheckpointManager(root, handler_registry=osl.handler_registry("default"))
    manager.save(step, args=ocp.args.StandardSave(state))

Steps that it saved before, in Orbax's own format, are restored as well. `item_handlers=` takes a
`SafetensorsCheckpointHandler` as it takes Orbax's handlers.

A folder of published weights is restored as it is, with nothing added to it:

    checkpointer = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    state = checkpointer.restore(folder, args=osl.SafetensorsRestore(abstract_state))

`ocp.Checkpointer` takes folders only: for the path of a single file Orbax says "Found incomplete
checkpoint" before any handler is asked. Give the folder, or use `osl.load` or `ocp.load`.

As a step of a `CheckpointManager`, the folder is under the name of an item of its own, most
easily as a symbolic link; Orbax needs no other file. The manager goes on with its usual items:

    (root / "0").mkdir(parents=True)
    (root / "0" / "pretrained").symlink_to(folder)
    manager = ocp.CheckpointManager(root)
    args = ocp.args.Composite(pretrained=osl.SafetensorsRestore(abstract_params))
    params = manager.restore(0, args=args).pretrained
    manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))

With `handler_registry=osl.handler_registry("pretrained")`, `StandardRestore`, restoring without
arguments and `item_metadata` work for that item, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import future

from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions, WriteOptions

from . import _orbax, orbax_item, settings, v0_metadata
from .item_save import ItemSave
from .metadata import CheckpointMetadata
from .resizing import load_resized
from .restore_args import abstract_tree_of
from .save_args import leaf_dtypes
from .strictness import load_item
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
        used_items: The folder of the steps and the name of each item that it saved or restored.

    Example:
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
        self._mapping = mapping
        self._read = read
        self._write = write
        self.used_items: set[tuple[str, str]] = set()

    @classmethod
    def typestr(cls) -> str:
        """What steps record; that of the v1 handler, so that each API restores the other's."""
        return str(_orbax.typestr(SafetensorsHandler))

    async def async_save(
        self, directory: os.PathLike[str], args: ocp.args.CheckpointArgs
    ) -> list[future.Future]:
        """Copies what this process writes to the host; files are written in the background.

        Args:
            directory: Where the item will be; it need not exist yet.
            args: `SafetensorsSave`, `StandardSave` or `PyTreeSave`.

        Returns:
            What waits until all processes have written, and raises what went wrong.

        Raises:
            ValueError: The tree is an empty container.
            SafetensorsLayoutError: Leaves that cannot be saved.
        """
        self.used_items.add(item_of(directory))
        making = _orbax.folders_being_made()
        try:
            save = self._begin(directory, args, making)
        except BaseException:
            await _orbax.abandon_folders(directory)
            raise
        commit = _commit(save, directory, at_once=making is not None)
        if not save.is_captured:
            await asyncio.to_thread(_wait_captured, save, commit)
        return [commit]

    def save(self, directory: os.PathLike[str], args: ocp.args.CheckpointArgs) -> None:
        """Saves, and waits for it; also inside a running event loop. As `async_save`.

        Raises:
            StorageError: A write failed.
            PeerError: Another process failed.
        """
        _commit(self._begin(directory, args), directory).result()

    def _begin(
        self, directory: os.PathLike[str], args: Any, making: _orbax.FoldersBeingMade | None = None
    ) -> ItemSave:
        return ItemSave(
            directory,
            args.item,
            settings.current().write or self._write or WriteOptions(),
            mapping=self._mapping_of(args),
            custom=getattr(args, "custom_metadata", None),
            dtypes=leaf_dtypes(args),
            making=making,
        )

    def _mapping_of(self, args: Any) -> LeafMapping | None:
        return getattr(args, "mapping", None) or settings.current().mapping or self._mapping

    def restore(
        self, directory: os.PathLike[str], args: ocp.args.CheckpointArgs | None = None
    ) -> Any:
        """Restores the tree that the arguments ask for.

        Args:
            directory: The folder that holds the `.safetensors` files; or an item in Orbax's own
                format, as a run's earlier steps may be, which Orbax's own handlers restore.
            args: `SafetensorsRestore`, `StandardRestore`, `PyTreeRestore`, or None. Without a tree
                everything is loaded: what this package saved as it was saved, a checkpoint of
                others as a flat dict of numpy arrays.

        Raises:
            CheckpointNotFoundError: There is no safetensors checkpoint there.
            FormatError: A file is malformed.
            MismatchError: Checkpoint and tree disagree.
            StorageError: A read failed.
        """
        self.used_items.add(item_of(directory))
        if orbax_item.is_orbax_item(directory):
            return orbax_item.restore(directory, args)
        mapping = self._mapping_of(args)
        options = settings.current().read or self._read or ReadOptions()
        load = functools.partial(
            load_item,
            directory,
            mapping=mapping,
            options=options,
            partial=getattr(args, "partial_restore", False),
            switch="`SafetensorsRestore(..., partial_restore=True)`",
        )
        if mapping is not None:  # which says what is cut or padded
            return load(abstract_tree_of(args))
        loose = not getattr(args, "strict", True)
        return load_resized(directory, abstract_tree_of(args), load, options=options, loose=loose)

    def metadata(self, directory: os.PathLike[str]) -> Any:
        """Name, shape, dtype and sharding of every leaf, and the custom metadata.

        Returns:
            A `TreeMetadata`, as from Orbax's own pytree handlers, which also serves as the tree to
            restore. Of a checkpoint that others wrote, it is a flat dict of tensors, and the files'
            `__metadata__` are the custom metadata.
        """
        if orbax_item.is_orbax_item(directory):
            return orbax_item.metadata(directory)
        return v0_metadata.describe(
            directory, CheckpointMetadata.read(directory, self._mapping_of(None))
        )


def item_of(directory: str | os.PathLike[str]) -> tuple[str, str]:
    """The folder of the steps that an item is in, and the item's name."""
    return os.path.dirname(os.path.dirname(os.fspath(directory))), item_name(directory)


def _commit(save: ItemSave, directory: os.PathLike[str], *, at_once: bool = False) -> future.Future:
    """Starts the background phase: `at_once`, or when Orbax tells that the folder is there."""

    async def write() -> None:
        save.write(directory)  # the thread is its own

    kind: Any = _orbax.CommitFuture if at_once else future.CommitFutureAwaitingContractedSignals
    found: future.Future = kind(write(), name="safetensors_save")
    return found


def _wait_captured(save: ItemSave, commit: future.Future) -> None:
    """Waits until the caller may change the arrays; raises where the background phase failed."""

    def writing() -> bool:
        try:
            commit.result(timeout=0)
        except TimeoutError:
            return True
        return False

    save.wait_captured(writing)


@ocp.args.register_with_handler(SafetensorsCheckpointHandler, for_save=True)
@dataclasses.dataclass
class SafetensorsSave(ocp.args.CheckpointArgs):
    """What to save as a safetensors checkpoint.

    Attributes:
        item: Any pytree of `jax.Array`s (plain, or of typed PRNG keys), numpy arrays and scalars,
            and Python numbers, booleans and strings.
        save_args: A tree of the item's structure of `ocp.SaveArgs`, or None in their place; their
            `dtype` is the one that an array is written in; not with a mapping.
        mapping: What the leaves are made of, as for `osl.save`.
        custom_metadata: A JSON value, given back by `metadata`.
    """

    item: Any
    save_args: Any = None
    _: dataclasses.KW_ONLY
    mapping: LeafMapping | None = None
    custom_metadata: Any = None


@ocp.args.register_with_handler(SafetensorsCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class SafetensorsRestore(ocp.args.CheckpointArgs):
    """What to restore from a safetensors checkpoint.

    Attributes:
        item: The tree that is wanted. Leaves may be all that `osl.load` takes: abstract or
            concrete arrays, `...`, Python scalars and strings, the leaves of `metadata`. Without
            an item, `restore_args` gives the structure; without either, everything is loaded.
        restore_args: A tree of the item's structure of `ocp.RestoreArgs` and
            `ocp.ArrayRestoreArgs`; what they say of a leaf overrides the item.
        mapping: What the leaves are made of, as for `osl.load`.
        partial_restore: Let the checkpoint hold tensors that the item does not name; otherwise
            they are an error.
    """

    item: Any = None
    restore_args: Any = None
    _: dataclasses.KW_ONLY
    mapping: LeafMapping | None = None
    partial_restore: bool = False


SAVE_AND_RESTORE = (
    SafetensorsSave,
    ocp.args.StandardSave,
    ocp.args.PyTreeSave,
    SafetensorsRestore,
    ocp.args.StandardRestore,
    ocp.args.PyTreeRestore,
)
"""Arguments that the handler takes."""

_orbax.add_args(SafetensorsCheckpointHandler, SAVE_AND_RESTORE)
