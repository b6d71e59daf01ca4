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
    )
    from .adapters import (
        SafetensorsHandler as SafetensorsHandler,
    )
    from .adapters import (
        SafetensorsLayout as SafetensorsLayout,
    )
    from .adapters import (
        SafetensorsRestore as SafetensorsRestore,
    )
    from .adapters import (
        SafetensorsSave as SafetensorsSave,
    )
    from .adapters import (
        context as context,
    )
    from .adapters import (
        handler_registry as handler_registry,
    )
    from .adapters import (
        install as install,
    )
    from .adapters import (
        uninstall as uninstall,
    )
    from .adapters import (
        using as using,
    )
    from .analysis import (
        Finding as Finding,
    )
    from .analysis import (
        Report as Report,
    )
    from .analysis import (
        verify as verify,
    )
    from .catalog import (
        is_safetensors_checkpoint as is_safetensors_checkpoint,
    )
    from .conversion import (
        consolidate as consolidate,
    )
    from .convert import (
        Converted as Converted,
    )
    from .convert import (
        convert as convert,
    )
    from .errors import (
        CheckpointExistsError as CheckpointExistsError,
    )
    from .errors import (
        CheckpointNotFoundError as CheckpointNotFoundError,
    )
    from .errors import (
        DtypeMismatchError as DtypeMismatchError,
    )
    from .errors import (
        FormatError as FormatError,
    )
    from .errors import (
        InvalidHeaderError as InvalidHeaderError,
    )
    from .errors import (
        InvalidIndexError as InvalidIndexError,
    )
    from .errors import (
        InvalidManifestError as InvalidManifestError,
    )
    from .errors import (
        MappingError as MappingError,
    )
    from .errors import (
        MismatchError as MismatchError,
    )
    from .errors import (
        MissingTensorError as MissingTensorError,
    )
    from .errors import (
        PeerError as PeerError,
    )
    from .errors import (
        SafetensorsLayoutError as SafetensorsLayoutError,
    )
    from .errors import (
        ShapeMismatchError as ShapeMismatchError,
    )
    from .errors import (
        StorageError as StorageError,
    )
    from .errors import (
        TruncatedFileError as TruncatedFileError,
    )
    from .errors import (
        UnexpectedTensorError as UnexpectedTensorError,
    )
    from .errors import (
        UnsupportedDtypeError as UnsupportedDtypeError,
    )
    from .load import (
        TensorMetadata as TensorMetadata,
    )
    from .load import (
        load as load,
    )
    from .load import (
        metadata as metadata,
    )
    from .load import (
        plan_load as plan_load,
    )
    from .mapping import (
        Expr as Expr,
    )
    from .mapping import (
        Mapping as Mapping,
    )
    from .mapping import (
        concat as concat,
    )
    from .mapping import (
        dequantize_block as dequantize_block,
    )
    from .mapping import (
        dequantize_int4 as dequantize_int4,
    )
    from .mapping import (
        dequantize_mxfp4 as dequantize_mxfp4,
    )
    from .mapping import (
        families as families,
    )
    from .mapping import (
        fill as fill,
    )
    from .mapping import (
        opaque as opaque,
    )
    from .mapping import (
        rule as rule,
    )
    from .mapping import (
        stack as stack,
    )
    from .mapping import (
        tensor as tensor,
    )
    from .options import (
        ConvertOptions as ConvertOptions,
    )
    from .options import (
        Progress as Progress,
    )
    from .options import (
        ReadOptions as ReadOptions,
    )
    from .options import (
        RetryPolicy as RetryPolicy,
    )
    from .options import (
        WriteOptions as WriteOptions,
    )
    from .plan import (
        Cost as Cost,
    )
    from .plan import (
        ReadPlan as ReadPlan,
    )
    from .plan import (
        WritePlan as WritePlan,
    )
    from .save import (
        plan_save as plan_save,
    )
    from .save import (
        save as save,
    )

__version__ = "0.1.0.dev0"

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
        "InvalidHeaderError InvalidIndexError InvalidManifestError MappingError MismatchError "
        "MissingTensorError PeerError SafetensorsLayoutError ShapeMismatchError StorageError "
        "TruncatedFileError UnexpectedTensorError UnsupportedDtypeError"
    ),
    "load": "TensorMetadata load metadata plan_load",
    "mapping": (
        "Expr Mapping concat dequantize_block dequantize_int4 dequantize_mxfp4 families fill "
        "opaque rule stack tensor"
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
