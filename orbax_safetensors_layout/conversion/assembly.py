"""Leaves that are put together as a whole, because their regions lie across what they come from.

A region of a transposed or stacked leaf may take a little of every row of its source. Read by
itself each region would then read all of it. So the leaf is read in blocks that the source has in
one place, and its regions are taken out of memory, or of a temporary file that has one after the
other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.geometry import Box, cut
from orbax_safetensors_layout.storage import LocalStorage

from .readable_arrays import (
    LeafRegion,
    ReadableArrays,
    TargetLeaf,
    batches,
    bytes_to_read,
    read_regions,
)
from .spool import write_box

_MOST_ORDERS = 24  # of axes that are tried


@contextlib.contextmanager
def assembled(
    lease: ReadableArrays,
    regions: Sequence[LeafRegion],
    spool: str,
    *,
    most_bytes: int,
    block_bytes: int,
) -> Iterator[Iterator[tuple[list[LeafRegion], list[np.ndarray]]]]:
    """The regions of some leaves with their values, in their order.

    Args:
        lease: What the leaves are made of.
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
    with LocalStorage() as storage:
        try:
            _write(lease, regions, spool, storage, block_bytes)
            yield _read(regions, spool, storage)
        finally:
            storage.remove(spool)


def _from_memory(
    lease: ReadableArrays,
    regions: Sequence[list[LeafRegion]],
    wholes: Sequence[LeafRegion],
    block_bytes: int,
) -> Iterator[tuple[list[LeafRegion], list[np.ndarray]]]:
    in_order = iter(regions)
    for batch in batches(wholes, block_bytes):
        for values in read_regions(lease, batch, memory_budget_bytes=block_bytes):
            for some in batches(next(in_order), block_bytes):
                yield some, [_part(values, region.box) for region in some]


def _write(
    lease: ReadableArrays,
    regions: Sequence[LeafRegion],
    spool: str,
    storage: LocalStorage,
    block_bytes: int,
) -> None:
    starts = _starts(regions)
    file = storage.create(spool, starts[-1], durable=False)
    leaf = regions[0].leaf
    try:
        for block in _blocks(lease, leaf, block_bytes):
            (values,) = read_regions(
                lease, [LeafRegion(leaf, block)], memory_budget_bytes=block_bytes
            )
            for region, start in zip(regions, starts, strict=False):
                common = block.intersect(region.box)
                if common is not None:
                    inner = common.within(region.box)
                    part = _part(values, common.within(block))
                    write_box(file, region.box.shape, start, inner, part)
        file.finish()
    except BaseException:
        file.abort()
        raise


def _read(
    regions: Sequence[LeafRegion], spool: str, storage: LocalStorage
) -> Iterator[tuple[list[LeafRegion], list[np.ndarray]]]:
    for region, start in zip(regions, _starts(regions), strict=False):
        values = np.empty(region.box.shape, region.leaf.dtype)
        data: Any = values.reshape(-1).view(np.uint8)  # its buffer is untyped in some versions
        storage.read_into(spool, start, [memoryview(data)])
        yield [region], [values]


def _starts(regions: Sequence[LeafRegion]) -> list[int]:
    """First byte of each region in the file, and the file's size."""
    return [0, *itertools.accumulate(region.nbytes for region in regions)]


def _blocks(lease: ReadableArrays, leaf: TargetLeaf, most_bytes: int) -> list[Box]:
    """Boxes that cover a leaf, cut along the axes that cost the fewest bytes."""
    axes = [axis for axis, extent in enumerate(leaf.shape) if extent > 1]
    orders = itertools.islice(itertools.permutations(axes), _MOST_ORDERS)
    found = [list(cut(leaf.shape, leaf.dtype.itemsize, most_bytes, order)) for order in orders]

    def cost(boxes: list[Box]) -> tuple[float, int]:
        read = bytes_to_read(lease, [LeafRegion(leaf, boxes[0])])
        return read / math.prod(boxes[0].shape), len(boxes)

    return min(found, key=cost)


def _part(values: np.ndarray, box: Box) -> np.ndarray:
    """A region of an array, contiguous."""
    bits = values.view(f"u{values.itemsize}")  # numpy knows no fast copy of bfloat16 and its like
    return np.ascontiguousarray(bits[box.slices]).view(values.dtype)
