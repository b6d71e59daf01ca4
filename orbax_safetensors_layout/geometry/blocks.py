"""Boxes that an array is cut into, so that each is small and reads or writes no byte twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from .box import Box


def chunk_blocks(
    shape: Sequence[int], chunk: Sequence[int], itemsize: int, most_bytes: int
) -> Iterator[Box]:
    """Boxes of whole chunks that cover an array, each as contiguous as it can be.

    Args:
        shape: The array's shape.
        chunk: Shape of a chunk; the last along an axis may be smaller.
        itemsize: Bytes of an element.
        most_bytes: The largest box; a single chunk may be larger.

    Example:
        >>> [box.shape for box in chunk_blocks((8, 4), (2, 2), 1, 16)]
        [(4, 4), (4, 4)]
    """
    block = list(chunk)
    for axis in reversed(range(len(block))):
        fits = max(1, most_bytes // max(1, math.prod(block) * itemsize))
        needed = -(-shape[axis] // max(1, chunk[axis]))
        block[axis] = chunk[axis] * min(fits, needed)
        if fits < needed:
            break
    steps = [range(0, n, max(1, step)) for n, step in zip(shape, block, strict=True)]
    for start in itertools.product(*steps):
        ends = zip(start, block, shape, strict=True)
        yield Box(start, tuple(min(at + step, n) for at, step, n in ends))


def chunk_parts(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """What a box has of each chunk that it overlaps.

    Args:
        box: The box.
        chunk: Shape of a chunk.

    Example:
        >>> [(part.start, part.stop) for part in chunk_parts(Box((1,), (5,)), (2,))]
        [((1,), (2,)), ((2,), (4,)), ((4,), (5,))]
    """
    edges = []
    for low, high, step in zip(box.start, box.stop, chunk, strict=True):
        first = low - low % max(1, step)
        edges.append([(max(low, n), min(high, n + step)) for n in range(first, high, max(1, step))])
    for part in itertools.product(*edges):
        yield Box(tuple(low for low, _ in part), tuple(high for _, high in part))


def cut(
    shape: Sequence[int], itemsize: int, most_bytes: int, order: Sequence[int]
) -> Iterator[Box]:
    """Boxes that cover an array, cut along the first axes of an order, as far as it takes.

    Args:
        shape: The array's shape.
        itemsize: Bytes of an element.
        most_bytes: The largest box.
        order: The axes.

    Example:
        >>> [box.shape for box in cut((2, 4, 4), 1, 8, (0, 2))]
        [(1, 4, 2), (1, 4, 2), (1, 4, 2), (1, 4, 2)]
    """
    block = list(shape)
    for axis in order:
        parts = -(-math.prod(block) * itemsize // most_bytes)
        block[axis] = max(1, block[axis] // max(1, parts))
    for start in itertools.product(*map(range, [0] * len(shape), shape, block)):
        ends = zip(start, block, shape, strict=True)
        yield Box(start, tuple(min(at + step, n) for at, step, n in ends))


def within(box: Box, start: Sequence[int]) -> Box:
    """A box that is given relative to a place."""
    return Box(
        tuple(a + b for a, b in zip(box.start, start, strict=True)),
        tuple(a + b for a, b in zip(box.stop, start, strict=True)),
    )
