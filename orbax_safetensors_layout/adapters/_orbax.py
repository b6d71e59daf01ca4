"""Every private orbax symbol that the package needs, checked with versions 0.12.6 and 0.12.8."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import orbax.checkpoint

try:
    import orbax.checkpoint.experimental.v1 as ocp
    from orbax.checkpoint import checkpoint_args
    from orbax.checkpoint._src.futures import future, synchronization
    from orbax.checkpoint._src.handlers import composite_checkpoint_handler
    from orbax.checkpoint._src.metadata import tree as tree_module
    from orbax.checkpoint._src.path import async_path, atomicity
    from orbax.checkpoint.experimental.v1._src.context import context
    from orbax.checkpoint.experimental.v1._src.handlers import registration, resolution, types
    from orbax.checkpoint.experimental.v1._src.layout import (
        checkpoint_layout,
        orbax_layout,
        registry,
        safetensors_layout,
    )
    from orbax.checkpoint.experimental.v1._src.partial import saving as partial_saving
    from orbax.checkpoint.experimental.v1._src.path import async_utils
    from orbax.checkpoint.experimental.v1._src.saving import saving
except ImportError as error:
    raise ImportError(
        f"orbax-checkpoint {orbax.checkpoint.__version__} lacks what this package uses of it"
        f" ({error}). Install 0.12.6 to 0.12.8, or a newer version of orbax-safetensors-layout."
    ) from error

ITEM_METADATA = orbax_layout.PYTREE_METADATA_FILE
RESERVED = checkpoint_layout.RESERVED_CHECKPOINTABLE_KEYS
STATE = checkpoint_layout.STATE_CHECKPOINTABLE_KEY
STEP_INDICATOR = orbax_layout.ORBAX_CHECKPOINT_INDICATOR_FILE
STEP_METADATA = orbax_layout.CHECKPOINT_METADATA

NoEntryError = registration.NoEntryError
PartialSave = partial_saving._PartialSavePyTree
get_context = context.get_context
read_step_metadata = orbax_layout.read_checkpoint_metadata
tree_metadata = tree_module.build_default_tree_metadata  # v0 has no public way to make one
typestr = types.typestr

# Modules of which attributes are replaced: `SafetensorsLayout` of the first, by `install`, and
# functions of the others, by `folder_creation`.
safetensors: Any = safetensors_layout
folder_creation_v0: Any = atomicity
folder_creation_v1: Any = async_utils
current_operation = synchronization.OperationIdGenerator.get_current_operation_id
make_folder = partial(async_path.mkdir, parents=False, exist_ok=False)


def end_waits(operation: str) -> None:
    """Ends the wait of threads for a step of an operation of Orbax v0."""
    future.set_signals(tuple(synchronization.HandlerAwaitableSignal), operation_id=operation)


# Orbax's own resolution of layouts and handlers, before `replace_resolution`.
get_layout_class = registry.get_layout_class
resolve_handler_for_save = registration.resolve_handler_for_save
resolve_handler_for_load = registration.resolve_handler_for_load


def replace_resolution(layout_class: Any, for_save: Any, for_load: Any) -> None:
    """Replaces Orbax's three functions of resolution; see `routing`."""
    registry.get_layout_class = layout_class
    registration.resolve_handler_for_save = for_save
    registration.resolve_handler_for_load = for_load


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
    raise RuntimeError("Orbax's resolution of a layout awaits something, which is not supported")


async def orbaxs_layout(path: ocp.path.Path) -> Any:
    """The layout that reads a step that Orbax saved, with either API."""
    kind: Any = await registry.get_layout_class(ocp.options.CheckpointLayout.ORBAX, path)
    return kind()


def count_as_data(holds: Callable[[Any], Awaitable[bool]]) -> None:
    """Tells Orbax of other files that make an item complete; without any it warns of the item."""
    original = orbax_layout.has_tensorstore_data_files

    async def has_data_files(path: Any) -> bool:
        return await original(path) or await holds(path)

    orbax_layout.has_tensorstore_data_files = has_data_files


def handlers_used(context: ocp.Context, state: Any) -> list[Any]:
    """The handlers that `ocp.save` records and `training.Checkpointer` saves with in a context."""
    with context:
        known = context.checkpointables.registry
        saved = resolution.get_handlers_for_save(known, {STATE: state})[STATE]
        used = saving.handler_registration.resolve_handler_for_save(known, state, name=STATE)
    return [saved, used]


def register_args(handler: type, save_args: type, restore_args: type) -> None:
    """As `ocp.args.register_with_handler`, which refuses a second handler of a typestr."""
    checkpoint_args._SAVE_ARG_TO_HANDLER[save_args] = handler
    checkpoint_args._RESTORE_ARG_TO_HANDLER[restore_args] = handler


def replace_missing_handler(kind: type, make: Callable[[str, Any], Any]) -> None:
    """Lets `make` handle arguments that an item lacks a handler for, registered for a `kind`.

    Orbax's error shows all of its registry.
    """
    composite: Any = composite_checkpoint_handler.CompositeCheckpointHandler
    get_or_set = composite._get_or_set_handler

    def get(self: Any, item_name: str, args: Any = None) -> Any:
        try:
            return get_or_set(self, item_name, args)
        except ValueError:
            known = self._handler_registry.get_all_entries().items()
            handlers = [handler for (name, _), handler in known if name == item_name]
            if args is None or not any(isinstance(handler, kind) for handler in handlers):
                raise
            return make(item_name, args)

    composite._get_or_set_handler = get


def add_args(kind: type, args: Sequence[type]) -> None:
    """Lets handlers of a class take all these arguments; `item_handlers=` registers one of each."""
    register = composite_checkpoint_handler._add_to_handler_registry_from_global_registry

    def register_all(registry: Any, handler: Any, item_name: str) -> None:
        register(registry, handler, item_name)
        for args_class in args if isinstance(handler, kind) else ():
            if not registry.has(item_name, args_class):
                registry.add(item_name, args_class, handler)

    composite_checkpoint_handler._add_to_handler_registry_from_global_registry = register_all
