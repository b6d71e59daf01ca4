"""Every private orbax symbol that the package needs.

Checked against orbax-checkpoint 0.12.6 and 0.12.8. Nothing else in the package imports a module of
orbax whose name begins with an underscore.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.futures.future import CommitFuture
from orbax.checkpoint._src.futures.synchronization import (
    HandlerAwaitableSignal,
    OperationIdGenerator,
)
from orbax.checkpoint._src.handlers import composite_checkpoint_handler
from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata
from orbax.checkpoint._src.path import async_path, atomicity
from orbax.checkpoint.experimental.v1._src.context.context import get_context
from orbax.checkpoint.experimental.v1._src.handlers import registration, resolution
from orbax.checkpoint.experimental.v1._src.handlers.registration import NoEntryError
from orbax.checkpoint.experimental.v1._src.handlers.types import typestr
from orbax.checkpoint.experimental.v1._src.layout import (
    orbax_layout,
    registry,
    safetensors_layout,
)
from orbax.checkpoint.experimental.v1._src.layout.checkpoint_layout import (
    RESERVED_CHECKPOINTABLE_KEYS as RESERVED,
)
from orbax.checkpoint.experimental.v1._src.layout.checkpoint_layout import (
    STATE_CHECKPOINTABLE_KEY as STATE,
)
from orbax.checkpoint.experimental.v1._src.layout.orbax_layout import (
    CHECKPOINT_METADATA as STEP_METADATA,
)
from orbax.checkpoint.experimental.v1._src.layout.orbax_layout import (
    ORBAX_CHECKPOINT_INDICATOR_FILE as STEP_INDICATOR,
)
from orbax.checkpoint.experimental.v1._src.layout.orbax_layout import (
    PYTREE_METADATA_FILE as ITEM_METADATA,
)
from orbax.checkpoint.experimental.v1._src.partial.saving import _PartialSavePyTree as PartialSave
from orbax.checkpoint.experimental.v1._src.path import async_utils as path_async_utils
from orbax.checkpoint.experimental.v1._src.saving import saving

__all__ = [
    "ITEM_METADATA",
    "RESERVED",
    "STATE",
    "STEP_INDICATOR",
    "STEP_METADATA",
    "CommitFuture",
    "FoldersBeingMade",
    "Hooks",
    "NoEntryError",
    "PartialSave",
    "abandon_folders",
    "add_args",
    "count_as_data",
    "folders_being_made",
    "get_context",
    "get_hooks",
    "get_safetensors_layout",
    "handlers_used",
    "layout_used",
    "make_folder",
    "orbaxs_layout",
    "read_step_metadata",
    "register_args",
    "set_hooks",
    "set_safetensors_layout",
    "tree_metadata",
    "typestr",
    "version",
    "watch_folder_creation",
]

read_step_metadata = orbax_layout.read_checkpoint_metadata


class Hooks(NamedTuple):
    """Functions of Orbax that this package puts its own in front of; see `routing`.

    Attributes:
        layout_class: Resolves a context's `checkpoint_layout`.
        for_save: Finds the handler that saves a checkpointable.
        for_load: Finds the handler that loads one.
    """

    layout_class: Any
    for_save: Any
    for_load: Any


def get_hooks() -> Hooks:
    """The functions that Orbax calls now."""
    return Hooks(
        registry.get_layout_class,
        registration.resolve_handler_for_save,
        registration.resolve_handler_for_load,
    )


def set_hooks(hooks: Hooks) -> None:
    """Replaces them."""
    registry.get_layout_class = hooks.layout_class
    registration.resolve_handler_for_save = hooks.for_save
    registration.resolve_handler_for_load = hooks.for_load


def get_safetensors_layout() -> Any:
    """The class behind `checkpoint_layout = "safetensors"`."""
    return safetensors_layout.SafetensorsLayout


def set_safetensors_layout(layout: Any) -> None:
    """Replaces it."""
    safetensors_layout.SafetensorsLayout = layout


def layout_used(layout: Any) -> Any:
    """The layout that Orbax's own resolution makes for a context's `checkpoint_layout`."""
    # Without a path it awaits nothing, so it is driven by hand: no event loop is needed, and one
    # that runs already (a notebook) is not in the way.
    resolving = registry.get_layout_class(layout)
    try:
        resolving.send(None)
    except StopIteration as finished:
        return finished.value()
    finally:
        resolving.close()
    raise RuntimeError("Orbax's layout resolution waits for something")


async def orbaxs_layout(path: ocp.path.Path) -> Any:
    """What reads a step that Orbax saved, with either API."""
    kind: Any = await registry.get_layout_class(ocp.options.CheckpointLayout.ORBAX, path)
    return kind()


def count_as_data(holds: Callable[[Any], Awaitable[bool]]) -> None:
    """Tells Orbax of other files that make an item complete.

    It warns of a malformed checkpoint where it sees none of its own format.
    """
    original = orbax_layout.has_tensorstore_data_files

    async def has_data_files(path: Any) -> bool:
        return await original(path) or await holds(path)

    orbax_layout.has_tensorstore_data_files = has_data_files


def handlers_used(context: ocp.Context, state: Any) -> list[Any]:
    """The handlers that Orbax's own resolution takes for saving a state within a context.

    The first is what `ocp.save` records, the second what `ocp.training.Checkpointer` saves with.
    """
    with context:
        known = context.checkpointables.registry
        recorded = resolution.get_handlers_for_save(known, {STATE: state})[STATE]
        used = saving.handler_registration.resolve_handler_for_save(known, state, name=STATE)
    return [recorded, used]


def version() -> str:
    """The installed version of orbax-checkpoint."""
    return importlib.metadata.version("orbax-checkpoint")


def tree_metadata(tree: Any, custom_metadata: Mapping[str, Any] | None) -> Any:
    """A `TreeMetadata`, which v0 has no public way to make."""
    return build_default_tree_metadata(tree, custom_metadata=custom_metadata)


def register_args(handler: type, save_args: type, restore_args: type) -> None:
    """As `ocp.args.register_with_handler`, for a handler that shares its typestr with another.

    The public function refuses a second handler of a typestr.
    """
    checkpoint_args._SAVE_ARG_TO_HANDLER[save_args] = handler
    checkpoint_args._RESTORE_ARG_TO_HANDLER[restore_args] = handler


def add_args(kind: type, args: Sequence[type]) -> None:
    """Lets handlers of a kind, also where they are given as such, take all these arguments.

    For `item_handlers=` Orbax registers one class of arguments for saving and one for restoring,
    and refuses others, whatever the handler could do with them; there is no public way to tell.

    Args:
        kind: The handler's class, or a base of it.
        args: Classes of arguments.
    """
    register = composite_checkpoint_handler._add_to_handler_registry_from_global_registry

    def register_all(registry: Any, handler: Any, item_name: str) -> None:
        register(registry, handler, item_name)
        for one in args if isinstance(handler, kind) else ():
            if not registry.has(item_name, one):
                registry.add(item_name, one, handler)

    composite_checkpoint_handler._add_to_handler_registry_from_global_registry = register_all


_making: dict[str, list[Any]] = {}  # by the operation, of which the last counts
_create_all_async = atomicity.create_all_async


def _create_and_remember(*args: Any, **kwargs: Any) -> Any:
    made = _create_all_async(*args, **kwargs)
    operation = OperationIdGenerator.get_current_operation_id()
    if operation not in _making:
        _making.clear()
    _making.setdefault(operation, []).append(made)
    return made


atomicity.create_all_async = _create_and_remember


class FoldersBeingMade(NamedTuple):
    """Futures of the folders that Orbax v0 is making in the background: a step's, its items'.

    Orbax tells handlers only that the folders are there: if one cannot be made, they wait until
    `coordination_timeout`, five minutes. On processes that make none, the futures are done.
    """

    operation: str
    futures: Sequence[Any]

    def wait(self) -> None:
        """Waits for them; if one cannot be made, lets threads end that wait for it.

        Raises:
            OSError: One cannot be made.
        """
        for number, made in enumerate(self.futures, 1):
            try:
                made.result()
            except BaseException:
                for waiting in self.futures[number:]:
                    waiting.cancel()
                future.set_signals(tuple(HandlerAwaitableSignal), operation_id=self.operation)
                raise


def folders_being_made() -> FoldersBeingMade | None:
    """Those of the current operation; None, on all processes, where handlers need not wait."""
    operation = OperationIdGenerator.get_current_operation_id()
    futures = tuple(_making.get(operation, ()))
    return FoldersBeingMade(operation, futures) if futures else None


async def abandon_folders(directory: Any) -> None:
    """Ends the making of folders for an item of Orbax v1 that cannot be saved.

    If the program ends, or closes the checkpointer, while Orbax v0 makes them for
    `training.Checkpointer`, a thread of Orbax waits for them for five minutes.

    Args:
        directory: The `PathAwaitingCreation` of the item.
    """
    making = folders_being_made()
    if making is not None:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(making.wait)
    creation = getattr(getattr(directory, "_base_path", directory), "_awaitable", None)
    if (
        inspect.iscoroutine(creation)
        and inspect.getcoroutinestate(creation) == inspect.CORO_CREATED
    ):
        creation.close()


async def make_folder(path: Any) -> None:
    """Makes a folder whose parent exists."""
    await async_path.mkdir(path, parents=False, exist_ok=False)


def watch_folder_creation(watch: Callable[[str, Sequence[Any], Sequence[str]], Any]) -> None:
    """Has `folder_creation` watch the functions that make folders while processes wait.

    Args:
        watch: `WatchedFolders`, which are made of an operation, paths and subdirectories.
    """
    create_all, create_paths = atomicity.create_all, path_async_utils._create_paths

    def create_all_watched(paths: Sequence[Any], **options: Any) -> Any:
        if jax.process_count() == 1:
            return create_all(paths, **options)
        watched = watch(OperationIdGenerator.get_current_operation_id(), paths, ())
        return watched.make(partial(create_all, watched.paths, **options))

    def create_paths_watched(
        path: Any, *, subdirectories: Any, operation_id: str, **options: Any
    ) -> Any:
        create = partial(create_paths, operation_id=operation_id, **options)
        if jax.process_count() == 1:
            return create(path, subdirectories=subdirectories)
        watched = watch(operation_id, [path], subdirectories)
        return watched.make(partial(create, watched.paths[0], subdirectories=()))

    atomicity.create_all = create_all_watched
    path_async_utils._create_paths = create_paths_watched
