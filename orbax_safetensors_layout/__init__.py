"""Hugging Face safetensors checkpoints as sharded `jax.Array`s, through the standard Orbax APIs.

    import orbax_safetensors_layout as osl

    state = osl.load(path, abstract_state)

Every public name is loaded on first use, so that a program which only reads headers or prints a
plan imports neither jax nor Orbax.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orbax_safetensors_layout.adapters.install import install, uninstall
    from orbax_safetensors_layout.adapters.layout import SafetensorsLayout
    from orbax_safetensors_layout.adapters.settings import using
    from orbax_safetensors_layout.adapters.v0 import (
        SafetensorsCheckpointHandler,
        SafetensorsRestore,
        SafetensorsSave,
    )
    from orbax_safetensors_layout.adapters.v0_registry import handler_registry
    from orbax_safetensors_layout.adapters.v1 import SafetensorsHandler
    from orbax_safetensors_layout.adapters.v1_context import context
    from orbax_safetensors_layout.analysis.report import Finding, Report
    from orbax_safetensors_layout.analysis.verify import verify
    from orbax_safetensors_layout.catalog.discover import is_safetensors_checkpoint
    from orbax_safetensors_layout.conversion.consolidate import consolidate
    from orbax_safetensors_layout.convert import Converted, convert
    from orbax_safetensors_layout.errors import (
        CheckpointExistsError,
        CheckpointNotFoundError,
        DtypeMismatchError,
        FormatError,
        InvalidHeaderError,
        InvalidIndexError,
        InvalidManifestError,
        MappingError,
        MismatchError,
        MissingTensorError,
        PeerError,
        SafetensorsLayoutError,
        ShapeMismatchError,
        StorageError,
        TruncatedFileError,
        UnexpectedTensorError,
        UnsupportedDtypeError,
    )
    from orbax_safetensors_layout.load import TensorMetadata, load, metadata, plan_load
    from orbax_safetensors_layout.mapping import families
    from orbax_safetensors_layout.mapping.expr.concat_stack import concat, stack
    from orbax_safetensors_layout.mapping.expr.expression import Expr, fill, tensor
    from orbax_safetensors_layout.mapping.expr.opaque_ops import opaque
    from orbax_safetensors_layout.mapping.expr.quantized import (
        dequantize_block,
        dequantize_int4,
        dequantize_mxfp4,
    )
    from orbax_safetensors_layout.mapping.rules import Mapping, rule
    from orbax_safetensors_layout.options import (
        ConvertOptions,
        Progress,
        ReadOptions,
        RetryPolicy,
        WriteOptions,
    )
    from orbax_safetensors_layout.plan.cost import Cost
    from orbax_safetensors_layout.plan.reads import ReadPlan
    from orbax_safetensors_layout.plan.writes import WritePlan
    from orbax_safetensors_layout.save import plan_save, save

__version__ = "0.1.0.dev0"

_NAMES_BY_MODULE = {
    "adapters.install": ("install", "uninstall"),
    "adapters.layout": ("SafetensorsLayout",),
    "adapters.settings": ("using",),
    "adapters.v0": ("SafetensorsCheckpointHandler", "SafetensorsRestore", "SafetensorsSave"),
    "adapters.v0_registry": ("handler_registry",),
    "adapters.v1": ("SafetensorsHandler",),
    "adapters.v1_context": ("context",),
    "consolidate": ("consolidate",),
    "convert": ("Converted", "convert"),
    "errors": (
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "DtypeMismatchError",
        "FormatError",
        "InvalidHeaderError",
        "InvalidIndexError",
        "InvalidManifestError",
        "MappingError",
        "MismatchError",
        "MissingTensorError",
        "PeerError",
        "SafetensorsLayoutError",
        "ShapeMismatchError",
        "StorageError",
        "TruncatedFileError",
        "UnexpectedTensorError",
        "UnsupportedDtypeError",
    ),
    "format.survey": ("is_safetensors_checkpoint",),
    "load": ("TensorMetadata", "load", "metadata", "plan_load"),
    "mapping": ("families",),
    "mapping.expression": ("Expr", "fill", "tensor"),
    "mapping.functions": ("opaque",),
    "mapping.joins": ("concat", "stack"),
    "mapping.quantized": ("dequantize_block", "dequantize_int4", "dequantize_mxfp4"),
    "mapping.rules": ("Mapping", "rule"),
    "options": ("ConvertOptions", "Progress", "ReadOptions", "RetryPolicy", "WriteOptions"),
    "plan.cost": ("Cost",),
    "plan.reads": ("ReadPlan",),
    "plan.writes": ("WritePlan",),
    "report": ("Finding", "Report"),
    "save": ("plan_save", "save"),
    "verify": ("verify",),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [  # spelled out for type checkers; tests/test_exports.py holds it equal to the table
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConvertOptions",
    "Converted",
    "Cost",
    "DtypeMismatchError",
    "Expr",
    "Finding",
    "FormatError",
    "InvalidHeaderError",
    "InvalidIndexError",
    "InvalidManifestError",
    "Mapping",
    "MappingError",
    "MismatchError",
    "MissingTensorError",
    "PeerError",
    "Progress",
    "ReadOptions",
    "ReadPlan",
    "Report",
    "RetryPolicy",
    "SafetensorsCheckpointHandler",
    "SafetensorsHandler",
    "SafetensorsLayout",
    "SafetensorsLayoutError",
    "SafetensorsRestore",
    "SafetensorsSave",
    "ShapeMismatchError",
    "StorageError",
    "TensorMetadata",
    "TruncatedFileError",
    "UnexpectedTensorError",
    "UnsupportedDtypeError",
    "WriteOptions",
    "WritePlan",
    "__version__",
    "concat",
    "consolidate",
    "context",
    "convert",
    "dequantize_block",
    "dequantize_int4",
    "dequantize_mxfp4",
    "families",
    "fill",
    "handler_registry",
    "install",
    "is_safetensors_checkpoint",
    "load",
    "metadata",
    "opaque",
    "plan_load",
    "plan_save",
    "rule",
    "save",
    "stack",
    "tensor",
    "uninstall",
    "using",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `load` the function: importing the submodule `load` would bind that name to it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
