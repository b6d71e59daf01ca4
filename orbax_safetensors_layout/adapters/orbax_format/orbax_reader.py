"""Checkpoints that Orbax saved, as a source of conversions."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from orbax_safetensors_layout.conversion import ReadableArrays, SourceArray
from orbax_safetensors_layout.errors import CheckpointNotFoundError, FormatError, StorageError
from orbax_safetensors_layout.format import TensorKind
from orbax_safetensors_layout.geometry import Box, cut

from .tensorstore_io import (
    OpenArray,
    custom_metadata,
    open_tree,
)

_MOST_TEXT = 500  # characters of an error of others


class OrbaxReader:
    """One item that Orbax saved, with either API, in any of its formats.

    Args:
        path: The item's folder.
        tell: Told of arrays that cannot be opened, which are then left out.

    Raises:
        CheckpointNotFoundError: Orbax finds no tree there.
        FormatError: Its metadata are malformed.
        StorageError: Arrays cannot be opened, and `tell` is not given; names all.
    """

    kind = "orbax"
    is_recorded = True
    metadata: Mapping[str, str] = {}

    def __init__(self, path: str, tell: Callable[[StorageError], None] | None = None) -> None:
        self.path = path
        self._open: dict[str, OpenArray] = {}
        self._problems: list[StorageError] = []
        try:
            tree = open_tree(path)
            self.custom = custom_metadata(path)
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointNotFoundError(
                "Orbax finds no tree", file=path, found=_first_line(error)
            ) from error
        except (KeyError, TypeError, AttributeError, NotImplementedError) as error:
            raise FormatError(
                "Orbax can not read its own metadata", file=path, found=repr(error)
            ) from error
        self.tree = jax.tree.map(self._leaf, tree)
        if tell is None:
            self._raise_problems()
        else:
            for problem in self._problems:
                tell(problem)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, OpenArray):
            return leaf.item() if isinstance(leaf, np.generic) else leaf
        if leaf.problem is not None:
            self._problems.append(
                StorageError(
                    "the array can not be opened",
                    file=self.path,
                    tensor=leaf.name,
                    found=_first_line(leaf.problem),
                )
            )
            return None
        self._open[leaf.name] = leaf
        shape, dtype = tuple(leaf.store.shape), np.dtype(leaf.store.dtype.numpy_dtype)
        if leaf.keys is not None:
            impl = str(jax.random.key_impl(leaf.keys))
            return SourceArray(leaf.name, leaf.name, shape, dtype, "key", impl)
        kind: TensorKind = "jax" if leaf.is_jax else "numpy"
        return SourceArray(leaf.name, leaf.name, shape, dtype, kind)

    def _raise_problems(self) -> None:
        if len(self._problems) > 1:
            first = self._problems[0]
            raise StorageError(
                f"{len(self._problems)} arrays can not be opened:"
                f" {[problem.tensor for problem in self._problems[:10]]}",
                file=self.path,
                tensor=first.tensor,
                found=first.found,
            )
        for problem in self._problems:
            raise problem

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

    def readable(self, arrays: Sequence[SourceArray]) -> ReadableArrays | None:
        """None: whole chunks are decoded."""
        return None

    def blocks(self, array: SourceArray, most_bytes: int) -> Iterator[Box]:
        """Whole chunks."""
        opened = self._open[array.stored]
        return cut(array.shape, array.dtype.itemsize, most_bytes, chunk=opened.chunk)

    def read(self, blocks: Sequence[tuple[SourceArray, Box]]) -> list[np.ndarray]:
        """Some of the blocks."""
        reads = [self._open[array.stored].store[box.slices].read() for array, box in blocks]
        found = []
        for (array, box), values in zip(blocks, reads, strict=True):
            try:
                found.append(np.ascontiguousarray(values.result()).reshape(box.shape))
            except ValueError as error:  # TensorStore's
                raise StorageError(
                    f"reading {list(box.start)} to {list(box.stop)} failed",
                    file=self.path,
                    tensor=array.name,
                    found=_first_line(error),
                ) from error
        return found

    def chunk(self, array: SourceArray) -> tuple[int, ...]:
        """Shape of what is decoded at once."""
        return self._open[array.stored].chunk

    def chunk_count(self, array: SourceArray) -> int:
        """In how many chunks an array is stored."""
        chunk = self.chunk(array)
        return math.prod(-(-n // max(1, step)) for n, step in zip(array.shape, chunk, strict=True))

    def close(self) -> None:
        """Lets go of the open arrays."""
        self._open.clear()


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:_MOST_TEXT]
