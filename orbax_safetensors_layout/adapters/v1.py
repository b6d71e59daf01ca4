"""Orbax v1: the layout behind `checkpoint_layout = "safetensors"`, and a handler for items.

The layout reads checkpoints that others wrote, without any file of Orbax's beside them. Orbax
resolves layouts by name from a fixed table, so `install` puts this one in the place of its own:

    osl.install()
    context = ocp.Context()
    context.checkpoint_layout = "safetensors"  # or "auto"
    with context:
        state = ocp.load(folder, abstract_state)

The handler serves single items of checkpoints in Orbax's own layout, through `context`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Mapping
from typing import Any, NoReturn

import jax
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.adapters import _orbax, settings
from orbax_safetensors_layout.adapters.background import in_background
from orbax_safetensors_layout.adapters.contents import Contents
from orbax_safetensors_layout.adapters.strictness import load_item
from orbax_safetensors_layout.errors import CheckpointNotFoundError, SafetensorsLayoutError
from orbax_safetensors_layout.format.survey import is_safetensors_checkpoint
from orbax_safetensors_layout.load import load

_SCALARS = (bool, int, float)
_install_lock = threading.Lock()
_replaced: Any = None


class SafetensorsLayout:
    """The `CheckpointLayout` of safetensors checkpoints; each process reads its shards' bytes.

    A file, or a folder that is a checkpoint itself, holds one checkpointable; its name is
    `"state"`, or None. A folder that is none holds one under the name of each subfolder that is,
    as in a pipeline repository of Hugging Face diffusers.

    Orbax makes layouts itself, without arguments; `using(read=...)` and the `memory` and
    `safetensors` options of Orbax's context say how to read.
    """

    async def get_checkpointable_names(self, path: ocp.path.Path) -> list[str]:
        """Names of what is at `path`, `"state"` first, the others sorted."""
        return await in_background(_names, path)

    async def validate_checkpointables(self, path: ocp.path.Path) -> None:
        """Checks, by names alone, that there is a checkpoint.

        Raises:
            InvalidLayoutError: There is none.
        """
        if not await in_background(_names, path):
            raise ocp.errors.InvalidLayoutError(await in_background(_why_not, path))

    async def validate(self, path: ocp.path.Path, checkpointable_name: str | None) -> None:
        """Checks, by names alone, that the named checkpointable is there.

        Raises:
            InvalidLayoutError: It is not.
        """
        await in_background(_locate, path, checkpointable_name)

    async def metadata(
        self, path: ocp.path.Path, checkpointable_name: str | None
    ) -> ocp.CheckpointMetadata[Any]:
        """Shapes and dtypes of one checkpointable.

        Returns:
            Its metadata: a flat dict from tensor name to `jax.ShapeDtypeStruct`, the strings of
            `__metadata__` as `custom_metadata`, and when the last of its files was written.
        """
        found = await in_background(_locate, path, checkpointable_name)
        contents = await in_background(Contents.read, found)
        return ocp.CheckpointMetadata(
            path,
            metadata=_abstract(contents),
            commit_timestamp_nsecs=contents.modified_nsecs,
            custom_metadata=dict(contents.custom_metadata),
        )

    async def checkpointables_metadata(
        self, path: ocp.path.Path
    ) -> ocp.CheckpointMetadata[dict[str, Any]]:
        """Shapes and dtypes of all checkpointables, by name; see `metadata`.

        `custom_metadata` has the strings of one alone, or else those of each under its name.
        """
        names = await in_background(_names, path)
        found = {name: await self.metadata(path, name) for name in names}
        custom = {name: metadata.custom_metadata for name, metadata in found.items()}
        written = [metadata.commit_timestamp_nsecs for metadata in found.values()]
        return ocp.CheckpointMetadata(
            path,
            metadata={name: metadata.metadata for name, metadata in found.items()},
            commit_timestamp_nsecs=max((at for at in written if at is not None), default=None),
            custom_metadata=custom[names[0]] if len(names) == 1 else custom,
        )

    async def load(
        self,
        path: ocp.path.Path,
        checkpointable_name: str | None = None,
        abstract_state: Any = None,
    ) -> Awaitable[Any]:
        """Loads one checkpointable; settings are taken here, reading is done when awaited.

        Args:
            path: A `.safetensors` file or a folder.
            checkpointable_name: Which one; see the class.
            abstract_state: The wanted tree, of any structure, with the leaves that `osl.load`
                takes. None loads everything as a flat dict of numpy arrays.
        """
        found = await in_background(_locate, path, checkpointable_name)
        return in_background(load, found, abstract_state, options=settings.read_options_v1())

    async def load_checkpointables(
        self, path: ocp.path.Path, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> Awaitable[dict[str, Any]]:
        """Loads several checkpointables, one after the other; see `load`.

        Args:
            path: A `.safetensors` file or a folder.
            abstract_checkpointables: The wanted trees by name; None, also for a single one, loads
                everything.

        Raises:
            CheckpointNotFoundError: Some of the names are not there.
        """
        names = await in_background(_names, path)
        wanted = abstract_checkpointables or dict.fromkeys(names)
        absent = [name for name in wanted if name not in names]
        if absent:
            raise CheckpointNotFoundError(
                "the checkpoint does not hold these checkpointables",
                file=path,
                expected=", ".join(absent),
                found=", ".join(names),
            )
        options = settings.read_options_v1()

        def load_all() -> dict[str, Any]:
            return {
                name: load(_locate(path, name), abstract, options=options)
                for name, abstract in wanted.items()
            }

        return in_background(load_all)

    async def save_checkpointables(
        self, path: Any, *, checkpointables: Mapping[str, Any]
    ) -> NoReturn:
        """Refuses: this version reads safetensors and does not write them.

        Raises:
            SafetensorsLayoutError: Always.
        """
        raise _saves_nothing(path)


class SafetensorsHandler(ocp.CheckpointableHandler[Any, Any]):
    """The `CheckpointableHandler` for an item whose folder holds safetensors files.

    As with Orbax's own handler, a tree that does not name the whole checkpoint is an error unless
    `ctx.pytree.loading.partial_load` is set.
    """

    async def load(
        self, directory: ocp.path.Path, abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        """Loads the item; settings are taken here, reading is done when awaited.

        Args:
            directory: The item's folder.
            abstract_checkpointable: The wanted tree; None loads everything as a flat dict of
                numpy arrays.
        """
        return in_background(
            load_item,
            directory,
            abstract_checkpointable,
            options=settings.read_options_v1(),
            partial=_orbax.get_context().pytree.loading.partial_load,
            switch="`context.pytree.loading.partial_load = True`",
        )

    async def metadata(self, directory: ocp.path.Path) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes, as a flat dict that also serves as the tree to load."""
        return _abstract(await in_background(Contents.read, directory))

    async def save(self, directory: Any, checkpointable: Any) -> NoReturn:
        """Refuses: this version reads safetensors and does not write them.

        Raises:
            SafetensorsLayoutError: Always.
        """
        raise _saves_nothing(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether it can be saved: never, in this version."""
        return False

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Whether it is a tree of leaves that `osl.load` takes."""
        # Orbax silently turns to its own pytree handler for what is refused here.
        return all(map(_is_abstract_leaf, jax.tree.leaves(abstract_checkpointable)))


def context(*item_names: str) -> ocp.Context:
    """A new Orbax context that gives these items to `SafetensorsHandler`.

    Args:
        *item_names: The items; `"state"` is the one that `ocp.load` and `ocp.training.Checkpointer`
            use where none is named. Others keep Orbax's handlers.

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
            registry.add(handler, checkpointable_name=name, secondary_typestrs=typestrs)
    for name in item_names:
        registry.add(SafetensorsHandler, checkpointable_name=name)
    made = ocp.Context()
    made.checkpointables.registry = registry
    return made


def install() -> None:
    """Makes `checkpoint_layout = "safetensors"`, and detection by `"auto"`, mean our layout.

    For the whole process, until `uninstall`. Calling it again does nothing.

    Raises:
        SafetensorsLayoutError: This version of Orbax resolves its layouts in another way.

    Example:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> import orbax.checkpoint.experimental.v1 as ocp
        >>> folder = tempfile.mkdtemp()
        >>> tensors = {"weight": np.arange(4.0, dtype=np.float32)}
        >>> safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")
        >>> install()
        >>> ctx = ocp.Context()
        >>> ctx.checkpoint_layout = "safetensors"
        >>> with ctx:
        ...     ocp.load(folder)
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
        >>> uninstall()
    """
    global _replaced
    with _install_lock:
        if _orbax.layout_class() is SafetensorsLayout:
            return
        previous = _orbax.set_layout_class(SafetensorsLayout)
        if _orbax.layout_class() is not SafetensorsLayout:
            _orbax.set_layout_class(previous)
            raise SafetensorsLayoutError(
                "this version of Orbax does not take the layout that is installed",
                found=f"orbax-checkpoint {_orbax.version()}",
                hint="Use `osl.load`, or the handlers of Orbax v0.",
            )
        _replaced = previous


def uninstall() -> None:
    """Puts back what `install` replaced. Without an `install` it does nothing."""
    global _replaced
    with _install_lock:
        if _replaced is not None and _orbax.layout_class() is SafetensorsLayout:
            _orbax.set_layout_class(_replaced)
        _replaced = None


def _names(path: ocp.path.Path) -> list[str]:
    if is_safetensors_checkpoint(path):
        return [_orbax.STATE]
    if not path.is_dir():
        return []
    names = [child.name for child in path.iterdir() if child.is_dir()]
    found = [name for name in names if is_safetensors_checkpoint(path / name)]
    return sorted(found, key=lambda name: (name != _orbax.STATE, name))


def _locate(path: ocp.path.Path, name: str | None) -> ocp.path.Path:
    """The path of a checkpointable."""
    if is_safetensors_checkpoint(path):
        if name in (None, _orbax.STATE):
            return path
    elif name is not None and is_safetensors_checkpoint(path / name):
        return path / name
    names = _names(path)
    if not names:
        raise ocp.errors.InvalidLayoutError(_why_not(path))
    wanted = "a checkpoint of its own" if name is None else f"a checkpointable named '{name}'"
    raise ocp.errors.InvalidLayoutError(
        f"'{path}' does not hold {wanted}; it holds: {', '.join(names)}."
    )


def _why_not(path: ocp.path.Path) -> str:
    if path.is_dir():
        return f"Directory '{path}' does not contain any '.safetensors' files, nor does one in it."
    if path.exists():
        return f"File '{path}' does not have a '.safetensors' suffix."
    return f"Path '{path}' is neither a file nor a directory or does not exist."


def _abstract(contents: Contents) -> dict[str, jax.ShapeDtypeStruct]:
    struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax
    return {
        name: struct(entry.shape, entry.dtype.numpy) for name, entry in contents.tensors.items()
    }


def _is_abstract_leaf(leaf: Any) -> bool:
    if isinstance(leaf, type):
        return issubclass(leaf, _SCALARS)
    if leaf is ... or isinstance(leaf, _SCALARS) or hasattr(leaf, "restore_type"):
        return True
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _saves_nothing(path: Any) -> SafetensorsLayoutError:
    path = getattr(path, "path", path)
    return SafetensorsLayoutError(
        "this version of orbax_safetensors_layout reads checkpoints and does not save them",
        file=path if isinstance(path, str | os.PathLike) else None,
        hint='Save with `checkpoint_layout = "orbax"` and Orbax\'s own handlers.',
    )
