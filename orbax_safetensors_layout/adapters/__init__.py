"""Orbax's extension points; the only folder that imports orbax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_safetensors_layout.lazy import lazy_exports

if TYPE_CHECKING:
    from .layout import SafetensorsLayout
    from .orbax_format.locate import holds_checkpoint, is_orbax_checkpoint, locate, open_reader
    from .orbax_format.orbax_reader import OrbaxReader
    from .orbax_format.orbax_target import orbax_target
    from .registration import install, uninstall
    from .settings import using
    from .v0 import SafetensorsCheckpointHandler, SafetensorsRestore, SafetensorsSave
    from .v0_registry import handler_registry
    from .v1 import SafetensorsHandler
    from .v1_context import context

__getattr__ = lazy_exports(
    __name__,
    {
        ".registration": "install uninstall",
        ".layout": "SafetensorsLayout",
        ".orbax_format.locate": "holds_checkpoint is_orbax_checkpoint locate open_reader",
        ".orbax_format.orbax_reader": "OrbaxReader",
        ".orbax_format.orbax_target": "orbax_target",
        ".settings": "using",
        ".v0": "SafetensorsCheckpointHandler SafetensorsRestore SafetensorsSave",
        ".v0_registry": "handler_registry",
        ".v1": "SafetensorsHandler",
        ".v1_context": "context",
    },
)
