"""`install` and `uninstall`: what `checkpoint_layout = "safetensors"` means in this process."""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.adapters import _orbax
from orbax_safetensors_layout.adapters.layout import SafetensorsLayout
from orbax_safetensors_layout.adapters.routing import handler_for_save, is_safetensors_context
from orbax_safetensors_layout.adapters.v1 import SafetensorsHandler
from orbax_safetensors_layout.errors import SafetensorsLayoutError


class _Change(NamedTuple):
    previous: _orbax.Hooks
    ours: _orbax.Hooks


_lock = threading.Lock()
_change: _Change | None = None


def install() -> None:
    """Makes `checkpoint_layout = "safetensors"`, and detection by `"auto"`, mean our layout.

    In a context of that layout every pytree is then saved as safetensors, also by
    `ocp.training.Checkpointer`, which otherwise would write Orbax's own format under that name;
    `ocp.partial.save`, which knows that format only, is refused. What was saved so is also found
    by `"auto"`, whose own saves stay in Orbax's format.

    For the whole process, until `uninstall`. Calling it again does nothing.

    Raises:
        SafetensorsLayoutError: This version of Orbax resolves layouts or handlers in another way.

    Example:
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
    global _change
    with _lock:
        if _change is not None and _is_installed():
            return
        previous = _orbax.get_hooks()
        ours = _orbax.Hooks(
            SafetensorsLayout,
            functools.partial(_for_save, previous.for_save),
            functools.partial(_for_load, previous.for_load),
        )
        _orbax.set_hooks(ours)
        if not _is_installed():
            _orbax.set_hooks(previous)
            raise SafetensorsLayoutError(
                "this version of Orbax does not take the layout that is installed",
                found=f"orbax-checkpoint {_orbax.version()}",
                hint="Use `osl.context`, `osl.load` and `osl.save`, or the handlers of Orbax v0.",
            )
        _change = _Change(previous, ours)


def uninstall() -> None:
    """Puts back what `install` replaced. Without an `install` it does nothing.

    What another library has put in the same place since then, stays.
    """
    global _change
    with _lock:
        if _change is not None:
            triples = zip(_orbax.get_hooks(), *_change, strict=True)
            _orbax.set_hooks(
                _orbax.Hooks(*(old if now is our else now for now, old, our in triples))
            )
        _change = None


def _is_installed() -> bool:
    """Whether Orbax's own resolution comes to us; asked of Orbax, not of what was assigned."""
    if _orbax.layout_used() is not SafetensorsLayout:
        return False
    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    used = _orbax.handlers_used(context, {"probe": np.zeros(1)})
    return all(isinstance(handler, SafetensorsHandler) for handler in used)


def _for_save(original: Any, registry: Any, checkpointable: Any, *, name: str) -> Any:
    if not is_safetensors_context():
        return original(registry, checkpointable, name=name)
    return handler_for_save(original, registry, checkpointable, name)


def _for_load(
    original: Any,
    registry: Any,
    abstract_checkpointable: Any,
    *,
    name: str,
    handler_typestr: str | None = None,
) -> Any:
    """What was saved by our handler is loaded by it, whatever the context's registry has."""
    ours = handler_typestr == _orbax.typestr(SafetensorsHandler)
    try:
        found = original(
            registry, abstract_checkpointable, name=name, handler_typestr=handler_typestr
        )
    except _orbax.NoEntryError:
        if not ours:
            raise
        return SafetensorsHandler()
    orbaxs = isinstance(found, ocp.handlers.PyTreeHandler)
    return SafetensorsHandler() if ours and orbaxs else found
