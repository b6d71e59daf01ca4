"""`install` and `uninstall`: what `checkpoint_layout = "safetensors"` means in this process."""

from __future__ import annotations

import threading
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from . import _orbax, routing
from .layout import SafetensorsLayout

_lock = threading.Lock()
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
    global _previous
    with _lock:
        if routing.is_installed():
            return
        _previous = _orbax.get_safetensors_layout()
        _orbax.set_safetensors_layout(SafetensorsLayout)
        try:
            routing.check(ocp.options.CheckpointLayout.SAFETENSORS, SafetensorsLayout)
        except BaseException:
            _orbax.set_safetensors_layout(_previous)
            raise


def uninstall() -> None:
    """Puts back what `install` replaced. Without an `install` it does nothing.

    What another library has put in the same place since then, stays.
    """
    with _lock:
        if routing.is_installed():
            _orbax.set_safetensors_layout(_previous)
