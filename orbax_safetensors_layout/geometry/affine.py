"""Affine views: the place of each element of an array in a flat sequence, and its byte runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .box import Box

Ints: TypeAlias = npt.NDArray[np.int64]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the element strides of a C-contiguous array."""
    return tuple(itertools.accumulate(reversed((*shape[1:], 1)), operator.mul))[::-1][: len(shape)]


def _index_of(distance: int, strides: Sequence[int]) -> list[int]:
    """Return how far along each axis of a row-major array so many elements lead, or back."""
    index, rest = [], abs(distance)
    for stride in strides:
        steps, rest = divmod(rest, stride)
        index.append(steps if distance >= 0 else -steps)
    return index


class AffineView(NamedTuple):
    """Index `i` of an array as element `offset + sum(i * stride)` of a flat sequence."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def row_major(cls, shape: Sequence[int]) -> AffineView:
        """Return the view of a whole tensor as safetensors stores it."""
        return cls(0, tuple(shape), row_major_strides(shape))

    def restrict(self, box: Box) -> AffineView:
        shift = sum(map(operator.mul, box.start, self.strides))
        return AffineView(self.offset + shift, box.shape, self.strides)

    def box_in(self, shape: Sequence[int]) -> Box | None:
        """Return the region of a tensor that this is, in its order, unless it is none.

        Dimensions of one index may be missing, or be more than the tensor's; those of stride 0
        repeat the region. Neither is empty.
        """
        axes = zip(self.shape, self.strides, strict=True)
        lengths = [(n, stride) for n, stride in axes if n > 1 and stride]
        start, stop, offset = [], [], self.offset
        for size, stride in zip(shape, row_major_strides(shape), strict=True):
            index, offset = divmod(offset, stride)
            length = lengths.pop(0)[0] if lengths and size > 1 and lengths[0][1] == stride else 1
            if not 0 <= index <= size - length:
                return None
            start.append(index)
            stop.append(index + length)
        return None if lengths or offset else Box(tuple(start), tuple(stop))

    def region_in(self, shape: Sequence[int]) -> Box:
        """Return the region of a tensor that a view, which is not empty, has elements of.

        Axes that one dimension of the view goes through count as one, of which it is whole rows.
        """
        merged = [(n, 1, 1) for n in shape]  # extents, elements of a row, and how many axes
        while True:
            strides = row_major_strides([n for n, _, _ in merged])
            low = _index_of(self.offset, strides)
            high = [*low]
            for n, stride in zip(self.shape, self.strides, strict=True):
                for axis, step in enumerate(_index_of(stride, strides)):
                    low[axis] += min(0, (n - 1) * step)
                    high[axis] += max(0, (n - 1) * step)
            spans = zip(low, high, merged, strict=True)
            beyond = [axis for axis, (a, b, (n, _, _)) in enumerate(spans) if a < 0 or b >= n]
            if not beyond:
                break
            (outer, rows, a), (inner, _, b) = merged[beyond[-1] - 1], merged.pop(beyond[-1])
            merged[beyond[-1] - 1] = (outer * inner, rows * inner, a + b)
        start: list[int] = []
        stop: list[int] = []
        for first, last, (_, row, axes) in zip(low, high, merged, strict=True):
            inner_axes = shape[len(start) + 1 : len(start) + axes]
            start += [first // row, *(0 for _ in inner_axes)]
            stop += [last // row + 1, *inner_axes]
        return Box(tuple(start), tuple(stop))

    def within(self, shape: Sequence[int], region: Box) -> AffineView:
        """Return the same elements of a region of the tensor alone, which has `region_in`."""
        strides, own = row_major_strides(shape), row_major_strides(region.shape)

        def moved(distance: int) -> int:
            return sum(map(operator.mul, _index_of(distance, strides), own))

        offset = moved(self.offset) - sum(map(operator.mul, region.start, own))
        return AffineView(offset, self.shape, tuple(map(moved, self.strides)))

    @property
    def bounds(self) -> tuple[int, int]:
        """First element and one past the last, of a view that is not empty."""
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(r for r in reach if r < 0)
        return self.offset + low, self.offset + sum(reach) - low + 1

    @property
    def is_nested(self) -> bool:
        """Whether it is runs: a step of each dimension leads past all of the finer ones."""
        return _is_nested(self.shape, self.strides)


@functools.lru_cache(4096)
def _is_nested(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    try:
        StridedRuns.of(AffineView(0, shape, strides), 1)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Equal slabs, each one index of an axis, in no regular order in a sequence of elements."""

    axis: int
    places: Ints  # index of each slab along the axis, each once
    offsets: Ints  # element offset of each slab, at least 0; several may have the same

    def within(self, start: int, stop: int) -> Gather:
        """Return the slabs at indices `start` to `stop`, counted from `start`."""
        chosen = (self.places >= start) & (self.places < stop)
        return Gather(self.axis, self.places[chosen] - start, self.offsets[chosen])


