"""Orbax v1: the layout that a context takes, for checkpoints without any file of Orbax's, too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import discover, is_safetensors_checkpoint
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    StorageError,
    listed,
)
from orbax_safetensors_layout.load import LoadRequest, telling_others
from orbax_safetensors_layout.storage import open_storage

from . import _orbax, routing, settings
from .background import in_background
from .item import InvalidLayoutError, is_orbax_item
from .metadata import CheckpointMetadata, metadata_v1
from .v0 import SafetensorsCheckpointHandler, SafetensorsRestore, SafetensorsSave
from .v1 import begin_load_v1

_NOT_GIVEN: Any = object()


class SafetensorsLayout(SafetensorsCheckpointHandler):
    """The `CheckpointLayout` of safetensors checkpoints; each process its own shards' bytes.

    A file, or a folder that is a checkpoint itself, holds one checkpointable; its name is
    `"state"`, or None. Any other folder holds one under the name of each subfolder that is a
    checkpoint, as in a step that Orbax saved, or a pipeline repository of Hugging Face diffusers.

    `context.checkpoint_layout = SafetensorsLayout`, or an instance, makes Orbax's functions use it,
    and `ocp.training.Checkpointer`, which then saves every pytree of a step as safetensors.
    `using(mapping=..., read=..., write=...)`, what the instance was made with, and the `memory` and
    `safetensors` options of Orbax's context say how to read and write, in this order.

    `ocp.Checkpointer`, `ocp.AsyncCheckpointer` and `ocp.CheckpointManager(item_handlers=...)` of
    Orbax v0 take one as their handler; it does what `SafetensorsCheckpointHandler` does.

    Examples:
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

    async def get_checkpointable_names(self, path: ocp.path.Path) -> list[str]:
        """Names of the trees at `path`, `"state"` first, the others sorted; also of Orbax's own."""
        return await in_background(_tree_names, path)

    async def validate_checkpointables(self, path: ocp.path.Path) -> None:
        """Checks, by names alone, that there is a checkpoint; else Orbax's `InvalidLayoutError`."""
        await in_background(_required_items, path)

    async def validate(self, path: ocp.path.Path, checkpointable_name: str | None) -> None:
        """Checks, by names alone, that it is there; else Orbax's `InvalidLayoutError`."""
        if theirs := await _orbaxs(path, checkpointable_name):
            await theirs.validate(path, checkpointable_name)
        else:
            await in_background(_locate, path, checkpointable_name)

    def metadata(self, path: Any, checkpointable_name: str | None = _NOT_GIVEN) -> Any:
        """Shapes and dtypes of one checkpointable; a coroutine, but for Orbax v0's path alone."""
        if checkpointable_name is _NOT_GIVEN:
            return super().metadata(path)
        return self._metadata(path, checkpointable_name)

    async def _metadata(
        self, path: ocp.path.Path, checkpointable_name: str | None
    ) -> ocp.CheckpointMetadata[Any]:
        if theirs := await _orbaxs(path, checkpointable_name):
            return await theirs.metadata(path, checkpointable_name)
        mapping = settings.current(self.own).mapping
        item = await in_background(_locate, path, checkpointable_name)
        return await _with_record(path, await in_background(metadata_v1, item, mapping))

    async def checkpointables_metadata(
        self, path: ocp.path.Path
    ) -> ocp.CheckpointMetadata[dict[str, Any]]:
        """Shapes and dtypes of all, by name; custom metadata that Orbax did not record likewise."""
        mapping = settings.current(self.own).mapping
        items = await in_background(_items, path)
        read = {name: await in_background(metadata_v1, items[name], mapping) for name in items}
        custom = {name: metadata.custom for name, metadata in read.items()}
        times = [m.modified_nsecs for m in read.values() if m.modified_nsecs is not None]
        trees = {name: metadata.tree for name, metadata in read.items()}
        for name in await in_background(_orbax_names, path, items):
            trees[name] = (await (await _orbax.orbaxs_layout(path)).metadata(path, name)).metadata
        metadata = CheckpointMetadata(
            {name: trees[name] for name in sorted(trees, key=_order)},
            custom if len(custom) != 1 else next(iter(custom.values())),
            max(times, default=None),
        )
        return await _with_record(path, metadata)

    async def load(
        self,
        path: ocp.path.Path,
        checkpointable_name: str | None = None,
        abstract_state: Any = None,
    ) -> Awaitable[Any]:
        """Checks path and headers; what it returns holds the tree against them, and loads."""
        if theirs := await _orbaxs(path, checkpointable_name):
            loading: Awaitable[Any] = await theirs.load(path, checkpointable_name, abstract_state)
            return loading

        def begin() -> Callable[[], Any]:
            mapping = settings.current(self.own).mapping
            options = settings.read_options_v1(self.own)
            with telling_others(path, LoadRequest(abstract_state, mapping, None, options)):
                item_path = _locate(path, checkpointable_name)
            return begin_load_v1(item_path, abstract_state, mapping, options)()

        try:
            return in_background(await in_background(begin))
        except (FormatError, StorageError, InvalidLayoutError):
            raise
        except Exception as error:  # of the tree or an option: where Orbax raises it
            return _raising(error)

    async def load_checkpointables(
        self, path: ocp.path.Path, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> Awaitable[dict[str, Any]]:
        """Loads checkpointables by name, each with the handler that saved it; see `load`."""
        items = await in_background(_items, path)
        others = await in_background(_other_names, path, items)
        names = [*items, *others]
        abstracts = dict(abstract_checkpointables or dict.fromkeys(names))
        absent = [name for name in abstracts if name not in names]
        if absent:
            raise InvalidLayoutError(
                "the checkpoint does not hold these checkpointables",
                file=path,
                expected=listed(absent),
                found=listed(names),
            )
        options, mapping = settings.read_options_v1(self.own), settings.current(self.own).mapping

        begins = {
            name: begin_load_v1(items[name], abstract, mapping, options)
            for name, abstract in abstracts.items()
            if name in items
        }

        def load_ours() -> dict[str, Any]:
            return {name: begin()() for name, begin in begins.items()}

        theirs = {name: abstract for name, abstract in abstracts.items() if name in others}
        if not theirs:
            return in_background(load_ours)
        loading = await (await _orbax.orbaxs_layout(path)).load_checkpointables(path, theirs)
        ours = in_background(load_ours)

        async def load_all() -> dict[str, Any]:
            loaded = await ours | await loading
            return {name: loaded[name] for name in abstracts}

        return load_all()

    async def save_checkpointables(
        self, path: ocp.path.PathAwaitingCreation, *, checkpointables: Mapping[str, Any]
    ) -> Awaitable[None]:
        """Copies this process's shards to the host; files are written when awaited."""
        context = _orbax.get_context()
        handlers = {
            name: routing.handler_for_save(context.checkpointables.registry, value, name, self.own)
            for name, value in checkpointables.items()
        }
        writing = [
            await handlers[name].save(path / name, value) for name, value in checkpointables.items()
        ]

        async def write() -> None:
            await asyncio.gather(*writing)
            folder = await path.await_creation()
            if ocp.multihost.is_primary_host(context.multiprocessing.primary_host):
                # By this file Orbax knows a checkpoint of v1.
                await in_background((folder / _orbax.STEP_INDICATOR).touch, exist_ok=True)

        return write()


class _Save(SafetensorsSave): ...  # what `ocp.Checkpointer(SafetensorsLayout())` makes of a tree


class _Restore(SafetensorsRestore): ...  # and of a path alone


_orbax.register_args(SafetensorsLayout, _Save, _Restore)
routing.connect(SafetensorsLayout)

_install_lock = threading.Lock()
_previous: Any = None


def install() -> None:
    """Makes `checkpoint_layout = "safetensors"`, and detection by `"auto"`, mean our layout.

    In a context of that layout every pytree is then saved as safetensors, also by
    `ocp.training.Checkpointer`, which otherwise would write Orbax's own format under that name;
    `ocp.partial.save`, which knows that format only, is refused. What was saved so is also found
    by `"auto"`, whose own saves stay in Orbax's format.

    For the whole process, until `uninstall`. Calling it again does nothing.

    Raises:
        SafetensorsLayoutError: This version of Orbax resolves layouts or handlers in another way.

    Examples:
        >>> import tempfile, numpy as np
        >>> import orbax.checkpoint.experimental.v1 as ocp
        >>> path = f"{tempfile.mkdtemp()}/checkpoint"
        >>> install()
        >>> ctx = ocp.Context()
        >>> ctx.checkpoint_layout = "safetensors"
        >>> with ctx:
        ...     ocp.save(path, {"weight": np.arange(4.0, dtype=np.float32)})
        ...     ocp.load(path)
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
        >>> uninstall()
    """
    global _previous
    with _install_lock:
        if routing.is_installed():
            return
        _previous = _orbax.safetensors.SafetensorsLayout
        _orbax.safetensors.SafetensorsLayout = SafetensorsLayout
        try:
            routing.check(ocp.options.CheckpointLayout.SAFETENSORS, SafetensorsLayout)
        except BaseException:
            _orbax.safetensors.SafetensorsLayout = _previous
            raise


def uninstall() -> None:
    """Puts back what `install` replaced, unless another library has put something there since."""
    with _install_lock:
        if routing.is_installed():
            _orbax.safetensors.SafetensorsLayout = _previous


async def _with_record(path: ocp.path.Path, own: CheckpointMetadata) -> ocp.CheckpointMetadata[Any]:
    """Metadata with the times and custom metadata of Orbax's record of the step, if it has one."""
    fields = {"commit_timestamp_nsecs": own.modified_nsecs, "custom_metadata": own.custom}
    if (path / _orbax.STEP_METADATA).exists():
        record = await _orbax.read_step_metadata(path)
        fields = {name: getattr(record, name) for name in ("init_timestamp_nsecs", *fields)}
    return ocp.CheckpointMetadata(path, metadata=own.tree, **fields)


async def _raising(error: Exception) -> Any:
    raise error


def _items(path: ocp.path.Path) -> dict[str, ocp.path.Path]:
    if is_safetensors_checkpoint(path):
        return {_orbax.STATE: path}
    children = path.iterdir() if path.is_dir() else ()
    items = [child for child in children if child.is_dir() and is_safetensors_checkpoint(child)]
    items.sort(key=lambda item: _order(item.name))
    return {item.name: item for item in items}


def _order(name: str) -> tuple[bool, str]:
    return name != _orbax.STATE, name


def _tree_names(path: ocp.path.Path) -> list[str]:
    items = _items(path)
    return sorted([*items, *_orbax_names(path, items)], key=_order)


def _orbax_names(path: ocp.path.Path, items: Collection[str]) -> list[str]:
    """Names of the trees in Orbax's own format, beside items of ours."""
    return [name for name in _other_names(path, items) if is_orbax_item(path / name)]


async def _orbaxs(path: ocp.path.Path, name: str | None) -> Any:
    """Orbax's layout, where a checkpointable is a tree in Orbax's own format; else None."""
    if name is None or await in_background(is_safetensors_checkpoint, path):
        return None
    names = await in_background(_orbax_names, path, ())
    return await _orbax.orbaxs_layout(path) if name in names else None


def _required_items(path: ocp.path.Path) -> dict[str, ocp.path.Path]:
    items = _items(path)
    if not items:
        storage, place = open_storage(path)
        with storage:
            try:
                discover(storage, place)  # raises what is there instead
            except CheckpointNotFoundError as error:
                raise InvalidLayoutError(**vars(error)) from error.__cause__
    return items


def _other_names(path: ocp.path.Path, items: Collection[str]) -> list[str]:
    """Names of items that other handlers saved in a step of Orbax."""
    if not (path / _orbax.STEP_METADATA).exists():
        return []
    others = {child.name for child in path.iterdir() if child.is_dir()}
    return sorted(others.difference(items, _orbax.RESERVED))


def _locate(path: ocp.path.Path, name: str | None) -> ocp.path.Path:
    """The path of a checkpointable; None is `path` itself. The others are not looked at."""
    if is_safetensors_checkpoint(path):
        if name in (None, _orbax.STATE):
            return path
    elif name is not None and is_safetensors_checkpoint(path / name):
        return path / name
    items = _required_items(path)
    missing = "a checkpoint of its own" if name is None else f"a checkpointable named '{name}'"
    raise InvalidLayoutError(
        f"the checkpoint does not hold {missing}",
        file=path,
        found=listed(_tree_names(path) or items),
    )
