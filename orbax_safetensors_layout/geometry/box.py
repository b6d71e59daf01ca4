"""Boxes: n-dimensional half-open index regions, and the larger boxes that equal shards tile."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """A half-open region `start[d] <= index[d] < stop[d]` of an array."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the region of a whole array."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as a numpy index."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def along(self, axis: int, start: int, stop: int) -> Box:
        """Return the region with other bounds along one dimension."""
        return Box(
            (*self.start[:axis], start, *self.start[axis + 1 :]),
            (*self.stop[:axis], stop, *self.stop[axis + 1 :]),
        )

    def within(self, outer: Box) -> Box:
        """Return the region relative to one that contains it."""
        start = tuple(map(operator.sub, self.start, outer.start))
        return Box(start, tuple(map(operator.sub, self.stop, outer.start)))

    def shifted(self, offset: Sequence[int]) -> Box:
        """Return the region moved along each dimension."""
        start = tuple(map(operator.add, self.start, offset))
        return Box(start, tuple(map(operator.add, self.stop, offset)))

    def contains(self, other: Box) -> bool:
        """Return whether every index of `other` lies in this region."""
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )


class Tile(NamedTuple):
    """A box that equal smaller boxes tile as a grid.

    Attributes:
        box: The tiled region.
        grid: Number of member boxes along each dimension.
        members: Index of each member in the list that was tiled, in C order of the grid.
    """

    box: Box
    grid: tuple[int, ...]
    members: tuple[int, ...]

    @classmethod
    def alone(cls, box: Box, member: int = 0) -> Tile:
        """Return the tile of one box."""
        return cls(box, (1,) * len(box.start), (member,))

    @property
    def member_shape(self) -> tuple[int, ...]:
        """Shape of one member box."""
        return tuple(n // g for n, g in zip(self.box.shape, self.grid, strict=True))

    def slabs(self, most: int, group: int = 1, axes: Sequence[int] | None = None) -> Iterator[Tile]:
        """Yields regions that are contiguous in a row-major array of the tile, in its order.

        Each consists of regions of the same shape of its members, which may be larger.

        Args:
            most: Most elements of a slab, as far as `group` allows.
            group: The number of elements before each is a multiple of this.
            axes: The order of the array's axes, as `numpy.transpose`.
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
            cells = tuple(i // n for i, n in zip(outer, member, strict=False))
            for cell in range(self.grid[axis]):
                for low in range(0, member[axis], rows):
                    first = cell * member[axis] + low
                    last = first + min(rows, member[axis] - low)
                    start = (*outer, first, *[0] * len(shape[axis + 1 :]))
                    stop = (*(i + 1 for i in outer), last, *shape[axis + 1 :])
                    yield Tile(
                        Box(self._offset(start), self._offset(stop)),
                        (*[1] * (axis + 1), *self.grid[axis + 1 :]),
                        tuple(numbers[(*cells, cell)].ravel().tolist()),
                    )

    def _permuted(self, axes: Sequence[int]) -> Tile:
        start, stop = self.box.start, self.box.stop
        box = Box(tuple(start[axis] for axis in axes), tuple(stop[axis] for axis in axes))
        members = np.array(self.members).reshape(self.grid).transpose(axes)
        return Tile(box, members.shape, tuple(members.ravel().tolist()))

    def cells(self) -> Iterator[Box]:
        """Return the region of each member within the tile."""
        shape = self.member_shape
        for cell in itertools.product(*map(range, self.grid)):
            start = self._offset(tuple(map(operator.mul, cell, shape)))
            yield Box(start, tuple(map(operator.add, start, shape)))

    def _offset(self, index: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(operator.add, self.box.start, index))


def tile(boxes: Sequence[Box]) -> list[Tile]:
    """Merges neighbours of equal shape into as few large boxes as possible.

    Boxes are merged greedily, innermost dimension first, so that the result is as contiguous in a
    row-major file as it can be. Boxes of other shapes, and boxes that overlap, are not merged.
    """
    rank = len(boxes[0].start) if boxes else 0
    # A partial merge is (start, grid); the member shape is the group's.
    tiles: list[Tile] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, box in enumerate(boxes):
        groups.setdefault(box.shape, []).append(i)
    for shape, group in groups.items():
        numbers = {boxes[i].start: i for i in group}
        merged = [(boxes[i].start, (1,) * rank) for i in group]
        if len(numbers) == len(group) and all(shape) and not _overlap(shape, list(numbers)):
            for axis in reversed(range(rank)):
                merged = _merge_along(axis, shape, merged)
        for start, grid in merged:
            stop = tuple(a + n * g for a, n, g in zip(start, shape, grid, strict=True))
            members = tuple(
                numbers[tuple(a + n * i for a, n, i in zip(start, shape, cell, strict=True))]
                for cell in itertools.product(*map(range, grid))
            )
            tiles.append(Tile(Box(start, stop), grid, members))
    return sorted(tiles, key=lambda t: t.box)


def cover(boxes: Sequence[Box], whole: Box, most_corners: int | None = None) -> bool:
    """Return whether `boxes` cover `whole` exactly, each index once.

    The number of boxes that hold an index, as a function of the index, is determined by its mixed
    difference, which each box changes at its corners alone: by +1 or -1, as the corner has an even
    or odd number of stops. So boxes tile `whole` if and only if these sums are its own.

    Args:
        boxes: The boxes; empty ones do not count.
        whole: The box to cover.
        most_corners: Bound on the work: False where there are more corners.
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

    def across(item: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[object, ...]:
        start, grid = item
        return (start[:axis] + start[axis + 1 :], grid[:axis] + grid[axis + 1 :])

    merged: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for item in sorted(items, key=lambda i: (across(i), i[0][axis])):
        start, grid = item
        if merged and across(merged[-1]) == across(item):
            before, extent = merged[-1]
            if before[axis] + extent[axis] * shape[axis] == start[axis]:
                longer = extent[axis] + grid[axis]
                merged[-1] = (before, (*extent[:axis], longer, *extent[axis + 1 :]))
                continue
        merged.append(item)
    return merged
