"""Which layout and which handlers Orbax v1 takes, where a context's layout is ours.

Orbax resolves layouts by the members of an enumeration and handlers by a registry. `connect` puts
functions in front of both resolutions. They leave everything to Orbax except in contexts

- whose `checkpoint_layout` was set to our class, or to an instance of it: they hold a
  `LayoutOption`; or
- whose `checkpoint_layout` is `"safetensors"`, after `install`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import SafetensorsLayoutError

from . import _orbax, settings
from .background import in_background
from .orbax_item import is_orbax_item
from .remains import check_step
from .settings import Settings
from .v1 import SafetensorsHandler

_Layouts: Any = ocp.options.CheckpointLayout


class LayoutOption:
    """The `checkpoint_layout` of a context that was given our layout.

    Orbax's enumeration of layouts cannot be extended. This passes for a member, and equals
    SAFETENSORS, by which Orbax decides what a layout can do (`ocp.load_async`). New contexts
    inherit it.

    Attributes:
        layout: What saves and loads in the context.
        own: The settings that it was made with.
    """

    name = _Layouts.SAFETENSORS.name
    value = _Layouts.SAFETENSORS.value
    __class__ = property(lambda _: _Layouts)

    def __init__(self, layout: Any, own: Settings) -> None:
        self.layout = layout
        self.own = own

    def __eq__(self, other: object) -> bool:
        return other is self or other is _Layouts.SAFETENSORS

    def __hash__(self) -> int:
        return hash(_Layouts.SAFETENSORS)

    def __deepcopy__(self, _: Any) -> LayoutOption:
        return self

    def __repr__(self) -> str:
        return f"<CheckpointLayout: {type(self.layout).__module__}.{type(self.layout).__name__}>"


_layout_class: Any = None


def connect(layout_class: type, option: Callable[[Any], LayoutOption | None]) -> None:
    """Lets contexts take our layout; done once, when its module is imported.

    Args:
        layout_class: The layout.
        option: What a context holds whose `checkpoint_layout` is set to a value; None if that is
            not our layout.
    """
    global _layout_class
    _layout_class = layout_class
    hooks = _orbax.get_hooks()
    _orbax.set_hooks(
        _orbax.Hooks(
            functools.partial(_resolve_layout, hooks.layout_class),
            functools.partial(_for_save, hooks.for_save),
            functools.partial(_for_load, hooks.for_load),
        )
    )
    others = _Layouts._missing_

    def missing(_: Any, value: Any) -> Any:
        if isinstance(value, LayoutOption):  # from another context
            return value
        found = option(value)
        if found is not None:
            check(found, type(found.layout))
        return others(value) if found is None else found

    _Layouts._missing_ = classmethod(missing)


def check(layout: Any, layout_class: type) -> None:
    """Checks that Orbax takes ours; asked of Orbax's own resolution, not of what was assigned.

    Args:
        layout: The `checkpoint_layout` of a context.
        layout_class: The class that should save and load there.

    Raises:
        SafetensorsLayoutError: It takes another layout, or other handlers.
    """
    context = ocp.Context()
    context.checkpoint_layout = layout
    found = [_orbax.layout_used(layout), *_orbax.handlers_used(context, {"probe": np.zeros(1)})]
    if [type(one) for one in found] != [layout_class, SafetensorsHandler, SafetensorsHandler]:
        raise SafetensorsLayoutError(
            "this version of Orbax, or another library, does not let our layout take effect",
            expected=f"{layout_class.__name__}, and {SafetensorsHandler.__name__} twice",
            found=f"orbax-checkpoint {_orbax.version()}: "
            + ", ".join(type(one).__name__ for one in found),
            hint="Use `osl.context`, `osl.load` and `osl.save`, or the handlers of Orbax v0.",
        )


def is_installed() -> bool:
    """Whether `checkpoint_layout = "safetensors"` means our layout."""
    return _orbax.get_safetensors_layout() is _layout_class


def handler_for_save(
    resolve: Any, registry: Any, checkpointable: Any, name: str, own: Settings
) -> Any:
    """Ours in the place of Orbax's pytree handler, and for what no handler takes.

    What a user registered handlers for, or what brings its own way to be saved, keeps that.

    Args:
        resolve: Orbax's own resolution.
        registry: The handlers that the caller has registered.
        checkpointable: What is saved.
        name: Its name.
        own: The settings that the layout was made with.

    Raises:
        SafetensorsLayoutError: It is a part for `ocp.partial`, which knows Orbax's format only.
    """
    if isinstance(checkpointable, _orbax.PartialSave):
        raise SafetensorsLayoutError(
            "a checkpoint in safetensors can not be saved part by part",
            hint="Use `ocp.save`, or `ocp.partial.save` in a context of another layout.",
        )
    try:
        found = resolve(registry, checkpointable, name=name)
    except _orbax.NoEntryError:
        if not SafetensorsHandler().is_handleable(checkpointable):
            raise
        return SafetensorsHandler(own)
    return SafetensorsHandler(own) if _is_replaced(found) else found


def _is_replaced(handler: Any) -> bool:
    return isinstance(handler, ocp.handlers.PyTreeHandler) or type(handler) is SafetensorsHandler


def _own() -> Settings | None:
    """The settings of our layout in Orbax's context; None where the layout is another."""
    layout: Any = _orbax.get_context().checkpoint_layout
    if isinstance(layout, LayoutOption):
        return layout.own
    return settings.NOTHING if layout is _Layouts.SAFETENSORS and is_installed() else None


async def _resolve_layout(original: Any, layout: Any, path: Any = None) -> Any:
    is_ours = isinstance(layout, LayoutOption)
    if path is not None and (is_ours or _has_handler()):
        await in_background(check_step, path, has_layout=is_ours)
    if not is_ours:
        return await original(layout, path)
    if path is not None and await in_background(_is_orbaxs, ocp.path.Path(path)):
        return await original(_Layouts.ORBAX, path)
    await original(_Layouts.SAFETENSORS, path)  # its checks of the path
    return lambda: layout.layout


def _has_handler() -> bool:
    """Whether an item of Orbax's context is registered for our handler."""
    entries = _orbax.get_context().checkpointables.registry.get_all_entries()
    return any(handler is SafetensorsHandler for handler, _ in entries)


def _is_orbaxs(path: ocp.path.Path) -> bool:
    """Whether it is a step all of whose trees are in Orbax's own format."""
    if not (path / _orbax.STEP_METADATA).exists() or is_safetensors_checkpoint(path):
        return False
    items = [child for child in path.iterdir() if child.is_dir()]
    return any(map(is_orbax_item, items)) and not any(map(is_safetensors_checkpoint, items))


def _for_save(original: Any, registry: Any, checkpointable: Any, *, name: str) -> Any:
    own = _own()
    if own is None:
        return original(registry, checkpointable, name=name)
    return handler_for_save(original, registry, checkpointable, name, own)


def _for_load(
    original: Any,
    registry: Any,
    abstract_checkpointable: Any,
    *,
    name: str,
    handler_typestr: str | None = None,
) -> Any:
    """What was saved by our handler is loaded by it, whatever the context's registry has."""
    resolve = functools.partial(
        original, registry, abstract_checkpointable, name=name, handler_typestr=handler_typestr
    )
    own = _own()
    if own is None and not is_installed():
        return resolve()
    ours = SafetensorsHandler(own or settings.NOTHING)
    is_ours = handler_typestr == _orbax.typestr(SafetensorsHandler)
    try:
        found = resolve()
    except _orbax.NoEntryError:
        if not is_ours:
            raise
        return ours
    return ours if is_ours and _is_replaced(found) else found
