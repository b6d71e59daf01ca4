"""Whole arrays of a source, brought to where any region of them can be read, each byte once.

What fits is held in memory; the rest stands in a temporary file beside the target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from orbax_safetensors_layout.format import DType, TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box, StridedRuns
from orbax_safetensors_layout.runtime import Bytes, allocate
from orbax_safetensors_layout.storage import Buffer, FileWriter, LocalStorage

from .checkpoint_reader import CheckpointReader, SourceArray
from .readable_arrays import LeafRegion, ReadableArrays, batches


@contextlib.contextmanager
def staged(
    source: CheckpointReader,
    arrays: Sequence[SourceArray],
    spool: str,
    *,
    most_bytes: int,
    block_bytes: int,
) -> Iterator[ReadableArrays]:
    """Reads arrays as a whole.

    Args:
        source: The source.
        arrays: Which.
        spool: Path of the temporary file.
        most_bytes: What may be held in memory; more goes to the file.
        block_bytes: Bytes that are read at once.

    Raises:
        SafetensorsLayoutError: A read, or a write to the temporary file, failed.
    """
    if sum(array.nbytes for array in arrays) <= most_bytes:
        memory = {array.name: allocate(array.nbytes) for array in arrays}
        for array, box, values in _blocks(source, arrays, block_bytes):
            bits = f"u{array.dtype.itemsize}"  # numpy knows no fast copy of bfloat16 and its like
            memory[array.name].view(bits).reshape(array.shape)[box.slices] = values.view(bits)
        entries = {array.name: _entry(array, array.name, 0) for array in arrays}
        yield ReadableArrays(entries, _Memory(memory))
        return
    with LocalStorage() as storage:
        try:
            yield ReadableArrays(_spooled(source, arrays, spool, storage, block_bytes), storage)
        finally:
            storage.remove(spool)


def _blocks(
    source: CheckpointReader, arrays: Sequence[SourceArray], most_bytes: int
) -> Iterator[tuple[SourceArray, Box, np.ndarray]]:
    """All of some arrays, as many blocks at once as fit."""
    blocks = [
        LeafRegion(array.leaf, box) for array in arrays for box in source.blocks(array, most_bytes)
    ]
    by_name = {array.name: array for array in arrays}
    for batch in batches(blocks, most_bytes):
        wanted = [(by_name[leaf.name], box) for leaf, box in batch]
        for (array, box), values in zip(wanted, source.read(wanted), strict=True):
            yield array, box, values


class _Memory:
    """Arrays in memory, read as if each were a file."""

    kind = "local"

    def __init__(self, arrays: Mapping[str, Bytes]) -> None:
        self._arrays = arrays

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        """Copies bytes of an array."""
        data = self._arrays[file]
        for buffer in buffers:
            # numpy's copy lets other threads run; a memoryview's does not.
            np.frombuffer(buffer, np.uint8)[...] = data[offset : offset + len(buffer)]
            offset += len(buffer)

    def check_unchanged(self, file: str) -> None:
        """Nothing else writes to it."""

    def interrupt(self) -> None:
        """Nothing waits."""


def _entry(array: SourceArray, file: str, start: int) -> TensorEntry:
    # Also dtypes that files have no code for, one element a whole number of bytes.
    dtype = DType(array.dtype.name, array.dtype, 8 * array.dtype.itemsize)
    return TensorEntry(array.name, dtype, array.shape, file, start, start + array.nbytes)


def _spooled(
    source: CheckpointReader,
    arrays: Sequence[SourceArray],
    spool: str,
    storage: LocalStorage,
    block_bytes: int,
) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    at = 0
    for array in arrays:
        entries[array.name] = _entry(array, spool, at)
        at += array.nbytes
    file = storage.create(spool, at, durable=False)
    try:
        for array, box, values in _blocks(source, arrays, block_bytes):
            write_box(file, array.shape, entries[array.name].start, box, values)
        file.finish()
    except BaseException:
        file.abort()
        raise
    return entries


def write_box(
    file: FileWriter, shape: Sequence[int], start: int, box: Box, values: np.ndarray
) -> None:
    """Writes a box of a row-major array to a file.

    Args:
        file: The file.
        shape: The array's shape.
        start: Its first byte in the file.
        box: The box.
        values: Its values, contiguous.
    """
    view = AffineView.row_major(shape).restrict(box)
    runs = StridedRuns.of(view, values.itemsize, start)
    data = values.reshape(-1).view(np.uint8)
    for number, offset in enumerate(runs.offsets().tolist()):
        file.write_at(offset, [data[number * runs.run_bytes : (number + 1) * runs.run_bytes]])
