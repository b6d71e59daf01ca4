"""The arrays of a checkpoint that is compared with another, by name; boxes of them can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.adapters import open_reader
from orbax_safetensors_layout.catalog import CheckpointRef
from orbax_safetensors_layout.conversion import (
    CheckpointReader,
    SafetensorsReader,
    SourceArray,
    arrays_of,
    rerooted,
    values_of,
)
from orbax_safetensors_layout.errors import MappingError, StorageError
from orbax_safetensors_layout.geometry import Box, chunk_parts
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.mapping import TensorSpec
from orbax_safetensors_layout.options import ReadOptions

BLOCKS_IN_BUDGET = 4
"""Blocks that fit a memory budget: one of either checkpoint, and as much to read it with."""


class ArrayBox(NamedTuple):
    """A box of an array, by the array's name."""

    name: str
    box: Box


class CheckpointArrays:
    """The arrays of a checkpoint.

    Args:
        reader: Reads the checkpoint.
        options: How much memory to take.
        subtree: Dotted name of a part of its tree; None for all.

    Attributes:
        path: Where it is.
        arrays: Shapes and dtypes by name.
        values: Texts of what the tree holds besides arrays, by name; None where it is not known.

    Raises:
        MissingTensorError: There is no such part.
    """

    def __init__(
        self, reader: CheckpointReader, options: ReadOptions, subtree: str | None = None
    ) -> None:
        tree = rerooted(reader.tree, subtree)
        self._reader = reader
        self._most_bytes = options.memory_budget_bytes // BLOCKS_IN_BUDGET
        self._arrays = arrays_of(tree)
        self.path = reader.path
        self.arrays: Mapping[str, TensorSpec] = {
            name: TensorSpec(array.shape, array.dtype) for name, array in self._arrays.items()
        }
        self.values: Mapping[str, str] | None = None
        if reader.is_recorded:
            self.values = {name: repr(value) for name, value in values_of(tree).items()}

    def chunk_bytes(self, name: str) -> int:
        """Host bytes that it takes to read any of an array, besides what is asked for."""
        return self._reader.largest_chunk_bytes(self._arrays[name])

    def blocks(self, name: str, most_bytes: int) -> Iterator[Box]:
        """Boxes of an array that together read each byte once."""
        return self._reader.blocks(self._arrays[name], most_bytes)

    def read(self, blocks: Sequence[ArrayBox]) -> list[np.ndarray]:
        """Values of some boxes, in their order; decodes no more chunks at once than fit."""
        wanted = [(self._arrays[name], box) for name, box in blocks]
        if sum(self._decoded_bytes(array, box) for array, box in wanted) <= self._most_bytes:
            return self._reader.read(wanted)
        return [self._read_in_parts(array, box) for array, box in wanted]

    def _decoded_bytes(self, array: SourceArray, box: Box) -> int:
        """Bytes of the chunks that a box overlaps."""
        chunk = self._reader.chunk(array)
        if chunk is None:
            return 0
        return len([*chunk_parts(box, chunk)]) * self._reader.largest_chunk_bytes(array)

    def _read_in_parts(self, array: SourceArray, box: Box) -> np.ndarray:
        chunk = self._reader.chunk(array)
        assert chunk is not None
        parts = [*chunk_parts(box, chunk)]
        room = max(1, self._most_bytes // max(1, self._reader.largest_chunk_bytes(array)))
        values = np.empty(box.shape, array.dtype)
        for first in range(0, len(parts), room):
            some = parts[first : first + room]
            for part, found in zip(
                some, self._reader.read([(array, part) for part in some]), strict=True
            ):
                values[part.within(box).slices] = found
        return values


@contextlib.contextmanager
def opened(
    ref: CheckpointRef, options: ReadOptions, on_error: Callable[[StorageError], None]
) -> Iterator[CheckpointArrays]:
    """Opens a checkpoint that Orbax saved.

    Args:
        ref: The checkpoint.
        options: How to read.
        on_error: Called for each array that cannot be opened, which is then left out.
    """
    with contextlib.closing(open_reader(ref, options, on_error)) as reader:
        yield CheckpointArrays(reader, options)


@contextlib.contextmanager
def both_opened(
    one: CheckpointRef,
    other: CheckpointRef,
    options: ReadOptions,
    *,
    mapping: LeafMapping | None,
    subtree: str | None,
) -> Iterator[tuple[CheckpointArrays, CheckpointArrays]]:
    """Opens two checkpoints to be compared: as files, or as trees where one is more than files.

    Args:
        one: A checkpoint.
        other: Another.
        options: How to read.
        mapping: What the arrays of `one` are made of in `other`.
        subtree: Dotted name of the part of the tree of `one` that counts.

    Raises:
        MappingError: The mapping does not fit, or `other` is what Orbax saved.
        MissingTensorError: There is no such part.
    """
    trees = one.is_orbax or other.is_orbax or subtree is not None
    if mapping is not None and other.is_orbax:
        raise MappingError(
            "a mapping takes the tensors of a safetensors checkpoint",
            file=other.path,
            found="a checkpoint of Orbax",
            hint="Exchange the two: PATH is the model, and --against what it is made of.",
        )
    with contextlib.ExitStack() as stack:

        def arrays(
            ref: CheckpointRef, mapping: LeafMapping | None, subtree: str | None
        ) -> CheckpointArrays:
            reader: CheckpointReader
            if trees and mapping is None:
                reader = open_reader(ref, options)
            else:
                reader = SafetensorsReader(ref.path, options, mapping=mapping, is_flat=True)
            stack.callback(reader.close)
            return CheckpointArrays(reader, options, subtree)

        yield arrays(one, None, subtree), arrays(other, mapping, None)
