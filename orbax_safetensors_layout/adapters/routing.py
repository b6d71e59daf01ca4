"""Makes Orbax v1 take our layout and our handlers, where a context's layout is ours.

`connect` puts functions in front of Orbax's resolution of layouts and handlers. They leave all to
Orbax but in contexts of a `_LayoutOption`, or, after `install`, of `"safetensors"`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, cast

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import SafetensorsLayoutError

from . import _orbax
from .background import in_background
from .item import ADVICE, check_step
from .settings import NOTHING, Settings
from .v1 import SafetensorsHandler

_Layouts: Any = ocp.options.CheckpointLayout
_layout_class: Any = None


class _LayoutOption:
    """Our layout, or an instance of it, as the `checkpoint_layout` of a context.

    Orbax's enumeration of layouts cannot be extended. This passes for a member, and equals
    SAFETENSORS, by which Orbax decides what a layout can do (`ocp.load_async`).
    """

    name = _Layouts.SAFETENSORS.name
    value = _Layouts.SAFETENSORS.value
    __class__ = property(lambda _: _Layouts)

    def __init__(self, layout: Any) -> None:
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return other is self or other is _Layouts.SAFETENSORS

    def __hash__(self) -> int:
        return hash(_Layouts.SAFETENSORS)

    def __deepcopy__(self, _: Any) -> _LayoutOption:
        return self

    def __repr__(self) -> str:
        return f"<CheckpointLayout: {type(self.layout).__module__}.{type(self.layout).__name__}>"


def connect(layout_class: type) -> None:
    """Lets contexts take our layout; done once, when its module is imported."""
    global _layout_class
    _layout_class = layout_class
    _orbax.replace_resolution(_resolve_layout, _for_save, _for_load)
    others = _Layouts._missing_

    def missing(_: Any, value: Any) -> Any:
        if isinstance(value, _LayoutOption):  # from another context
            return value
        if isinstance(value, type) and issubclass(value, layout_class):
            value = value()
        if not isinstance(value, layout_class):
            return others(value)
        option = _LayoutOption(value)
        check(option, type(value))
        return option

    _Layouts._missing_ = classmethod(missing)


def check(layout: Any, layout_class: type) -> None:
    """Refuses a `checkpoint_layout` for which Orbax takes another class, or other handlers."""
    context = ocp.Context()
    context.checkpoint_layout = layout
    handlers = _orbax.handlers_used(context, {"probe": np.zeros(1)})
    used = [type(_orbax.layout_used(layout)), *map(type, handlers)]
    if used != [layout_class, SafetensorsHandler, SafetensorsHandler]:
        raise SafetensorsLayoutError(
            "this version of Orbax, or another library, does not let our layout take effect",
            expected=f"{layout_class.__name__}, and {SafetensorsHandler.__name__} twice",
            found=f"orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')}: "
            + ", ".join(kind.__name__ for kind in used),
            hint="Use `osl.context`, `osl.load` and `osl.save`, or the handlers of Orbax v0.",
        )


def is_installed() -> bool:
    """Whether `checkpoint_layout = "safetensors"` means our layout."""
    return _orbax.safetensors.SafetensorsLayout is _layout_class


def handler_for_save(registry: Any, checkpointable: Any, name: str, own: Settings) -> Any:
    """Ours in place of Orbax's pytree handler, and for what no handler takes; else the user's."""
    if isinstance(checkpointable, _orbax.PartialSave):
        raise SafetensorsLayoutError(
            "a checkpoint in safetensors cannot be saved part by part",
            hint="Use `ocp.save`, or `ocp.partial.save` in a context of another layout.",
        )
    ours = SafetensorsHandler(own)
    try:
        return _ours_or(_orbax.resolve_handler_for_save(registry, checkpointable, name=name), ours)
    except _orbax.NoEntryError:
        if not ours.is_handleable(checkpointable):
            raise
        return ours


def _ours_or(handler: Any, ours: SafetensorsHandler) -> Any:
    replaced = isinstance(handler, ocp.handlers.PyTreeHandler) or type(handler) is type(ours)
    return ours if replaced else handler


def _own() -> Settings | None:
    """The settings of our layout in Orbax's context; None where the layout is another."""
    option: Any = _orbax.get_context().checkpoint_layout
    if isinstance(option, _LayoutOption):
        return cast(Settings, option.layout.own)
    return NOTHING if option is _Layouts.SAFETENSORS and is_installed() else None


async def _resolve_layout(layout: Any, path: Any = None) -> Any:
    ours = None
    if isinstance(layout, _LayoutOption):
        ours = layout.layout
    elif layout is _Layouts.SAFETENSORS and is_installed():
        ours = _layout_class()
    if path is not None and (ours or _has_handler()):
        await in_background(check_step, path, has_layout=ours is not None)
    if ours is None:
        return await _orbax.get_layout_class(layout, path)
    if path is not None and await in_background(_is_orbaxs, ocp.path.Path(path)):
        return await _orbax.get_layout_class(_Layouts.ORBAX, path)
    await _orbax.get_layout_class(_Layouts.SAFETENSORS, path)  # its checks of the path
    return lambda: ours


def _has_handler() -> bool:
    """Whether an item of Orbax's context is registered for our handler."""
    entries = _orbax.get_context().checkpointables.registry.get_all_entries()
    return any(handler is SafetensorsHandler for handler, _ in entries)


def _is_orbaxs(path: ocp.path.Path) -> bool:
    """Whether it is a step of items, none of which is ours."""
    if not (path / _orbax.STEP_METADATA).exists() or is_safetensors_checkpoint(path):
        return False
    children = [child for child in path.iterdir() if child.name not in _orbax.RESERVED]
    items = [child for child in children if child.is_dir()]
    return bool(items) and not any(map(is_safetensors_checkpoint, items))


def _for_save(registry: Any, checkpointable: Any, *, name: str) -> Any:
    own = _own()
    if own is None:
        return _orbax.resolve_handler_for_save(registry, checkpointable, name=name)
    return handler_for_save(registry, checkpointable, name, own)


def _for_load(*args: Any, handler_typestr: str | None = None, **kwargs: Any) -> Any:
    """Our handler loads items that it saved, whatever the context's registry has."""
    resolve = functools.partial(
        _orbax.resolve_handler_for_load, *args, handler_typestr=handler_typestr, **kwargs
    )
    if handler_typestr != _orbax.typestr(SafetensorsHandler):
        return resolve()
    own = _own()
    ours = SafetensorsHandler(own or NOTHING)
    try:
        handler = _ours_or(resolve(), ours)
    except _orbax.NoEntryError:
        handler = ours
    if handler is ours and own is None and not is_installed() and not _has_handler():
        raise SafetensorsLayoutError(ADVICE)  # here Orbax's handler would fail, by a long text
    return handler
