"""Checkpoints that Orbax saved, as a source of conversions."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_safetensors_layout.adapters.streaming import OpenArray, custom_metadata, open_tree
from orbax_safetensors_layout.conversion.boxes import chunk_blocks
from orbax_safetensors_layout.conversion.leaves import Lease
from orbax_safetensors_layout.conversion.source import SourceArray
from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.format.nodes import TensorKind
from orbax_safetensors_layout.geometry.box import Box


class OrbaxSource:
    """One item that Orbax saved, with either API, in any of its formats.

    Args:
        path: The item's folder.

    Raises:
        CheckpointNotFoundError: Orbax finds no tree there.
    """

    kind = "orbax"
    is_recorded = True
    metadata: Mapping[str, str] = {}

    def __init__(self, path: str) -> None:
        self.path = path
        self._open: dict[str, OpenArray] = {}
        try:
            tree = open_tree(path)
            self.custom = custom_metadata(path)
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointNotFoundError(
                "Orbax finds no tree", file=path, found=str(error).split("\n")[0]
            ) from error
        self.tree = jax.tree.map(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, OpenArray):
            return leaf.item() if isinstance(leaf, np.generic) else leaf
        self._open[leaf.name] = leaf
        shape, dtype = tuple(leaf.store.shape), np.dtype(leaf.store.dtype.numpy_dtype)
        if leaf.keys is not None:
            impl = str(jax.random.key_impl(leaf.keys))
            return SourceArray(leaf.name, leaf.name, shape, dtype, "key", impl)
        kind: TensorKind = "jax" if leaf.is_jax else "numpy"
        return SourceArray(leaf.name, leaf.name, shape, dtype, kind)

    def identity(self) -> str:
        """Of all files their names, sizes and times."""
        found = []
        for root, _, names in os.walk(self.path):
            for name in names:
                file = os.path.join(root, name)
                status = os.stat(file)
                place = os.path.relpath(file, self.path)
                found.append((place, status.st_size, status.st_mtime_ns))
        return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()

    def lease(self, arrays: Sequence[SourceArray]) -> Lease | None:
        """None: whole chunks are decoded."""
        return None

    def blocks(self, array: SourceArray, most_bytes: int) -> Iterator[Box]:
        """Whole chunks."""
        opened = self._open[array.stored]
        return chunk_blocks(array.shape, opened.chunk, array.dtype.itemsize, most_bytes)

    def read(self, wanted: Sequence[tuple[SourceArray, Box]]) -> list[np.ndarray]:
        """Some of the blocks."""
        reads = [self._open[array.stored].store[box.slices].read() for array, box in wanted]
        found = []
        for (array, box), values in zip(wanted, reads, strict=True):
            try:
                found.append(np.ascontiguousarray(values.result()).reshape(box.shape))
            except ValueError as error:  # TensorStore's
                raise StorageError(
                    f"reading {list(box.start)} to {list(box.stop)} failed",
                    file=self.path,
                    tensor=array.name,
                    found=str(error).split("\n")[0],
                ) from error
        return found

    def largest_chunk_bytes(self, array: SourceArray) -> int:
        """A chunk, decoded."""
        return math.prod(self._open[array.stored].chunk) * array.dtype.itemsize

    def chunk_count(self, array: SourceArray) -> int:
        """In how many chunks an array is stored."""
        chunk = self._open[array.stored].chunk
        return math.prod(-(-n // max(1, step)) for n, step in zip(array.shape, chunk, strict=True))

    def close(self) -> None:
        """Lets go of the open arrays."""
        self._open.clear()
