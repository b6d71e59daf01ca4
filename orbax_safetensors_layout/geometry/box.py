"""Boxes: half-open index regions, larger ones that equal ones tile, and parts of arrays."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_RANK = 64
"""The most dimensions of numpy's arrays."""


def replaced(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    """Return a shape, or the like, with another value at one dimension."""
    return (*values[:axis], value, *values[axis + 1 :])


class Box(NamedTuple):
    """A half-open region `start[d] <= index[d] < stop[d]` of an array."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(map(operator.sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def joined(self, other: Box) -> Box:
        """Return the smallest box that contains both."""
        start = tuple(map(min, self.start, other.start))
        return Box(start, tuple(map(max, self.stop, other.stop)))

    def along(self, axis: int, start: int, stop: int) -> Box:
        """Return the region with other bounds along one dimension."""
        return Box(replaced(self.start, axis, start), replaced(self.stop, axis, stop))

    def within(self, outer: Box) -> Box:
        """Return the region relative to one that contains it."""
        return self.shifted([-n for n in outer.start])

    def shifted(self, offset: Sequence[int]) -> Box:
        start = tuple(map(operator.add, self.start, offset))
        return Box(start, tuple(map(operator.add, self.stop, offset)))

    def view_of(self, values: np.ndarray, outer: Box) -> np.ndarray:
        """Return a view of this box of the values that `outer` has."""
        place: tuple[Any, ...] = (*self.within(outer).slices, ...)  # a view of 0-d values, too
        part: np.ndarray = values[place]
        return part

    def contains(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def without(self, other: Box) -> Iterator[Box]:
        """Yields boxes that cover what another leaves of this one, each index once."""
        common, left = self.intersect(other), self
        if common is None:
            yield self
            return
        for axis, (low, high) in enumerate(zip(*common, strict=True)):
            for start, stop in ((left.start[axis], low), (high, left.stop[axis])):
                if start < stop:
                    yield left.along(axis, start, stop)
            left = left.along(axis, low, high)


class Tile(NamedTuple):
    """A box that equal smaller boxes tile as a grid."""

    box: Box
    grid: tuple[int, ...]  # number of members along each dimension
    members: tuple[int, ...]  # number of each in the list that was tiled, in C order of the grid

    @classmethod
    def alone(cls, box: Box, member: int = 0) -> Tile:
        return cls(box, (1,) * len(box.start), (member,))

    @property
    def member_shape(self) -> tuple[int, ...]:
        return tuple(n // g for n, g in zip(self.box.shape, self.grid, strict=True))

    def slabs(self, most: int, group: int = 1, axes: Sequence[int] | None = None) -> Iterator[Tile]:
        """Yields regions that are contiguous in a row-major array of the tile, in its order.

        Each has up to `most` elements, a multiple of `group` before it, and regions of one shape of
        its members. `axes` is the order of the array's axes, as of `numpy.transpose`.
        """
        if axes is not None:
            back = sorted(range(len(axes)), key=axes.__getitem__)
            for slab in self._permuted(axes).slabs(most, group):
                yield slab._permuted(back)
            return
        shape, member = self.box.shape, self.member_shape
        axis = 0
        while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) > most:
            axis += 1
        row = math.prod(shape[axis + 1 :])
        if self.box.size <= most or not shape or member[axis] * row % group:
            yield self
            return
        step = group // math.gcd(row, group)
        rows = max(1, most // row // step) * step
        numbers = np.array(self.members).reshape(self.grid)
        for outer in itertools.product(*map(range, shape[:axis])):
            outer_cell = tuple(i // n for i, n in zip(outer, member, strict=False))
            for cell in range(self.grid[axis]):
                for low in range(0, member[axis], rows):
                    first = cell * member[axis] + low
                    last = first + min(rows, member[axis] - low)
                    start = (*outer, first, *[0] * len(shape[axis + 1 :]))
                    stop = (*(i + 1 for i in outer), last, *shape[axis + 1 :])
                    yield Tile(
                        Box(self._offset(start), self._offset(stop)),
                        (*[1] * (axis + 1), *self.grid[axis + 1 :]),
                        tuple(numbers[(*outer_cell, cell)].ravel().tolist()),
                    )

    def _permuted(self, axes: Sequence[int]) -> Tile:
        start, stop = self.box.start, self.box.stop
        box = Box(tuple(start[axis] for axis in axes), tuple(stop[axis] for axis in axes))
        members = np.array(self.members).reshape(self.grid).transpose(axes)
        return Tile(box, members.shape, tuple(members.ravel().tolist()))

    def member_boxes(self) -> Iterator[Box]:
        """Return the region of each member within the tile."""
        shape = self.member_shape
        for cell in itertools.product(*map(range, self.grid)):
            start = self._offset(tuple(map(operator.mul, cell, shape)))
            yield Box(start, tuple(map(operator.add, start, shape)))

    def _offset(self, index: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(operator.add, self.box.start, index))


def tile(boxes: Sequence[Box], numbers: Iterable[int] | None = None) -> list[Tile]:
    """Merges neighbours of equal shape that do not overlap into as few large boxes as possible.

    It is greedy, innermost dimension first, for long contiguous runs in a row-major file. Without
    `numbers` it takes all boxes.
    """
    rank = len(boxes[0].start) if boxes else 0
    # A partial merge is (start, grid); the member shape is the group's.
    tiles: list[Tile] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(boxes)) if numbers is None else numbers:
        groups.setdefault(boxes[i].shape, []).append(i)
    for shape, group in groups.items():
        number_at = {boxes[i].start: i for i in group}
        merged = [(boxes[i].start, (1,) * rank) for i in group]
        if len(number_at) == len(group) and all(shape) and not _overlap(shape, list(number_at)):
            for axis in reversed(range(rank)):
                merged = _merge_along(axis, shape, merged)
        for start, grid in merged:
            stop = tuple(a + n * g for a, n, g in zip(start, shape, grid, strict=True))
            members = tuple(
                number_at[tuple(a + n * i for a, n, i in zip(start, shape, cell, strict=True))]
                for cell in itertools.product(*map(range, grid))
            )
            tiles.append(Tile(Box(start, stop), grid, members))
    return sorted(tiles, key=lambda t: t.box)


def cover(boxes: Sequence[Box], whole: Box, most_corners: int | None = None) -> bool:
    """Return whether `boxes` cover `whole` exactly, each index once; empty ones do not count.

    The number of boxes that hold an index, as a function of the index, is determined by its mixed
    difference, which each box changes at its corners alone: by +1 or -1, as the corner has an even
    or odd number of stops. So boxes tile `whole` if and only if these sums are its own.
    False where there are more than `most_corners`, a bound on the work.
    """
    if not whole.size:
        return all(whole.contains(box) for box in boxes)
    boxes = [*(box for box in boxes if box.size), whole]
    starts, stops = (np.array([getattr(box, f) for box in boxes], np.int64) for f in Box._fields)
    split = (starts != starts[-1]).any(0) | (stops != stops[-1]).any(0)
    starts, stops = starts[:, split], stops[:, split]
    count, rank = len(boxes), len(starts[0])
    if rank == 0:
        return count == 2
    if most_corners is not None and count << rank > most_corners:
        return False
    is_stop = np.array(list(np.ndindex(*[2] * rank)), bool)
    corners = np.where(is_stop[:, None], stops, starts).reshape(-1, rank)
    signs = np.repeat(1 - 2 * (is_stop.sum(1) % 2), count).reshape(-1, count)
    signs[:, -1] *= -1
    order = np.lexsort(corners.T)
    corners = corners[order]
    is_new = np.ones(len(corners), bool)
    is_new[1:] = (corners[1:] != corners[:-1]).any(1)
    sums = np.add.reduceat(signs.reshape(-1)[order], np.flatnonzero(is_new))
    return not sums.any()


def _overlap(shape: tuple[int, ...], starts: list[tuple[int, ...]]) -> bool:
    """Return whether equal boxes at distinct `starts` overlap; those of a grid never do."""
    on_grid = all(
        (a - b) % n == 0
        for start in starts
        for a, b, n in zip(start, starts[0], shape, strict=True)
    )
    return not on_grid and any(
        all(abs(a - b) < n for a, b, n in zip(*pair, shape, strict=True))
        for pair in itertools.combinations(starts, 2)
    )


def _merge_along(
    axis: int, shape: tuple[int, ...], items: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Joins (start, grid) items that follow one another along `axis` and are equal otherwise."""
    merged: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start, grid in sorted(items, key=lambda i: (replaced(i[0], axis, 0), i[1], i[0][axis])):
        if merged:
            before, count = merged[-1]
            end = before[axis] + count[axis] * shape[axis]
            longer = replaced(count, axis, count[axis] + grid[axis])
            if start == replaced(before, axis, end) and count == replaced(grid, axis, count[axis]):
                merged[-1] = before, longer
                continue
        merged.append((start, grid))
    return merged


def cut(
    shape: Sequence[int],
    itemsize: int,
    most_bytes: int,
    order: Sequence[int] | None = None,
    *,
    chunk: Sequence[int] | None = None,
) -> Iterator[Box]:
    """Yields boxes of whole chunks that cover an array, cut along few axes.

    A box has up to `most_bytes`, or a single chunk (by default an element). `order` are the axes
    that may be cut, first those that are cut first; by default all, the outermost first, so that
    each box is as contiguous as it can be.
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
    yield from chunk_parts(Box.whole(shape), block)


def chunk_parts(box: Box, chunk: Sequence[int]) -> Iterator[Box]:
    """Yields the part of a box that lies in each chunk of this shape."""
    edges = []
    for low, high, step in zip(box.start, box.stop, chunk, strict=True):
        first = low - low % max(1, step)
        edges.append([(max(low, n), min(high, n + step)) for n in range(first, high, max(1, step))])
    for part in itertools.product(*edges):
        yield Box(tuple(low for low, _ in part), tuple(high for _, high in part))


def row_blocks(
    shape: tuple[int, ...], bits: int, most_bytes: int, group: int = 1, *, whole: bool = False
) -> Iterator[Box]:
    """Yields boxes of up to `most_bytes`, or a row, that are contiguous in a row-major array.

    The number of elements, of `bits` each, before a box is a multiple of `group`. They are `whole`
    along all axes but the first, or may be parts of what is large.
    """
    if 0 not in shape:
        least = math.prod(shape[1:]) if whole else 1
        slabs = Tile.alone(Box.whole(shape)).slabs(max(least, most_bytes * 8 // bits), group)
        yield from (slab.box for slab in slabs)
