"""What a checkpoint holds, from its headers and its model's configuration alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.catalog import Catalog, Quantization, find_quantization
from orbax_safetensors_layout.errors import CheckpointNotFoundError, FormatError
from orbax_safetensors_layout.format import SUFFIX, TensorEntry, ValueLeaf, leaf_names
from orbax_safetensors_layout.mapping import read_config


class TensorFacts(NamedTuple):
    """One tensor.

    Attributes:
        name: Its name.
        dtype: Its dtype's code.
        shape: Its shape.
        nbytes: Its bytes.
        parameters: Parameters of the model that it holds: none in the scales of a quantised
            weight, two in a byte that packs two.
        files: Names of the files that it is in, relative to the checkpoint; empty where Orbax saved
            it.
        pieces: In how many pieces, or chunks of Orbax, it is stored; 1 where it is whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parameters: int
    files: tuple[str, ...]
    pieces: int


class Total(NamedTuple):
    """Of tensors of one dtype, or of one file."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    def plus(self, tensor: TensorFacts) -> Total:
        """With one more tensor."""
        return Total(
            self.tensors + 1, self.parameters + tensor.parameters, self.nbytes + tensor.nbytes
        )


class Inspection(NamedTuple):
    """What `inspect` tells.

    Attributes:
        path: The checkpoint.
        layout: `hf`, `sharded` or `orbax`.
        tensors: Its tensors, those that were asked for.
        files: File name, relative to the checkpoint, to its size in bytes.
        metadata: Its `__metadata__` strings.
        quantization: What is quantised; None where nothing is.
        values: Name to value of what was saved beside the tensors.
        model: The model's architecture, as its configuration names it.
        problem: What of its configuration cannot be read, or cannot be; None for nothing.
    """

    path: str
    layout: str
    tensors: tuple[TensorFacts, ...]
    files: dict[str, int]
    metadata: dict[str, str]
    quantization: Quantization | None
    values: dict[str, object]
    model: str | None
    problem: str | None = None

    @property
    def total(self) -> Total:
        """Of all its tensors."""
        return _total(self.tensors)

    def by_dtype(self) -> dict[str, Total]:
        """Totals by dtype code, most bytes first."""
        codes = dict.fromkeys(tensor.dtype for tensor in self.tensors)
        found = {code: _total(t for t in self.tensors if t.dtype == code) for code in codes}
        return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))


def _total(tensors: Iterable[TensorFacts]) -> Total:
    total = Total()
    for tensor in tensors:
        total = total.plus(tensor)
    return total


def inspect(path: str | os.PathLike[str], *, only: str | Sequence[str] | None = None) -> Inspection:
    """What a checkpoint holds. Headers and side files are read, no tensor is.

    Args:
        path: The checkpoint.
        only: Patterns of the tensors to tell of, as for `load`.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        FormatError: A file is malformed.
        MissingTensorError: A pattern matches nothing.
    """
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
        names = catalog.names if only is None else catalog.select(only)
        config, problem = read_configuration(path)
        quantization = find_quantization(entries, config)
        if quantization is not None and quantization.problem:
            problem = quantization.problem
        parameters = {} if quantization is None else quantization.parameters
        folder = os.path.dirname(catalog.path) if catalog.storage.is_file(catalog.path) else None
        root = (catalog.path if folder is None else folder).rstrip("/") + "/"
        values: dict[str, object] = {}
        manifest = catalog.manifest()
        if manifest is not None and manifest.tree is not None:
            named = leaf_names(manifest.tree)
            values = {name: leaf.value for name, leaf in named if isinstance(leaf, ValueLeaf)}
        return Inspection(
            path=catalog.path,
            layout=catalog.layout,
            tensors=tuple(
                _facts(catalog, entries[name], parameters.get(name), root) for name in names
            ),
            files={f.removeprefix(root): catalog.storage.size(f) for f in catalog.files},
            metadata=catalog.metadata(),
            quantization=quantization,
            values=values,
            model=_model(config),
            problem=problem,
        )


def _facts(catalog: Catalog, entry: TensorEntry, parameters: int | None, root: str) -> TensorFacts:
    elements = math.prod(entry.shape)
    return TensorFacts(
        entry.name,
        entry.dtype.label,
        entry.shape,
        entry.nbytes,
        elements if parameters is None else parameters,
        tuple(file.removeprefix(root) for file in catalog.files_of(entry.name)),
        max(1, len(catalog.pieces([entry.name]).get(entry.name, ()))),
    )


def read_configuration(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], str | None]:
    """The model's configuration, and why it cannot be read; empty where there is none."""
    try:
        return ({} if os.fspath(path).endswith(SUFFIX) else read_config(path)), None
    except CheckpointNotFoundError:
        return {}, None
    except FormatError as error:
        return {}, str(error)


def _model(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0][:80]
    kind = config.get("model_type")
    return kind[:80] if isinstance(kind, str) else None
