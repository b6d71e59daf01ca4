"""Opens a checkpoint of either format for conversion; Orbax is imported for its own alone."""

from __future__ import annotations

from collections.abc import Callable

from orbax_safetensors_layout.catalog import CheckpointRef
from orbax_safetensors_layout.conversion import CheckpointReader, SafetensorsReader
from orbax_safetensors_layout.errors import StorageError
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions


def open_reader(
    ref: CheckpointRef,
    options: ReadOptions,
    on_error: Callable[[StorageError], None] | None = None,
    named_by: LeafMapping | None = None,
) -> CheckpointReader:
    """Opens a checkpoint: safetensors with `options` and `named_by`, Orbax's with `on_error`."""
    if ref.is_orbax:
        from .orbax_format.orbax_reader import OrbaxReader  # imports Orbax

        return OrbaxReader(ref.path, on_error)
    return SafetensorsReader(ref.path, options, named_by=named_by)
