"""Lists a checkpoint's content, from headers, metadata and its model's configuration alone."""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from orbax_safetensors_layout.catalog import (
    Catalog,
    QuantizedWeights,
    find_quantization,
    select_names,
)
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    StorageError,
    UnsupportedDtypeError,
)
from orbax_safetensors_layout.format import SUFFIX, TensorEntry, dtype_from_numpy
from orbax_safetensors_layout.mapping import read_config
from orbax_safetensors_layout.options import PathLike


class InspectedTensor(NamedTuple):
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parameters: int  # none in the scales of a quantised weight, two in a byte that packs two
    files: tuple[str, ...]  # relative to the checkpoint; empty where Orbax saved it
    pieces: int  # or chunks of Orbax; 1 where it is stored whole


class Total(NamedTuple):
    """Sums over tensors."""

    tensors: int
    parameters: int
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[InspectedTensor]) -> Self:
        return cls(len(tensors), sum(t.parameters for t in tensors), sum(t.nbytes for t in tensors))


class Inspection(NamedTuple):
    """The result of `inspect`."""

    path: str
    model: str | None
    problem: str | None  # what is wrong with the model's configuration, or may be with shapes
    layout: str  # `hf`, `sharded` or `orbax`
    quantization: QuantizedWeights | None
    metadata: dict[str, str]
    values: dict[str, object]  # what was saved beside the tensors
    files: dict[str, int]  # sizes in bytes, by names relative to the checkpoint
    tensors: tuple[InspectedTensor, ...]

    @property
    def total(self) -> Total:
        return Total.of(self.tensors)

    def by_dtype(self) -> dict[str, Total]:
        """Totals by dtype code, most bytes first."""
        tensors: dict[str, list[InspectedTensor]] = defaultdict(list)
        for tensor in self.tensors:
            tensors[tensor.dtype].append(tensor)
        totals = {dtype: Total.of(members) for dtype, members in tensors.items()}
        return dict(sorted(totals.items(), key=lambda item: -item[1].nbytes))


def inspect(path: PathLike, *, only: str | Sequence[str] | None = None) -> Inspection:
    """Lists a safetensors checkpoint, or tensors by patterns as for `load`; reads no tensor."""
    with Catalog.open(path) as catalog:
        entries = catalog.entries(catalog.names, compares_shapes=True)
        names = catalog.names if only is None else catalog.select(only)
        config, problem = read_configuration(catalog)
        quantization = find_quantization(entries, config)
        if quantization is not None and quantization.problem:
            problem = quantization.problem
        if catalog.doubt is not None:
            problem = str(catalog.doubt.error)
        parameters = {} if quantization is None else quantization.parameters
        is_file = catalog.storage.is_file(catalog.path)
        root = (os.path.dirname(catalog.path) if is_file else catalog.path).rstrip("/") + "/"
        manifest = catalog.manifest()
        return Inspection(
            path=catalog.path,
            layout=catalog.layout,
            tensors=tuple(
                _inspected(catalog, entries[name], parameters.get(name), root) for name in names
            ),
            files={f.removeprefix(root): catalog.storage.size(f) for f in catalog.files},
            metadata=catalog.metadata(),
            quantization=quantization,
            values={} if manifest is None else {**manifest.values()},
            model=_model(config),
            problem=problem,
        )


def _inspected(
    catalog: Catalog, entry: TensorEntry, parameters: int | None, root: str
) -> InspectedTensor:
    elements = math.prod(entry.shape)
    return InspectedTensor(
        entry.name,
        entry.dtype.label,
        entry.shape,
        entry.nbytes,
        elements if parameters is None else parameters,
        tuple(file.removeprefix(root) for file in catalog.files_of(entry.name)),
        max(1, len(catalog.pieces([entry.name]).get(entry.name, ()))),
    )


def inspect_dequantized(
    path: PathLike, dtype: str, *, only: str | Sequence[str] | None = None
) -> Inspection:
    """Lists a safetensors checkpoint as `dequantized` makes it; `files` are the stored ones."""
    from orbax_safetensors_layout.mapping import dequantized

    report = inspect(path)
    stored = {tensor.name: tensor for tensor in report.tensors}
    leaves = dequantized(path, dtype=dtype).bind(path).leaves
    names = [*leaves] if only is None else select_names(leaves, only, path=report.path)
    tensors = []
    for name, leaf in zip(names, map(leaves.__getitem__, names), strict=True):
        sources = [stored[source] for source in leaf.sources()]
        if sources == [stored.get(name)]:  # a tensor that is not quantised
            tensors += sources
            continue
        code, size = dtype_code(leaf.dtype), math.prod(leaf.shape)
        files = dict.fromkeys(file for source in sources for file in source.files)
        nbytes = size * leaf.dtype.itemsize
        tensors.append(InspectedTensor(name, code, leaf.shape, nbytes, size, (*files,), 1))
    assumed = report.quantization and report.quantization.problem
    problem = None if report.problem == assumed else report.problem
    return report._replace(tensors=tuple(tensors), problem=problem)


def inspect_orbax(path: str, *, only: str | Sequence[str] | None = None) -> Inspection:
    """Lists an item that Orbax saved. Only small arrays that may be PRNG keys are read."""
    from orbax_safetensors_layout.adapters import OrbaxReader
    from orbax_safetensors_layout.conversion import arrays_of, rerooted, values_of

    with contextlib.closing(OrbaxReader(path)) as source:
        tree = rerooted(source.tree, None)
        arrays = arrays_of(tree)
        names = [*arrays] if only is None else select_names(arrays, only, path=path)
        tensors = []
        for array in map(arrays.__getitem__, names):
            code, size = dtype_code(array.dtype), math.prod(array.shape)
            chunks = source.chunk_count(array)
            tensors.append(
                InspectedTensor(array.name, code, array.shape, array.nbytes, size, (), chunks)
            )
        return Inspection(
            path=path,
            layout="orbax",
            tensors=tuple(tensors),
            files=files_below(path),
            metadata={},
            quantization=None,
            values=values_of(tree),
            model=None,
            problem=None,
        )


def files_below(path: str) -> dict[str, int]:
    """Return the sizes of all files in a folder and below it, by relative names."""
    sizes = {}
    for root, folders, names in os.walk(path):
        folders.sort()
        for file in (os.path.join(root, name) for name in sorted(names)):
            sizes[os.path.relpath(file, path)] = os.path.getsize(file)
    return sizes


def dtype_code(dtype: np.dtype) -> str:
    """Return a dtype's code in safetensors files, or numpy's name of one that they lack."""
    try:
        return dtype_from_numpy(dtype).code
    except UnsupportedDtypeError:
        return dtype.name


def read_configuration(catalog: Catalog) -> tuple[Mapping[str, Any], str | None]:
    """Return the model's configuration, empty where it has none, and why it cannot be read."""
    path = catalog.path
    try:
        return ({} if path.endswith(SUFFIX) else read_config(path, storage=catalog.storage)), None
    except CheckpointNotFoundError:
        return {}, None
    except (FormatError, StorageError) as error:
        return {}, str(error)


def _model(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0][:80]
    kind = config.get("model_type")
    return kind[:80] if isinstance(kind, str) else None
