"""What a checkpoint that Orbax saved holds, from its metadata alone."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np

from orbax_safetensors_layout.adapters import OrbaxReader
from orbax_safetensors_layout.catalog import select_names
from orbax_safetensors_layout.conversion import (
    SourceArray,
    arrays_of,
    rerooted,
    values_of,
)
from orbax_safetensors_layout.errors import UnsupportedDtypeError
from orbax_safetensors_layout.format import dtype_from_numpy

from .inspection import Inspection, TensorFacts


def inspect_orbax(path: str, *, only: str | Sequence[str] | None = None) -> Inspection:
    """What an item that Orbax saved holds. Only small arrays that may be PRNG keys are read.

    Args:
        path: The item's folder.
        only: Patterns of the arrays to tell of, as for `load`.

    Raises:
        CheckpointNotFoundError: Orbax finds no tree there.
        MissingTensorError: A pattern matches nothing.
    """
    with contextlib.closing(OrbaxReader(path)) as source:
        tree = rerooted(source.tree, None)
        arrays = arrays_of(tree)
        names = [*arrays] if only is None else select_names(arrays, only, path=path)
        return Inspection(
            path=path,
            layout="orbax",
            tensors=tuple(_facts(source, arrays[name]) for name in names),
            files=dict(_files(path)),
            metadata={},
            quantization=None,
            values=values_of(tree),
            model=None,
        )


def _facts(source: OrbaxReader, array: SourceArray) -> TensorFacts:
    return TensorFacts(
        array.name,
        _code(array.dtype),
        array.shape,
        array.nbytes,
        math.prod(array.shape),
        files=(),
        pieces=source.chunk_count(array),
    )


def _code(dtype: np.dtype) -> str:
    """The dtype's code in safetensors files, or numpy's name of one that they do not have."""
    try:
        return dtype_from_numpy(dtype).code
    except UnsupportedDtypeError:
        return dtype.name


def _files(folder: str) -> Iterator[tuple[str, int]]:
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            file = os.path.join(root, name)
            yield os.path.relpath(file, folder), os.path.getsize(file)
