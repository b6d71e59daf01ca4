"""Orbax v0: the handler for `ocp.Checkpointer` and `ocp.CheckpointManager`.

A folder of published weights is restored as it stands, with nothing added to it:

    checkpointer = ocp.Checkpointer(osl.SafetensorsCheckpointHandler())
    state = checkpointer.restore(folder, args=osl.SafetensorsRestore(abstract_state))

`ocp.Checkpointer` takes folders only: for the path of a single file Orbax says "Found incomplete
checkpoint" before any handler is asked. Give the folder, or use `osl.load` or `ocp.load`.

As a step of a `CheckpointManager`, the folder stands under the name of an item of its own, most
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

import dataclasses
import os
from typing import Any, NoReturn

import orbax.checkpoint as ocp

from orbax_safetensors_layout.adapters import _orbax, settings
from orbax_safetensors_layout.adapters.contents import Contents
from orbax_safetensors_layout.adapters.restore_args import abstract_tree
from orbax_safetensors_layout.adapters.strictness import load_item
from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.options import ReadOptions


class SafetensorsCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Restores safetensors checkpoints in Orbax v0; each process reads its own shards' bytes.

    Args:
        read: How to read, where no `using(read=...)` block says otherwise. Its `strict` does not
            count: in v0, `partial_restore` of the restore arguments decides that.

    Example:
        >>> import tempfile, jax, numpy as np, safetensors.numpy, orbax.checkpoint as ocp
        >>> folder = tempfile.mkdtemp()
        >>> tensors = {"layer.weight": np.arange(4.0, dtype=np.float32)}
        >>> safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")
        >>> tree = {"layer": {"weight": jax.ShapeDtypeStruct((4,), np.float32)}}
        >>> checkpointer = ocp.Checkpointer(SafetensorsCheckpointHandler())
        >>> checkpointer.restore(folder, args=SafetensorsRestore(tree))
        {'layer': {'weight': Array([0., 1., 2., 3.], dtype=float32)}}
    """

    def __init__(self, *, read: ReadOptions | None = None) -> None:
        self._read = read

    def restore(
        self, directory: os.PathLike[str], args: ocp.args.CheckpointArgs | None = None
    ) -> Any:
        """Restores the tree that the arguments ask for.

        Args:
            directory: The folder that holds the `.safetensors` files.
            args: `SafetensorsRestore`, `StandardRestore`, `PyTreeRestore`, or None to load
                everything as a flat dict of numpy arrays.

        Raises:
            CheckpointNotFoundError: No safetensors checkpoint stands there.
            FormatError: A file is malformed.
            MismatchError: Checkpoint and tree disagree.
            StorageError: A read failed.
        """
        return load_item(
            directory,
            abstract_tree(args),
            options=settings.current().read or self._read or ReadOptions(),
            partial=getattr(args, "partial_restore", False),
            switch="`SafetensorsRestore(..., partial_restore=True)`",
        )

    def metadata(self, directory: os.PathLike[str]) -> Any:
        """Name, shape and dtype of every tensor, and the files' `__metadata__`.

        Returns:
            A `TreeMetadata`, as from Orbax's own pytree handlers: a flat dict from tensor name to
            `ocp.metadata.ArrayMetadata`, which also serves as the tree to restore.
        """
        contents = Contents.read(directory)
        tree = {
            name: ocp.metadata.ArrayMetadata(
                name=name,
                directory=directory,
                shape=entry.shape,
                sharding=None,
                dtype=entry.dtype.numpy,
                storage=ocp.metadata.StorageMetadata(chunk_shape=entry.shape),
            )
            for name, entry in contents.tensors.items()
        }
        return _orbax.tree_metadata(tree, contents.custom_metadata)

    def save(self, directory: os.PathLike[str], *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: this version reads safetensors and does not write them.

        Raises:
            SafetensorsLayoutError: Always.
        """
        del args, kwargs
        raise _saves_nothing(directory)

    async def async_save(self, directory: os.PathLike[str], *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses, as `save` does.

        Raises:
            SafetensorsLayoutError: Always.
        """
        del args, kwargs
        raise _saves_nothing(directory)


def _saves_nothing(directory: os.PathLike[str]) -> SafetensorsLayoutError:
    return SafetensorsLayoutError(
        "this version of orbax_safetensors_layout reads checkpoints and does not save them",
        file=directory,
        hint="Save with a handler of Orbax's own, for instance through a second"
        " CheckpointManager without this handler_registry.",
    )


@ocp.args.register_with_handler(SafetensorsCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class SafetensorsRestore(ocp.args.CheckpointArgs):
    """What to restore from a safetensors checkpoint.

    Attributes:
        item: The tree that is wanted. Leaves may be all that `osl.load` takes: abstract or
            concrete arrays, `...`, Python scalars, the leaves of `metadata`. Without an item,
            `restore_args` gives the structure; without either, everything is loaded as a flat
            dict of numpy arrays.
        restore_args: A tree of the item's structure of `ocp.RestoreArgs` and
            `ocp.ArrayRestoreArgs`; what they say of a leaf overrides the item.
        partial_restore: Let the checkpoint hold tensors that the item does not name; otherwise
            they are an error.
    """

    item: Any = None
    restore_args: Any = None
    _: dataclasses.KW_ONLY
    partial_restore: bool = False


# Orbax takes a handler for a legacy one, and does not pass it arguments, unless it has both kinds.
@ocp.args.register_with_handler(SafetensorsCheckpointHandler, for_save=True)
@dataclasses.dataclass
class _RefusedSave(ocp.args.CheckpointArgs):
    item: Any = None
    save_args: Any = None


_RESTORES = (SafetensorsRestore, ocp.args.StandardRestore, ocp.args.PyTreeRestore)
# Registered too: Orbax would otherwise look for another handler, and fail with "already exists".
_SAVES = (_RefusedSave, ocp.args.StandardSave, ocp.args.PyTreeSave)


def handler_registry(
    *item_names: str, read: ReadOptions | None = None
) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """A registry that gives these items of a `CheckpointManager` to the safetensors handler.

    A pipeline's `StandardRestore` and `PyTreeRestore` calls work unchanged with it, and so do
    `restore(step)` without arguments and `item_metadata(step)`. Other items keep Orbax's handlers.

    Args:
        *item_names: The items; `"default"` is the one of a manager without named items.
        read: How to read; see `SafetensorsCheckpointHandler`.

    Example:
        >>> import pathlib, tempfile, numpy as np, safetensors.numpy, orbax.checkpoint as ocp
        >>> item = pathlib.Path(tempfile.mkdtemp()) / "0" / "default"
        >>> item.mkdir(parents=True)
        >>> tensors = {"weight": np.arange(4.0, dtype=np.float32)}
        >>> safetensors.numpy.save_file(tensors, item / "model.safetensors")
        >>> registry = handler_registry("default")
        >>> manager = ocp.CheckpointManager(item.parent.parent, handler_registry=registry)
        >>> manager.restore(manager.latest_step())
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    if not item_names:
        raise ValueError(
            'handler_registry needs the items\' names; one without names is "default".'
        )
    handler = SafetensorsCheckpointHandler(read=read)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name in item_names:
        for args in _SAVES + _RESTORES:
            registry.add(name, args, handler)
    return registry
