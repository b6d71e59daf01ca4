"""Every private orbax symbol that the package needs.

Checked against orbax-checkpoint 0.12.6 and 0.12.8. Nothing else in the package imports a module of
orbax whose name begins with an underscore.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint import checkpoint_args
from orbax.checkpoint._src.futures.future import CommitFuture
from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator
from orbax.checkpoint._src.handlers import composite_checkpoint_handler
from orbax.checkpoint._src.metadata.tree import build_default_tree_metadata
from orbax.checkpoint._src.path import atomicity
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
from orbax.checkpoint.experimental.v1._src.saving import saving

__all__ = [
    "ITEM_METADATA",
    "RESERVED",
    "STATE",
    "STEP_INDICATOR",
    "STEP_METADATA",
    "CommitFuture",
    "Hooks",
    "NoEntryError",
    "PartialSave",
    "add_args",
    "count_as_data",
    "folders_being_made",
    "get_context",
    "get_hooks",
    "get_safetensors_layout",
    "handlers_used",
    "layout_used",
    "orbaxs_layout",
    "read_step_metadata",
    "register_args",
    "set_hooks",
    "set_safetensors_layout",
    "tree_metadata",
    "typestr",
    "version",
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


def folders_being_made() -> Sequence[Any]:
    """Futures of the folders that Orbax v0 is making in the background for the current operation.

    Handlers are told only when the folders are there: if one can not be made, they wait until
    `coordination_timeout`, five minutes. Where Orbax makes none in the background it is empty, on
    all processes; those that make none have futures that are done.
    """
    return tuple(_making.get(OperationIdGenerator.get_current_operation_id(), ()))
