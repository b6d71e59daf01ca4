"""Windows: which index of an expression each index of a region of the leaf stands for.

A window is an affine map from a region of the leaf to the indices ("columns") of an expression
somewhere below it. Most operations change columns only; merged axes, concatenations and the like
split a window into several.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.geometry import Box


class Dim(NamedTuple):
    """One factor of an axis of a window's region.

    Attributes:
        axis: The leaf's axis. Factors of one axis follow one another, the outer ones first.
        extent: Number of indices, at least 2.
        steps: How far one index goes along each column.
    """

    axis: int
    extent: int
    steps: tuple[int, ...]


class Window(NamedTuple):
    """A region of the leaf, and the index of an expression that each of its indices stands for.

    Attributes:
        origin: The region's first index, in the leaf.
        start: The expression's index that it stands for.
        dims: The region's extents, as factors of the leaf's axes in their order. An axis without
            a factor has extent 1.
    """

    origin: tuple[int, ...]
    start: tuple[int, ...]
    dims: tuple[Dim, ...]

    @classmethod
    def of(cls, box: Box) -> Window:
        """The window of a box, neither empty, on the leaf itself."""
        rank = len(box.start)
        dims = tuple(
            Dim(axis, n, (0,) * axis + (1,) + (0,) * (rank - axis - 1))
            for axis, n in enumerate(box.shape)
            if n > 1
        )
        return cls(box.start, box.start, dims)

    @property
    def box(self) -> Box:
        """The region of the leaf."""
        stop = [a + 1 for a in self.origin]
        extents: dict[int, int] = {}
        for axis, extent, _ in self.dims:
            extents[axis] = extents.get(axis, 1) * extent
        for axis, extent in extents.items():
            stop[axis] = self.origin[axis] + extent
        return Box(self.origin, tuple(stop))

    @property
    def bounds(self) -> Box:
        """The smallest box of the expression that holds all indices."""
        low, high = list(self.start), list(self.start)
        for _, extent, steps in self.dims:
            for column, step in enumerate(steps):
                if step > 0:
                    high[column] += step * (extent - 1)
                elif step:
                    low[column] += step * (extent - 1)
        return Box(tuple(low), tuple(n + 1 for n in high))

    def flat(self, strides: Sequence[int]) -> tuple[int, list[int]]:
        """The element offset of the first index, and the stride of each factor."""
        offset = sum(map(operator.mul, self.start, strides))
        return offset, [sum(map(operator.mul, dim.steps, strides)) for dim in self.dims]

    def permute(self, order: Sequence[int]) -> Window:
        """The window on the columns `order`."""
        return Window(
            self.origin,
            tuple([self.start[c] for c in order]),
            tuple([Dim(axis, n, tuple([s[c] for c in order])) for axis, n, s in self.dims]),
        )

    def rescale(self, column: int, start: int, step: int) -> Window:
        """With index `start + step * i` in place of `i` in one column."""

        def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:column], value, *values[column + 1 :])

        return Window(
            self.origin,
            put(self.start, start + step * self.start[column]),
            tuple([Dim(axis, n, put(s, step * s[column])) for axis, n, s in self.dims]),
        )

    def drop(self, column: int) -> Window:
        """Without a column."""
        return Window(
            self.origin,
            self.start[:column] + self.start[column + 1 :],
            tuple([Dim(axis, n, s[:column] + s[column + 1 :]) for axis, n, s in self.dims]),
        )

    def merge(self, column: int, extents: Sequence[int]) -> Window:
        """With the columns from `column` on, of these extents, as one row-major column."""
        stop = column + len(extents)
        strides = [math.prod(extents[i + 1 :]) for i in range(len(extents))]

        def put(values: tuple[int, ...]) -> tuple[int, ...]:
            merged = sum(map(operator.mul, values[column:stop], strides))
            return (*values[:column], merged, *values[stop:])

        dims = tuple([Dim(axis, n, put(s)) for axis, n, s in self.dims])
        return Window(self.origin, put(self.start), dims)

    def span(self, number: int, column: int, first: int, extent: int) -> Window:
        """With another factor in place of one that only moves along a column.

        Args:
            number: Number of the factor, the outermost of its axis.
            column: The column.
            first: The column's first index, that of index 0 of the leaf's axis.
            extent: Number of indices, one after the other.
        """
        axis = self.dims[number].axis
        steps = tuple([int(other == column) for other in range(len(self.start))])
        other = (Dim(axis, extent, steps),) if extent > 1 else ()
        return Window(
            (*self.origin[:axis], 0, *self.origin[axis + 1 :]),
            (*self.start[:column], first, *self.start[column + 1 :]),
            (*self.dims[:number], *other, *self.dims[number + 1 :]),
        )

    def narrow(self, number: int, low: int, high: int) -> Window:
        """Indices `low` to `high` of a factor, which has to be the outermost of its axis.

        Only then is what remains still a region of the leaf; see `isolate`.
        """
        axis, extent, steps = self.dims[number]
        if low == 0 and high == extent:
            return self
        origin, start, dims = self.origin, self.start, self.dims
        if low:
            inner = low
            for dim in dims[number + 1 :]:
                if dim.axis == axis:
                    inner *= dim.extent
            origin = (*origin[:axis], origin[axis] + inner, *origin[axis + 1 :])
            start = tuple([a + low * s for a, s in zip(start, steps, strict=True)])
        kept = (Dim(axis, high - low, steps),) if high - low > 1 else ()
        return Window(origin, start, dims[:number] + kept + dims[number + 1 :])

    def factor(self, number: int, inner: int) -> Window:
        """With a factor taken apart into one of extent `inner` and what is around it."""
        axis, extent, steps = self.dims[number]
        parts = []
        if extent > inner:
            parts.append(Dim(axis, extent // inner, tuple([inner * s for s in steps])))
        parts.append(Dim(axis, inner, steps))
        return self._replace(dims=(*self.dims[:number], *parts, *self.dims[number + 1 :]))

    def isolate(self, number: int) -> Iterator[tuple[Window, int]]:
        """Windows in each of which a factor is the outermost of its axis, and its number there."""
        axis = self.dims[number].axis
        outer = [i for i in range(number) if self.dims[i].axis == axis]
        if not outer:
            yield self, number
            return
        for index in itertools.product(*(range(self.dims[i].extent) for i in outer)):
            window = self
            for i in index:  # each narrowing drops the outermost factor, so the next one is first
                window = window.narrow(outer[0], i, i + 1)
            yield window, number - len(outer)


class ColumnPart(NamedTuple):
    """Indices `start` to `stop` of a column that are treated alike.

    Attributes:
        number: What they are known by.
        start: The first index.
        stop: One past the last.
    """

    number: int
    start: int
    stop: int


def split(
    window: Window, column: int, part_of: Callable[[int], ColumnPart]
) -> Iterator[tuple[Window, ColumnPart]]:
    """Windows of which each lies in one part of a column.

    Args:
        window: The window.
        column: The column that has parts.
        part_of: The part that holds an index.
    """
    low, high = window.bounds.start[column], window.bounds.stop[column]
    part = part_of(low)
    if high <= part.stop:
        yield window, part
        return
    number = _widest(window, [abs(dim.steps[column]) for dim in window.dims])
    for alone, at in window.isolate(number):
        yield from _split_along(alone, at, column, part_of)


def _split_along(
    window: Window, number: int, column: int, part_of: Callable[[int], ColumnPart]
) -> Iterator[tuple[Window, ColumnPart]]:
    _, extent, steps = window.dims[number]
    step = steps[column]
    first = window.narrow(number, 0, 1)
    bounds = first.bounds
    low, high = bounds.start[column], bounds.stop[column]  # of one index of the factor
    j = 0
    while j < extent:
        part = part_of(low + j * step)
        room = part.stop - (high + j * step) if step > 0 else low + j * step - part.start
        if high + j * step > part.stop:
            yield from split(window.narrow(number, j, j + 1), column, part_of)
            j += 1
        else:
            end = min(extent, j + room // abs(step) + 1)
            yield window.narrow(number, j, end), part
            j = end


def divide(window: Window, column: int, n: int) -> Iterator[Window]:
    """Windows with two columns, `index // n` and `index % n`, in place of one.

    Where the index crosses a multiple of `n` as a factor goes on, the factor is taken apart: at
    the multiples where it is aligned to them, so that most windows give one to three.
    """
    rest = window.start[column] % n
    remainders = [_remainder_step(window.start[column], d.steps[column], n) for d in window.dims]
    spans = [r * (d.extent - 1) for r, d in zip(remainders, window.dims, strict=True)]
    low, high = sum(s for s in spans if s < 0), sum(s for s in spans if s > 0)
    if rest + low >= 0 and rest + high < n:
        yield _divided(window, column, n, remainders)
        return
    widths = [abs(d.steps[column]) if d.steps[column] % n else 0 for d in window.dims]
    number = _widest(window, widths)
    step = window.dims[number].steps[column]
    period = n // math.gcd(step, n)
    if window.dims[number].extent % period == 0:
        # Aligned: no index is cut off, so that factors around this one stay as they are.
        factored = window.factor(number, period)
        if period < window.dims[number].extent and _affine(factored, column, n):
            yield from divide(factored, column, n)
            return
    for alone, at in window.isolate(number):
        yield from _divide_along(alone, at, column, n)


def _divide_along(window: Window, number: int, column: int, n: int) -> Iterator[Window]:
    extent = window.dims[number].extent
    period = n // math.gcd(window.dims[number].steps[column], n)
    j = 0
    while j < extent:
        tail = window.narrow(number, j, extent)
        if extent - j == 1:
            yield from divide(tail, column, n)
            return
        run = _run(tail, number, column, n)
        if run == period and extent - j >= 2 * period:
            run = (extent - j) // period * period
            yield from divide(tail.narrow(number, 0, run).factor(number, period), column, n)
        else:
            yield from divide(tail.narrow(number, 0, run), column, n)
        j += run


def _run(window: Window, number: int, column: int, n: int) -> int:
    """How many indices of a factor, from its first, stay affine under division by `n`."""
    extent, step = window.dims[number].extent, window.dims[number].steps[column]
    first = window.narrow(number, 0, 1)
    if not _affine(first, column, n):
        return 1
    rest = first.start[column] % n
    steps = [_remainder_step(first.start[column], d.steps[column], n) for d in first.dims]
    spans = [r * (d.extent - 1) for r, d in zip(steps, first.dims, strict=True)]
    low = rest + sum(s for s in spans if s < 0)
    high = rest + sum(s for s in spans if s > 0)
    up = step % n
    down = n - up
    if 2 * up <= n:
        return min(extent, max(n - 1 - high, 0) // up + 1)
    return min(extent, max(low, 0) // down + 1)


def _affine(window: Window, column: int, n: int) -> bool:
    start = window.start[column]
    low = high = start % n
    for dim in window.dims:
        span = _remainder_step(start, dim.steps[column], n) * (dim.extent - 1)
        low, high = low + min(span, 0), high + max(span, 0)
    return low >= 0 and high < n


def _remainder_step(start: int, step: int, n: int) -> int:
    """What the first step adds to the remainder: if any affine map does, this one is right."""
    return (start + step) % n - start % n


def _divided(window: Window, column: int, n: int, remainders: Sequence[int]) -> Window:
    quotient, rest = divmod(window.start[column], n)

    def put(values: tuple[int, ...], one: int, two: int) -> tuple[int, ...]:
        return (*values[:column], one, two, *values[column + 1 :])

    dims = tuple(
        [
            Dim(d.axis, d.extent, put(d.steps, (d.steps[column] - r) // n, r))
            for d, r in zip(window.dims, remainders, strict=True)
        ]
    )
    return Window(window.origin, put(window.start, quotient, rest), dims)


def _widest(window: Window, widths: Sequence[int]) -> int:
    """The factor whose step is the greatest, so that the others make small blocks within it."""
    return max(range(len(window.dims)), key=lambda i: widths[i])
