"""Boxes that an array is cut into, so that each is small and reads or writes no byte twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from .box import Box, Tile


def cut(
    shape: Sequence[int],
    itemsize: int,
    most_bytes: int,
    order: Sequence[int] | None = None,
    *,
    chunk: Sequence[int] | None = None,
) -> Iterator[Box]:
    """Yields boxes of whole chunks that cover an array, cut along few axes.

    Args:
        shape: The array's shape.
        itemsize: Bytes of an element.
        most_bytes: The largest box; a single chunk may be larger.
        order: The axes that may be cut, first those that are cut first; by default all, the
            outermost first, so that each box is as contiguous as it can be.
        chunk: Shape of a chunk, by default of one element; the last along an axis may be smaller.
    """
    chunk = chunk or [1] * len(shape)
    order = range(len(shape)) if order is None else order
    block = [chunk[axis] if axis in order else n for axis, n in enumerate(shape)]
    for axis in reversed(order):
        fits = max(1, most_bytes // max(1, math.prod(block) * itemsize))
        needed = -(-shape[axis] // max(1, chunk[axis]))
        block[axis] = chunk[axis] * min(fits, needed)
        if fits < needed:
            break
    steps = [range(0, n, max(1, step)) for n, step in zip(shape, block, strict=True)]
    for start in itertools.product(*steps):
        ends = zip(start, block, shape, strict=True)
        yield Box(start, tuple(min(at + step, n) for at, step, n in ends))


def row_blocks(shape: tuple[int, ...], bits: int, most_bytes: int, group: int = 1) -> Iterator[Box]:
    """Yields boxes of up to `most_bytes` that are contiguous in a row-major array, in its order.

    A single row may be larger. The number of elements, of `bits` each, before a box is a multiple
    of `group`.
    """
    if 0 not in shape:
        slabs = Tile.alone(Box.whole(shape)).slabs(max(1, most_bytes * 8 // bits), group)
        yield from (slab.box for slab in slabs)


def chunk_parts(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Yields the part of a box that lies in each chunk of this shape."""
    edges = []
    for low, high, step in zip(box.start, box.stop, chunk, strict=True):
        first = low - low % max(1, step)
        edges.append([(max(low, n), min(high, n + step)) for n in range(first, high, max(1, step))])
    for part in itertools.product(*edges):
        yield Box(tuple(low for low, _ in part), tuple(high for _, high in part))
