"""Blocks of a group: its regions and their values, as many at once as fit, each byte read once.

Regions that cannot be read by themselves are taken from a spool: memory, or a temporary file beside
the target where it would not fit.

- `_spooled` holds arrays of a source that is read in whole chunks, or by several leaves.
- `_assembled` holds leaves of a target whose regions lie across what they come from. A region of a
  transposed or stacked leaf may take a little of every row of its source. Read by itself each
  region would then read all of it. So the leaf is read in blocks that the source has in one place,
  and the file has its regions one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from orbax_safetensors_layout.format import DType, TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box, StridedRuns, cut, row_blocks
from orbax_safetensors_layout.mapping import unseen_inputs
from orbax_safetensors_layout.plan import StoredSource
from orbax_safetensors_layout.runtime import allocate, batches
from orbax_safetensors_layout.storage import FileWriter, LocalStorage, MemoryReader, new_file

from .checkpoint_reader import CheckpointReader, ReadableArrays, SourceArray
from .groups import LeafGroup
from .target import LeafRegion, TargetArray, region_batches

_MOST_ORDERS = 24  # of axes that are tried
_LARGEST_INTEGER = 8  # bytes, of numpy's

Blocks: TypeAlias = Iterator[tuple[list[LeafRegion], list[np.ndarray]]]
"""Regions and their values, as many as are in memory at once."""


@contextlib.contextmanager
def group_blocks(
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    group: LeafGroup,
    spool: str,
    *,
    most_bytes: int,
    block_bytes: int,
) -> Iterator[Blocks]:
    """Yields the blocks of a group, in the order of its regions; `block_bytes` are read at once.

    Up to `most_bytes` of a spool are in memory, more in the file `spool`.
    """
    names = dict.fromkeys(name for region in group.regions for name in region.leaf.sources)
    readable = None if group.spooled else source.readable([arrays[name] for name in names])
    if readable is None:
        with _spooled(source, group.spooled, spool, most_bytes, block_bytes) as spooled:
            yield _read(spooled, group.regions, block_bytes)
    elif group.is_assembled:
        most_bytes //= 2  # what is decoded or cast is there twice for a while
        with _assembled(readable, group.regions, spool, most_bytes, block_bytes) as blocks:
            yield blocks
    else:
        yield _read(readable, group.regions, block_bytes)


def _read(arrays: ReadableArrays, regions: Sequence[LeafRegion], block_bytes: int) -> Blocks:
    for _, own in itertools.groupby(regions, lambda region: region.leaf.name):
        _scan(arrays, next(own).leaf, block_bytes)
    for batch in region_batches(regions, block_bytes):
        yield batch, arrays.read(batch, block_bytes)


def _scan(arrays: ReadableArrays, leaf: TargetArray, block_bytes: int) -> None:
    """Reads once what decoders of a leaf have to have seen all of."""
    nodes = [] if isinstance(leaf.made_of, str) else leaf.made_of.nodes()
    for operand, decoder in unseen_inputs(nodes):
        whole = TargetArray(leaf.name, operand.shape, operand.dtype, "jax", operand)
        boxes = row_blocks(whole.shape, 8 * whole.dtype.itemsize, block_bytes, whole=True)
        for batch in region_batches((LeafRegion(whole, box) for box in boxes), block_bytes):
            for region, values in zip(batch, arrays.read(batch, block_bytes), strict=True):
                decoder.scan(region.box.start[0], values)
        decoder.complete()


@contextlib.contextmanager
def _spool_file(
    path: str, nbytes: int, fill: Callable[[FileWriter], None]
) -> Iterator[LocalStorage]:
    """Fills a temporary file; yields the storage that reads it, and removes it in the end."""
    with LocalStorage() as storage:
        try:
            with new_file(storage, path, nbytes, durable=False) as file:
                fill(file)
            yield storage
        finally:
            storage.remove(path)


@contextlib.contextmanager
def _spooled(
    source: CheckpointReader,
    arrays: Sequence[SourceArray],
    spool: str,
    most_bytes: int,
    block_bytes: int,
) -> Iterator[ReadableArrays]:
    """Reads arrays as a whole."""
    starts = [0, *itertools.accumulate(array.nbytes for array in arrays)]
    if starts[-1] <= most_bytes:
        memory = {array.name: allocate(array.nbytes) for array in arrays}
        for array, box, values in _array_blocks(source, arrays, block_bytes):
            bits = _bits(array.dtype)
            memory[array.name].view(bits).reshape(array.shape)[box.slices] = values.view(bits)
        sources = {array.name: _source(array, array.name, 0) for array in arrays}
        yield ReadableArrays(sources, MemoryReader(memory))
        return
    sources = {
        array.name: _source(array, spool, start)
        for array, start in zip(arrays, starts, strict=False)
    }

    def fill(file: FileWriter) -> None:
        for array, box, values in _array_blocks(source, arrays, block_bytes):
            _write_box(file, array.shape, sources[array.name].entry.start, box, values)

    with _spool_file(spool, starts[-1], fill) as storage:
        yield ReadableArrays(sources, storage)


def _array_blocks(
    source: CheckpointReader, arrays: Sequence[SourceArray], most_bytes: int
) -> Iterator[tuple[SourceArray, Box, np.ndarray]]:
    """All of some arrays, as many blocks at once as fit."""
    blocks = ((array, box) for array in arrays for box in source.blocks(array, most_bytes))
    for batch in batches(blocks, lambda block: block[1].size * block[0].dtype.itemsize, most_bytes):
        for (array, box), values in zip(batch, source.read(batch), strict=True):
            yield array, box, values


def _source(array: SourceArray, file: str, start: int) -> StoredSource:
    # Also dtypes that files have no code for, one element a whole number of bytes.
    dtype = DType(array.dtype.name, array.dtype, 8 * array.dtype.itemsize)
    stop = start + array.nbytes
    return StoredSource(TensorEntry(array.name, dtype, array.shape, file, start, stop))


@contextlib.contextmanager
def _assembled(
    arrays: ReadableArrays,
    regions: Sequence[LeafRegion],
    spool: str,
    most_bytes: int,
    block_bytes: int,
) -> Iterator[Blocks]:
    """Yields the blocks of whole leaves; one larger than `most_bytes` is alone."""
    by_leaf = [list(own) for _, own in itertools.groupby(regions, lambda region: region.leaf.name)]
    wholes = [LeafRegion(own[0].leaf, Box.whole(own[0].leaf.shape)) for own in by_leaf]
    if max(whole.nbytes for whole in wholes) <= most_bytes:
        yield _from_memory(arrays, by_leaf, wholes, block_bytes)
        return
    (regions,) = by_leaf
    leaf = regions[0].leaf
    starts = [0, *itertools.accumulate(region.nbytes for region in regions)]

    def fill(file: FileWriter) -> None:
        for block in _leaf_blocks(arrays, leaf, block_bytes):
            (values,) = arrays.read([LeafRegion(leaf, block)], block_bytes)
            for region, start in zip(regions, starts, strict=False):
                common = block.intersect(region.box)
                if common is not None:
                    part = _part(values, common.within(block))
                    _write_box(file, region.box.shape, start, common.within(region.box), part)

    with _spool_file(spool, starts[-1], fill) as storage:
        yield _from_file(regions, starts, spool, storage)


def _from_memory(
    arrays: ReadableArrays,
    by_leaf: Sequence[list[LeafRegion]],
    wholes: Sequence[LeafRegion],
    block_bytes: int,
) -> Blocks:
    in_order = iter(by_leaf)
    for batch in region_batches(wholes, block_bytes):
        for values in arrays.read(batch, block_bytes):
            for regions in region_batches(next(in_order), block_bytes):
                yield regions, [_part(values, region.box) for region in regions]


def _from_file(
    regions: Sequence[LeafRegion], starts: Sequence[int], spool: str, storage: LocalStorage
) -> Blocks:
    for region, start in zip(regions, starts, strict=False):
        values = np.empty(region.box.shape, region.leaf.dtype)
        data: Any = values.reshape(-1).view(np.uint8)  # its buffer is untyped in some versions
        storage.read_into(spool, start, [memoryview(data)])
        yield [region], [values]


def _leaf_blocks(arrays: ReadableArrays, leaf: TargetArray, most_bytes: int) -> list[Box]:
    """Boxes that cover a leaf, cut along the axes that cost the fewest bytes."""
    axes = [axis for axis, extent in enumerate(leaf.shape) if extent > 1]
    orders = itertools.islice(itertools.permutations(axes), _MOST_ORDERS)
    covers = [list(cut(leaf.shape, leaf.dtype.itemsize, most_bytes, order)) for order in orders]

    def cost(boxes: list[Box]) -> tuple[float, int]:
        read = arrays.bytes_to_read([LeafRegion(leaf, boxes[0])])
        return read / math.prod(boxes[0].shape), len(boxes)

    return min(covers, key=cost)


def _bits(dtype: np.dtype) -> np.dtype:
    """Return a dtype as which values are copied: numpy knows no fast copy of bfloat16's like."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.itemsize <= _LARGEST_INTEGER else dtype


def _part(values: np.ndarray, box: Box) -> np.ndarray:
    """A region of an array, contiguous."""
    bits = values.view(_bits(values.dtype))
    return np.ascontiguousarray(bits[box.slices]).view(values.dtype)


def _write_box(
    file: FileWriter, shape: Sequence[int], start: int, box: Box, values: np.ndarray
) -> None:
    """Writes a box of a row-major array whose first byte is at `start` of a file."""
    runs = StridedRuns.of(AffineView.row_major(shape).restrict(box), values.itemsize, start)
    data = values.reshape(-1).view(np.uint8)
    for number, offset in enumerate(runs.offsets().tolist()):
        file.write_at(offset, [data[number * runs.run_bytes : (number + 1) * runs.run_bytes]])
