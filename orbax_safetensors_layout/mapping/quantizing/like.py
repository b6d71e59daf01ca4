"""Weights in the formats of a quantised folder, with its bits where they have not changed."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import MappingError, StorageError, listed, redact_urls
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.storage import open_storage, read_range

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Decoded
from ..dequantizing.dequantized import (
    CONFIG,
    OLDER_CONFIGS,
    DecodedWeight,
    configured_quantization,
    decoded_weights,
    plain_configurations,
    with_settings,
)
from ..dequantizing.found_weight import INPUT_SCALE
from ..dequantizing.tensor_names import is_of_activations
from .encoder import WeightLayout, add_parts, joined_name

_KEPT = 4  # tensors that were read last: a weight's rows are quantised one after the other


@dataclasses.dataclass(frozen=True, slots=True)
class FolderTensor:
    """A small tensor of a folder, read when it is asked for; a `Decoder` of nothing."""

    entry: TensorEntry
    read_entry: Callable[[TensorEntry], np.ndarray] = dataclasses.field(compare=False)

    free = 0

    def read(self) -> np.ndarray:
        return self.read_entry(self.entry)

    def widen(self, box: Box) -> Box:
        return box

    def needs(self, box: Box) -> tuple[Box, ...]:
        return ()

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        return np.asarray(self.read()[box.slices])

    def expression(self) -> BoundExpr:
        return Decoded(self.entry.shape, self.entry.dtype.numpy, (), self)


@dataclasses.dataclass(frozen=True, slots=True)
class FolderScales:
    """The scales of a weight in a folder, and its elements."""

    of_groups: FolderTensor
    of_weight: FolderTensor | None
    values: FolderTensor  # perhaps large: some rows are read at a time

    def scales(self) -> np.ndarray:
        return self.of_groups.read()

    def factor(self) -> np.float32:
        assert self.of_weight is not None
        return np.float32(self.of_weight.read().reshape(-1)[0])

    def elements(self, rows: range, of: int) -> np.ndarray:
        entry, dtype = self.values.entry, self.values.entry.dtype
        columns = math.prod(entry.shape) // of
        nbytes = columns * dtype.numpy.itemsize
        start = entry.start + rows.start * nbytes
        part = entry._replace(
            shape=(len(rows), columns), start=start, stop=start + len(rows) * nbytes
        )
        return self.values.read_entry(part)


class _Weight(NamedTuple):
    layout: WeightLayout
    written: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    before: FolderScales


class FolderQuantization:
    """See `Quantization.like`; only headers and, of some formats, a few bytes a weight are read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._last_read = functools.lru_cache(_KEPT)(self._read_from)
        self._reading = threading.Lock()
        with Catalog.open(path) as catalog, frozen_heap():
            entries, weights, *_ = decoded_weights(catalog, np.dtype(np.float32))
            files = {entry.file for entry in entries.values()}
            self._identities = {file: catalog.storage.identity(file) for file in files}
            self._configured = configured_quantization(catalog, whole=True)
        if not weights:
            raise MappingError(
                "the folder has no quantised weights", found=self.path, expected="some"
            )
        self._weights = {
            name: self._weight(name, weight, entries) for name, weight in weights.items()
        }
        parts = {part for weight in weights.values() for part in weight.parts}
        written = {part for weight in self._weights.values() for part in weight.written}
        self._beside = {  # scales of activations, and parts that say nothing of the values
            name: FolderTensor(entry, self._read)
            for name, entry in entries.items()
            if (name in parts or is_of_activations(name, weights)) and name not in written
        }

    def __repr__(self) -> str:
        return f"Quantization.like({redact_urls(self.path)!r})"

    def fingerprint(self) -> str:
        return repr((self, sorted(self._identities.items()), self._configured))

    def _read(self, entry: TensorEntry) -> np.ndarray:
        with self._reading:  # one reads for all that wait
            return self._last_read(entry)

    def _read_from(self, entry: TensorEntry) -> np.ndarray:
        storage, _ = open_storage(self.path)
        with storage:
            seen, expected = storage.identity(entry.file), self._identities[entry.file]
            if seen != expected:
                raise StorageError(
                    "the file was changed or replaced since Quantization.like looked at it",
                    file=entry.file,
                    tensor=entry.name,
                    expected=expected,
                    found=seen,
                    hint="Call it again, on a folder that nothing writes to.",
                )
            data = read_range(storage, entry.file, entry.start, entry.nbytes)
        return np.frombuffer(data, entry.dtype.numpy).reshape(entry.shape)

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
                add_parts(
                    result,
                    name,
                    known.layout.tensors(name, weight, before=known.before, shapes=known.shapes),
                    weights,
                )
        modules = {
            name[:end] for name in weights for end, letter in enumerate(name) if letter == "."
        }
        for name, tensor in self._beside.items():
            if name not in weights and name.rpartition(".")[0] in modules:
                result[name] = tensor.expression()
        return result

    def configured(
        self, files: Mapping[str, bytes], weights: Mapping[str, BoundExpr]
    ) -> dict[str, bytes]:
        """Return the files beside the model with what the folder's say of its quantisation."""
        older = {name: files[name] for name in OLDER_CONFIGS if name in files}
        files = plain_configurations(files) | older
        for file, values in self._configured.items():
            if file in files or file != CONFIG:
                files[file] = with_settings(files.get(file, b"{}"), values, file)
        return files

    def _weight(
        self, name: str, weight: DecodedWeight, entries: Mapping[str, TensorEntry]
    ) -> _Weight:
        scheme, parts, _, stored = weight
        parts = dataclasses.replace(parts, is_written=True)
        if scheme.layout is None or parts.entry(INPUT_SCALE) is not None:
            beside = " with scales of inputs" * (scheme.layout is not None)
            raise parts.error(f"{scheme.name}{beside} can be loaded, not saved")
        layout = scheme.layout(parts)
        scale, factor = parts.entry(layout.scales), parts.entry(layout.factor)
        values = parts.entry(layout.values)
        assert scale is not None
        assert values is not None
        of_weight = FolderTensor(factor, self._read) if layout.factor and factor else None
        before = FolderScales(
            FolderTensor(scale, self._read), of_weight, FolderTensor(values, self._read_from)
        )
        written = (layout.values, layout.scales, *filter(None, (layout.factor, layout.shape)))
        names = tuple(joined_name(name, part) for part in written)
        return _Weight(layout, names, {part: entries[part].shape for part in stored}, before)