def filled_boxes(gathers: Iterable[tuple[Box, Gather]]) -> Iterator[Box]:
    """Yields the boxes that gathers fill, each given with a box that holds all of its slabs."""
    by_slab: dict[tuple[int, Box], list[Ints]] = {}
    for box, gather in gathers:
        by_slab.setdefault((gather.axis, box.along(gather.axis, 0, 1)), []).append(gather.places)
    for (axis, slab), parts in by_slab.items():
        places = np.sort(np.concatenate(parts))
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            yield slab.along(axis, int(run[0]), int(run[-1]) + 1)


@dataclasses.dataclass(frozen=True, slots=True)
class StridedRuns:
    """Equal byte runs at regular distances in file order, without an object per run.

    Run number `(i, j, ...)` begins at `base + i * stride_0 + j * stride_1 + ...`.
    """

    base: int
    run_bytes: int
    # `(count, stride_bytes)` of each level, outermost first; empty for a single run.
    levels: tuple[tuple[int, int], ...]

    @classmethod
    def nested(cls, base: int, run_bytes: int, levels: Iterable[tuple[int, int]]) -> StridedRuns:
        """Return runs at these levels, innermost first; those without a gap become one."""
        joined: list[tuple[int, int]] = []
        for count, stride in levels:
            if not joined and stride == run_bytes:
                run_bytes *= count
            elif joined and stride == joined[-1][0] * joined[-1][1]:
                joined[-1] = (joined[-1][0] * count, joined[-1][1])
            else:
                joined.append((count, stride))
        return cls(base, run_bytes, tuple(reversed(joined)))

    @classmethod
    def of(cls, view: AffineView, itemsize: int, base: int = 0) -> StridedRuns:
        """Return the runs of all elements of a view of a sequence that begins at byte `base`.

        Dimensions of negative strides are reversed, and those that repeat elements (stride 0) have
        each element once. Raises `ValueError` where a run would begin before another one ends.
        """
        if 0 in view.shape:
            return cls(base + view.offset * itemsize, 0, ())
        axes = zip(view.shape, view.strides, strict=True)
        levels = [(n, abs(stride) * itemsize) for n, stride in axes if n > 1 and stride]
        levels.sort(key=operator.itemgetter(1))
        reach = itemsize
        for count, stride in levels:
            if stride < reach:
                raise ValueError(f"the dimensions of {view} interlace")
            reach += (count - 1) * stride
        return cls.nested(base + view.bounds[0] * itemsize, itemsize, levels)

    @property
    def count(self) -> int:
        return math.prod(count for count, _ in self.levels)

    @property
    def total_bytes(self) -> int:
        return self.count * self.run_bytes

    @property
    def stop(self) -> int:
        """One past the last byte of the last run."""
        return self.base + sum((n - 1) * stride for n, stride in self.levels) + self.run_bytes

    def coalesce(self, max_gap_bytes: int) -> StridedRuns:
        """Return the runs without gaps of at most `max_gap_bytes`, innermost level first."""
        run, levels = self.run_bytes, list(self.levels)
        while levels and levels[-1][1] - run <= max_gap_bytes:
            count, stride = levels.pop()
            run += (count - 1) * stride
        return StridedRuns(self.base, run, tuple(levels))

    def offsets(self, start: int = 0, stop: int | None = None) -> Ints:
        """Return the first bytes of runs `start` to `stop`."""
        number = np.arange(start, self.count if stop is None else stop, dtype=np.int64)
        offset = np.full(number.shape, self.base, dtype=np.int64)
        for count, stride in reversed(self.levels):
            number, index = np.divmod(number, count)
            offset += index * stride
        return offset
