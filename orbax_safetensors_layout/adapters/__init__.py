"""Orbax's extension points; the only folder that imports orbax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_safetensors_layout.lazy import lazy_exports

if TYPE_CHECKING:
    from .item import item_metadata
    from .layout import SafetensorsLayout, install, uninstall
    from .orbax_format.orbax_reader import OrbaxReader
    from .orbax_format.orbax_target import OrbaxTarget
    from .readers import open_reader
    from .registries import context, handler_registry
    from .settings import using
    from .step_record import step_files
    from .v0 import SafetensorsCheckpointHandler, SafetensorsRestore, SafetensorsSave
    from .v1 import SafetensorsHandler

__getattr__ = lazy_exports(
    __name__,
    {
        ".item": "item_metadata",
        ".layout": "SafetensorsLayout install uninstall",
        ".orbax_format.orbax_reader": "OrbaxReader",
        ".orbax_format.orbax_target": "OrbaxTarget",
        ".readers": "open_reader",
        ".registries": "context handler_registry",
        ".settings": "using",
        ".step_record": "step_files",
        ".v0": "SafetensorsCheckpointHandler SafetensorsRestore SafetensorsSave",
        ".v1": "SafetensorsHandler",
    },
)
