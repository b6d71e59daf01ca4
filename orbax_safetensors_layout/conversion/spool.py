"""Spools: arrays and leaves held as a whole where any region of them is read, each byte once.

What fits is in memory; the rest is in a temporary file beside the target.

- `staged` holds arrays of a source that is read in whole chunks, or by several leaves.
- `assembled` holds leaves of a target whose regions lie across what they come from. A region of a
  transposed or stacked leaf may take a little of every row of its source. Read by itself each
  region would then read all of it. So the leaf is read in blocks that the source has in one place,
  and the file has its regions one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.format import DType, TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box, StridedRuns, cut
from orbax_safetensors_layout.plan import StoredSource
from orbax_safetensors_layout.runtime import Bytes, allocate
from orbax_safetensors_layout.storage import Buffer, FileWriter, LocalStorage

from .checkpoint_reader import CheckpointReader, ReadableArrays, SourceArray
from .target import LeafRegion, TargetLeaf, batches, region_batches

_MOST_ORDERS = 24  # of axes that are tried


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
    nbytes = [array.nbytes for array in arrays]
    if sum(nbytes) <= most_bytes:
        memory = {array.name: allocate(array.nbytes) for array in arrays}
        for array, box, values in _array_blocks(source, arrays, block_bytes):
            bits = f"u{array.dtype.itemsize}"  # numpy knows no fast copy of bfloat16 and its like
            memory[array.name].view(bits).reshape(array.shape)[box.slices] = values.view(bits)
        sources = {array.name: _source(array, array.name, 0) for array in arrays}
        yield ReadableArrays(sources, _Memory(memory))
        return
    starts = [0, *itertools.accumulate(nbytes)]
    sources = {
        array.name: _source(array, spool, start)
        for array, start in zip(arrays, starts, strict=False)
    }
    with LocalStorage() as storage, _removed(storage, spool):
        with _written(storage, spool, starts[-1]) as file:
            for array, box, values in _array_blocks(source, arrays, block_bytes):
                start = sources[array.name].entry.start
                _write_box(file, array.shape, start, box, values)
        yield ReadableArrays(sources, storage)


@contextlib.contextmanager
def _removed(storage: LocalStorage, path: str) -> Iterator[None]:
    """Removes a temporary file in the end."""
    try:
        yield
    finally:
        storage.remove(path)


@contextlib.contextmanager
def _written(storage: LocalStorage, path: str, nbytes: int) -> Iterator[FileWriter]:
    """A temporary file that is complete in the end."""
    file = storage.create(path, nbytes, durable=False)
    try:
        yield file
        file.finish()
    except BaseException:
        file.abort()
        raise


def _array_blocks(
    source: CheckpointReader, arrays: Sequence[SourceArray], most_bytes: int
) -> Iterator[tuple[SourceArray, Box, np.ndarray]]:
    """All of some arrays, as many blocks at once as fit."""
    blocks = ((array, box) for array in arrays for box in source.blocks(array, most_bytes))
    for batch in batches(blocks, lambda one: one[1].size * one[0].dtype.itemsize, most_bytes):
        for (array, box), values in zip(batch, source.read(batch), strict=True):
            yield array, box, values


class _Memory:
    """Arrays in memory, read as if each were a file."""

    kind = "local"

    def __init__(self, arrays: Mapping[str, Bytes]) -> None:
        self._arrays = arrays

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        data = self._arrays[file]
        for buffer in buffers:
            # numpy's copy lets other threads run; a memoryview's does not.
            np.frombuffer(buffer, np.uint8)[...] = data[offset : offset + len(buffer)]
            offset += len(buffer)

    def check_unchanged(self, file: str) -> None:
        pass

    def interrupt(self) -> None:
        pass


def _source(array: SourceArray, file: str, start: int) -> StoredSource:
    # Also dtypes that files have no code for, one element a whole number of bytes.
    dtype = DType(array.dtype.name, array.dtype, 8 * array.dtype.itemsize)
    stop = start + array.nbytes
    return StoredSource(TensorEntry(array.name, dtype, array.shape, file, start, stop))


@contextlib.contextmanager
def assembled(
    lease: ReadableArrays,
    regions: Sequence[LeafRegion],
    spool: str,
    *,
    most_bytes: int,
    block_bytes: int,
) -> Iterator[Iterator[tuple[list[LeafRegion], list[np.ndarray]]]]:
    """Gives the regions of some leaves with their values, in their order.

    Args:
        lease: The arrays that the leaves are made of.
        regions: The regions, leaf by leaf; together they are the leaves.
        spool: Path of the temporary file.
        most_bytes: What may be held in memory. A larger leaf is alone, and goes through the file.
        block_bytes: Bytes that are read at once.

    Raises:
        SafetensorsLayoutError: A read, or a write to the temporary file, failed.
    """
    found = [
        list(one) for _, one in itertools.groupby(regions, key=lambda region: region.leaf.name)
    ]
    wholes = [LeafRegion(one[0].leaf, Box.whole(one[0].leaf.shape)) for one in found]
    if max(whole.nbytes for whole in wholes) <= most_bytes:
        yield _from_memory(lease, found, wholes, block_bytes)
        return
    (regions,) = found
    starts = [0, *itertools.accumulate(region.nbytes for region in regions)]
    with LocalStorage() as storage, _removed(storage, spool):
        with _written(storage, spool, starts[-1]) as file:
            _write_regions(lease, regions, starts, file, block_bytes)
        yield _read_regions(regions, starts, spool, storage)


def _from_memory(
    lease: ReadableArrays,
    regions: Sequence[list[LeafRegion]],
    wholes: Sequence[LeafRegion],
    block_bytes: int,
) -> Iterator[tuple[list[LeafRegion], list[np.ndarray]]]:
    in_order = iter(regions)
    for batch in region_batches(wholes, block_bytes):
        for values in lease.read(batch, block_bytes):
            for some in region_batches(next(in_order), block_bytes):
                yield some, [_part(values, region.box) for region in some]


def _write_regions(
    lease: ReadableArrays,
    regions: Sequence[LeafRegion],
    starts: Sequence[int],
    file: FileWriter,
    block_bytes: int,
) -> None:
    leaf = regions[0].leaf
    for block in _leaf_blocks(lease, leaf, block_bytes):
        (values,) = lease.read([LeafRegion(leaf, block)], block_bytes)
        for region, start in zip(regions, starts, strict=False):
            common = block.intersect(region.box)
            if common is not None:
                part = _part(values, common.within(block))
                _write_box(file, region.box.shape, start, common.within(region.box), part)


def _read_regions(
    regions: Sequence[LeafRegion], starts: Sequence[int], spool: str, storage: LocalStorage
) -> Iterator[tuple[list[LeafRegion], list[np.ndarray]]]:
    for region, start in zip(regions, starts, strict=False):
        values = np.empty(region.box.shape, region.leaf.dtype)
        data: Any = values.reshape(-1).view(np.uint8)  # its buffer is untyped in some versions
        storage.read_into(spool, start, [memoryview(data)])
        yield [region], [values]


def _leaf_blocks(lease: ReadableArrays, leaf: TargetLeaf, most_bytes: int) -> list[Box]:
    """Boxes that cover a leaf, cut along the axes that cost the fewest bytes."""
    axes = [axis for axis, extent in enumerate(leaf.shape) if extent > 1]
    orders = itertools.islice(itertools.permutations(axes), _MOST_ORDERS)
    found = [list(cut(leaf.shape, leaf.dtype.itemsize, most_bytes, order)) for order in orders]

    def cost(boxes: list[Box]) -> tuple[float, int]:
        read = lease.bytes_to_read([LeafRegion(leaf, boxes[0])])
        return read / math.prod(boxes[0].shape), len(boxes)

    return min(found, key=cost)


def _part(values: np.ndarray, box: Box) -> np.ndarray:
    """A region of an array, contiguous."""
    bits = values.view(f"u{values.itemsize}")  # numpy knows no fast copy of bfloat16 and its like
    return np.ascontiguousarray(bits[box.slices]).view(values.dtype)


def _write_box(
    file: FileWriter, shape: Sequence[int], start: int, box: Box, values: np.ndarray
) -> None:
    """Writes a box of a row-major array whose first byte is at `start` of a file."""
    view = AffineView.row_major(shape).restrict(box)
    runs = StridedRuns.of(view, values.itemsize, start)
    data = values.reshape(-1).view(np.uint8)
    for number, offset in enumerate(runs.offsets().tolist()):
        file.write_at(offset, [data[number * runs.run_bytes : (number + 1) * runs.run_bytes]])
