"""Orbax v1: the layout that a context takes.

It reads checkpoints that others wrote, without any file of Orbax's beside them:

    context = ocp.Context()
    context.checkpoint_layout = osl.SafetensorsLayout
    with context:
        state = ocp.load(folder, abstract_state)
        ocp.save(path, state)

After `osl.install()`, `"safetensors"` (and `"auto"`, for loading) mean this layout, too.

It is a handler of Orbax v0, too: `ocp.Checkpointer(osl.SafetensorsLayout())`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import CheckpointNotFoundError
from orbax_safetensors_layout.load import load, load_catalog

from . import _orbax, settings, v1
from .background import in_background
from .metadata import CheckpointMetadata
from .remains import check_remains
from .routing import LayoutOption, connect, handler_for_save
from .settings import Settings
from .strictness import open_item
from .v0 import (
    SafetensorsCheckpointHandler,
    SafetensorsRestore,
    SafetensorsSave,
)

_NOT_GIVEN: Any = object()


class SafetensorsLayout(SafetensorsCheckpointHandler):
    """The `CheckpointLayout` of safetensors checkpoints; each process its own shards' bytes.

    A file, or a folder that is a checkpoint itself, holds one checkpointable; its name is
    `"state"`, or None. A folder that is none holds one under the name of each subfolder that is,
    as in a step that Orbax saved, or a pipeline repository of Hugging Face diffusers.

    `context.checkpoint_layout = SafetensorsLayout`, or an instance, makes Orbax's functions use it,
    and `ocp.training.Checkpointer`, which then saves every pytree of a step as safetensors.
    `using(mapping=..., read=..., write=...)`, what the instance was made with, and the `memory` and
    `safetensors` options of Orbax's context say how to read and write, in this order.

    `ocp.Checkpointer`, `ocp.AsyncCheckpointer` and `ocp.CheckpointManager(item_handlers=...)` of
    Orbax v0 take one as their handler; it does what `SafetensorsCheckpointHandler` does.

    Example:
        >>> import tempfile, numpy as np, orbax.checkpoint as ocp_v0
        >>> folder = f"{tempfile.mkdtemp()}/checkpoint"
        >>> checkpointer = ocp_v0.Checkpointer(SafetensorsLayout())
        >>> checkpointer.save(folder, {"weight": np.arange(4.0, dtype=np.float32)})
        >>> checkpointer.restore(folder)
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
        >>> context = ocp.Context()
        >>> context.checkpoint_layout = SafetensorsLayout
        >>> with context:
        ...     ocp.load(folder)
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
    """

    @property
    def _own(self) -> Settings:
        return Settings(read=self._read, write=self._write, mapping=self._mapping)

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

    def metadata(self, path: Any, checkpointable_name: str | None = _NOT_GIVEN) -> Any:
        """Shapes and dtypes of one checkpointable; its name is what tells Orbax v1 from v0.

        Returns:
            For v0, which gives a path alone, what `SafetensorsCheckpointHandler.metadata` returns.
            For v1 a coroutine of the metadata: the tree as `v1.describe` gives it. The times and
            the custom metadata are those that Orbax recorded; without a record, when the last file
            was written and the strings of `__metadata__`.
        """
        if checkpointable_name is _NOT_GIVEN:
            return super().metadata(path)
        return self._metadata(path, checkpointable_name)

    async def _metadata(
        self, path: ocp.path.Path, checkpointable_name: str | None
    ) -> ocp.CheckpointMetadata[Any]:
        found = await in_background(_locate, path, checkpointable_name)
        contents = await in_background(
            CheckpointMetadata.read, found, settings.current(self._own).mapping
        )
        record = await _read_record(path)
        if record is not None:
            return _recorded(path, record, v1.describe(contents))
        return ocp.CheckpointMetadata(
            path,
            metadata=v1.describe(contents),
            commit_timestamp_nsecs=contents.modified_nsecs,
            custom_metadata=contents.custom_metadata,
        )

    async def checkpointables_metadata(
        self, path: ocp.path.Path
    ) -> ocp.CheckpointMetadata[dict[str, Any]]:
        """Shapes and dtypes of all checkpointables, by name; see `metadata`.

        Without a record of Orbax, `custom_metadata` has the strings of one alone, or else those of
        each under its name.
        """
        names = await in_background(_names, path)
        found = {name: await self.metadata(path, name) for name in names}
        trees = {name: metadata.metadata for name, metadata in found.items()}
        record = await _read_record(path)
        if record is not None:
            return _recorded(path, record, trees)
        custom = {name: metadata.custom_metadata for name, metadata in found.items()}
        written = [metadata.commit_timestamp_nsecs for metadata in found.values()]
        return ocp.CheckpointMetadata(
            path,
            metadata=trees,
            commit_timestamp_nsecs=max((at for at in written if at is not None), default=None),
            custom_metadata=custom[names[0]] if len(names) == 1 else custom,
        )

    async def load(
        self,
        path: ocp.path.Path,
        checkpointable_name: str | None = None,
        abstract_state: Any = None,
    ) -> Awaitable[Any]:
        """Loads one checkpointable in two phases, as Orbax's own layouts do.

        Here settings are taken, and the headers of what is wanted are read and checked; tensors are
        read when the result is awaited.

        Args:
            path: A `.safetensors` file or a folder.
            checkpointable_name: Which one; see the class.
            abstract_state: The wanted tree, of any structure, with the leaves that `osl.load`
                takes. None loads everything: what this package saved as it was saved, a checkpoint
                of others as a flat dict of numpy arrays.

        Raises:
            InvalidLayoutError: It is not there.
            FormatError: A header, the index or the manifest is malformed, or a file is truncated.
            ValueError: An option of Orbax's context is invalid.
        """
        found = await in_background(_locate, path, checkpointable_name)
        options, mapping = settings.read_options_v1(self._own), settings.current(self._own).mapping
        opening = await in_background(open_item, found, abstract_state, mapping, options)
        return in_background(
            load_catalog, opening, found, abstract_state, mapping=mapping, options=options
        )

    async def load_checkpointables(
        self, path: ocp.path.Path, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> Awaitable[dict[str, Any]]:
        """Loads several checkpointables, one after the other; see `load`.

        Args:
            path: A `.safetensors` file or a folder.
            abstract_checkpointables: The wanted trees by name; None, also for a single one, loads
                everything. What other handlers saved in the same step, they load.

        Raises:
            CheckpointNotFoundError: Some of the names are not there.
        """
        names = await in_background(_names, path)
        others = await in_background(_other_names, path, names)
        wanted = dict(abstract_checkpointables or dict.fromkeys([*names, *others]))
        absent = [name for name in wanted if name not in names and name not in others]
        if absent:
            raise CheckpointNotFoundError(
                "the checkpoint does not hold these checkpointables",
                file=path,
                expected=", ".join(absent),
                found=", ".join([*names, *others]),
            )
        options, mapping = settings.read_options_v1(self._own), settings.current(self._own).mapping

        def load_one(name: str) -> Any:
            found = _locate(path, name)
            check_remains(found)
            return load(found, wanted[name], mapping=mapping, options=options)

        def load_ours() -> dict[str, Any]:
            return {name: load_one(name) for name in wanted if name in names}

        theirs = {name: abstract for name, abstract in wanted.items() if name in others}
        if not theirs:
            return in_background(load_ours)
        loading = await (await _orbax.orbaxs_layout(path)).load_checkpointables(path, theirs)
        return _join(wanted, in_background(load_ours), loading)

    async def save_checkpointables(
        self, path: ocp.path.PathAwaitingCreation, *, checkpointables: Mapping[str, Any]
    ) -> Awaitable[None]:
        """Copies what this process writes to the host; files are written when awaited.

        Every pytree becomes a folder of its own, as with `SafetensorsHandler`. What other
        checkpointables have handlers for, is left to them.

        Args:
            path: The folder of the checkpoint.
            checkpointables: What to save, by name.

        Raises:
            ValueError: A tree is an empty container.
            SafetensorsLayoutError: Leaves that cannot be saved.
        """
        context = _orbax.get_context()
        resolve, known = _orbax.get_hooks().for_save, context.checkpointables.registry
        handlers = {
            name: handler_for_save(resolve, known, value, name, self._own)
            for name, value in checkpointables.items()
        }
        writing = [
            await handlers[name].save(path / name, value) for name, value in checkpointables.items()
        ]
        return _write(path, writing, context.multiprocessing.primary_host)


class _Save(SafetensorsSave):
    """What `ocp.Checkpointer(SafetensorsLayout()).save(path, tree)` makes of a plain tree."""


class _Restore(SafetensorsRestore):
    """What `ocp.Checkpointer(SafetensorsLayout()).restore(path)` asks for."""


_orbax.register_args(SafetensorsLayout, _Save, _Restore)


def _option(value: Any) -> LayoutOption | None:
    """What a context holds whose `checkpoint_layout` is set to this layout."""
    if isinstance(value, type) and issubclass(value, SafetensorsLayout):
        value = value()
    return LayoutOption(value, value._own) if isinstance(value, SafetensorsLayout) else None


connect(SafetensorsLayout, _option)


async def _write(
    path: ocp.path.PathAwaitingCreation, writing: list[Awaitable[None]], primary_host: int | None
) -> None:
    """Writes everything, and what tells Orbax that the folder is a checkpoint of v1."""
    await asyncio.gather(*writing)
    folder = await path.await_creation()
    if ocp.multihost.is_primary_host(primary_host):
        await in_background((folder / _orbax.STEP_INDICATOR).touch, exist_ok=True)


async def _join(wanted: Mapping[str, Any], *loading: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in loading:
        found |= await one
    return {name: found[name] for name in wanted}


async def _read_record(path: ocp.path.Path) -> Any:
    """What Orbax recorded about a step; None for a folder that it did not save."""
    if not (path / _orbax.STEP_METADATA).exists():
        return None
    return await _orbax.read_step_metadata(path)


def _recorded(path: ocp.path.Path, record: Any, metadata: Any) -> ocp.CheckpointMetadata[Any]:
    return ocp.CheckpointMetadata(
        path,
        metadata=metadata,
        init_timestamp_nsecs=record.init_timestamp_nsecs,
        commit_timestamp_nsecs=record.commit_timestamp_nsecs,
        custom_metadata=record.custom_metadata,
    )


def _names(path: ocp.path.Path) -> list[str]:
    if is_safetensors_checkpoint(path):
        return [_orbax.STATE]
    if not path.is_dir():
        return []
    names = [child.name for child in path.iterdir() if child.is_dir()]
    found = [name for name in names if is_safetensors_checkpoint(path / name)]
    return sorted(found, key=lambda name: (name != _orbax.STATE, name))


def _other_names(path: ocp.path.Path, names: list[str]) -> list[str]:
    """What other handlers saved in a step of Orbax."""
    if not (path / _orbax.STEP_METADATA).exists():
        return []
    others = {child.name for child in path.iterdir() if child.is_dir()}
    return sorted(others.difference(names, _orbax.RESERVED))


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
