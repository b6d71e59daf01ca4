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
    from .adapters import (
        SafetensorsCheckpointHandler as SafetensorsCheckpointHandler,
        SafetensorsHandler as SafetensorsHandler,
        SafetensorsLayout as SafetensorsLayout,
        SafetensorsRestore as SafetensorsRestore,
        SafetensorsSave as SafetensorsSave,
        context as context,
        handler_registry as handler_registry,
        install as install,
        uninstall as uninstall,
        using as using,
    )
    from .analysis import Finding as Finding, Report as Report, verify as verify
    from .catalog import is_safetensors_checkpoint as is_safetensors_checkpoint
    from .conversion import consolidate as consolidate
    from .convert import Converted as Converted, convert as convert
    from .errors import (
        CheckpointExistsError as CheckpointExistsError,
        CheckpointNotFoundError as CheckpointNotFoundError,
        DtypeMismatchError as DtypeMismatchError,
        FormatError as FormatError,
        InvalidArgumentError as InvalidArgumentError,
        InvalidHeaderError as InvalidHeaderError,
        InvalidIndexError as InvalidIndexError,
        InvalidManifestError as InvalidManifestError,
        MappingError as MappingError,
        MismatchError as MismatchError,
        MissingTensorError as MissingTensorError,
        PeerError as PeerError,
        SafetensorsLayoutError as SafetensorsLayoutError,
        ShapeMismatchError as ShapeMismatchError,
        StorageError as StorageError,
        TruncatedFileError as TruncatedFileError,
        UnexpectedTensorError as UnexpectedTensorError,
        UnsupportedDtypeError as UnsupportedDtypeError,
    )
    from .load import (
        TensorMetadata as TensorMetadata,
        load as load,
        metadata as metadata,
        plan_load as plan_load,
    )
    from .lora import peft as peft
    from .mapping import (
        Expr as Expr,
        Mapping as Mapping,
        Quantization as Quantization,
        concat as concat,
        dequantize_block as dequantize_block,
        dequantize_int4 as dequantize_int4,
        dequantize_mxfp4 as dequantize_mxfp4,
        dequantized as dequantized,
        families as families,
        fill as fill,
        opaque as opaque,
        rule as rule,
        stack as stack,
        tensor as tensor,
    )
    from .options import (
        ConvertOptions as ConvertOptions,
        Progress as Progress,
        ReadOptions as ReadOptions,
        RetryPolicy as RetryPolicy,
        WriteOptions as WriteOptions,
    )
    from .plan import Cost as Cost, ReadPlan as ReadPlan, WritePlan as WritePlan
    from .save import plan_save as plan_save, save as save

__version__ = "0.1.0"

_NAMES = {
    "adapters": (
        "SafetensorsCheckpointHandler SafetensorsHandler SafetensorsLayout SafetensorsRestore "
        "SafetensorsSave context handler_registry install uninstall using"
    ),
    "analysis": "Finding Report verify",
    "catalog": "is_safetensors_checkpoint",
    "conversion": "consolidate",
    "convert": "Converted convert",
    "errors": (
        "CheckpointExistsError CheckpointNotFoundError DtypeMismatchError FormatError "
        "InvalidArgumentError InvalidHeaderError InvalidIndexError InvalidManifestError "
        "MappingError MismatchError MissingTensorError PeerError SafetensorsLayoutError "
        "ShapeMismatchError StorageError TruncatedFileError UnexpectedTensorError "
        "UnsupportedDtypeError"
    ),
    "load": "TensorMetadata load metadata plan_load",
    "lora": "peft",
    "mapping": (
        "Expr Mapping Quantization concat dequantize_block dequantize_int4 dequantize_mxfp4 "
        "dequantized families fill opaque rule stack tensor"
    ),
    "options": "ConvertOptions Progress ReadOptions RetryPolicy WriteOptions",
    "plan": "Cost ReadPlan WritePlan",
    "save": "plan_save save",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULE_OF, "__version__"])


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
