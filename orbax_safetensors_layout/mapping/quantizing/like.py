"""Weights in the formats of a quantised folder, with its bits where they have not changed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import MappingError, listed
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.storage import open_storage, read_range

from ..affine.bound import BoundExpr
from ..dequantizing.dequantized import (
    CONFIG,
    DecodedWeight,
    configured_quantization,
    decoded_weights,
    plain_configurations,
    with_settings,
)
from .encoder import WeightLayout


@dataclasses.dataclass(frozen=True, slots=True)
class StoredScalesOf:
    """The scales of a weight in a folder, read when they are asked for."""

    path: str
    entry: TensorEntry
    factor_entry: TensorEntry | None

    def scales(self) -> np.ndarray:
        return self._read(self.entry)

    def factor(self) -> np.float32:
        assert self.factor_entry is not None
        return np.float32(self._read(self.factor_entry).reshape(-1)[0])

    def _read(self, entry: TensorEntry) -> np.ndarray:
        storage, _ = open_storage(self.path)
        with storage:
            data = read_range(storage, entry.file, entry.start, entry.nbytes)
        return np.frombuffer(data, entry.dtype.numpy).reshape(entry.shape)


class _Weight(NamedTuple):
    layout: WeightLayout
    shapes: dict[str, tuple[int, ...]]
    before: StoredScalesOf


class FolderQuantization:
    """See `Quantization.like`; only headers and, of some formats, a few bytes a weight are read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with Catalog.open(path) as catalog, frozen_heap():
            entries, weights, _ = decoded_weights(catalog, np.dtype(np.float32))
            self._configured = configured_quantization(catalog)
        if not weights:
            raise MappingError(
                "the folder has no quantised weights", found=self.path, expected="some"
            )
        self._weights = {
            name: self._weight(name, weight, entries) for name, weight in weights.items()
        }

    def __repr__(self) -> str:
        return f"Quantization.like({self.path!r})"

    def apply(
        self, weights: Mapping[str, BoundExpr], dtype: np.dtype[Any] | None = None
    ) -> dict[str, BoundExpr]:
        """Return the tensors of the files; what the folder has not quantised stays as it is."""
        if self._weights.keys().isdisjoint(weights):
            raise MappingError(
                "no tensor is a weight that the folder has quantised",
                expected=listed(map(repr, self._weights), 3),
                found=listed(map(repr, weights), 3),
            )
        result: dict[str, BoundExpr] = {}
        for name, weight in weights.items():
            known = self._weights.get(name)
            if known is None:
                result[name] = weight
            else:
                result |= known.layout.tensors(
                    name, weight, before=known.before, shapes=known.shapes
                )
        return result

    def configured(
        self, files: Mapping[str, bytes], weights: Mapping[str, BoundExpr]
    ) -> dict[str, bytes]:
        """Return the files beside the model with what the folder's say of its quantisation."""
        files = plain_configurations(files)
        for file, values in self._configured.items():
            if file in files or file != CONFIG:
                files[file] = with_settings(files.get(file, b"{}"), values, file)
        return files

    def _weight(
        self, name: str, weight: DecodedWeight, entries: Mapping[str, TensorEntry]
    ) -> _Weight:
        scheme, parts, _, stored = weight
        if scheme.layout is None:
            raise parts.error(f"{scheme.name} is read, and not written")
        layout = scheme.layout(parts)
        scale, factor = parts.entry(layout.scales), parts.entry(layout.factor)
        assert scale is not None
        before = StoredScalesOf(self.path, scale, factor if layout.factor else None)
        return _Weight(layout, {part: entries[part].shape for part in stored}, before)
