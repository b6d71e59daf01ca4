"""Windows: affine maps from a region of a leaf to the indices of an expression below it.

The expression's axes are the "columns". Most operations change columns only; merged axes,
concatenations and the like split a window into several.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from orbax_safetensors_layout.geometry import Box, row_major_strides

T = TypeVar("T")


class Dim(NamedTuple):
    """One factor of an axis of a window's region; those of one axis go from the outer inwards."""

    axis: int  # the leaf's
    extent: int  # number of indices, at least 2
    steps: tuple[int, ...]  # how far one index goes along each column


def put(values: tuple[T, ...], at: int, *others: T) -> tuple[T, ...]:
    """Return a tuple with others in place of one item."""
    return (*values[:at], *others, *values[at + 1 :])


class Window(NamedTuple):
    """A region of the leaf, and the index of an expression for each of its indices."""

    origin: tuple[int, ...]  # the region's first index, in the leaf
    start: tuple[int, ...]  # the expression's index for it
    dims: tuple[Dim, ...]  # in the order of the leaf's axes; one without a factor has extent 1

    @classmethod
    def of(cls, box: Box) -> Window:
        """Return the window of a box, which is not empty, on the leaf itself."""
        still = (0,) * len(box.start)
        dims = [Dim(axis, n, put(still, axis, 1)) for axis, n in enumerate(box.shape) if n > 1]
        return cls(box.start, box.start, tuple(dims))

    @property
    def box(self) -> Box:
        shape = [1] * len(self.origin)
        for axis, extent, _ in self.dims:
            shape[axis] *= extent
        return Box(self.origin, tuple(map(operator.add, self.origin, shape)))

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

    def permute(self, order: Sequence[int]) -> Window:
        """Return the window on the columns `order`."""
        return self._with_columns(lambda values: tuple([values[c] for c in order]))

    def rescale(self, column: int, start: int, step: int) -> Window:
        """Replace index `i` of one column by `start + step * i`."""
        return Window(
            self.origin,
            put(self.start, column, start + step * self.start[column]),
            tuple([Dim(axis, n, put(s, column, step * s[column])) for axis, n, s in self.dims]),
        )

    def drop(self, column: int) -> Window:
        return self._with_columns(lambda values: put(values, column))

    def merge(self, column: int, extents: Sequence[int]) -> Window:
        """Merge the columns from `column` on, of these extents, into one row-major column."""
        stop = column + len(extents)
        strides = row_major_strides(extents)

        def merged(values: tuple[int, ...]) -> tuple[int, ...]:
            index = sum(map(operator.mul, values[column:stop], strides))
            return (*values[:column], index, *values[stop:])

        return self._with_columns(merged)

    def _with_columns(self, moved: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Window:
        dims = tuple([Dim(axis, n, moved(steps)) for axis, n, steps in self.dims])
        return Window(self.origin, moved(self.start), dims)

    def span(self, number: int, column: int, first: int, extent: int) -> Window:
        """Replace a factor, the outermost of its axis, by indices of a column from `first` on."""
        axis = self.dims[number].axis
        other = (Dim(axis, extent, put((0,) * len(self.start), column, 1)),) if extent > 1 else ()
        dims = put(self.dims, number, *other)
        return Window(put(self.origin, axis, 0), put(self.start, column, first), dims)

    def inner(self, number: int) -> int:
        """Return how many of the leaf's indices one of a factor spans."""
        factors = self.dims[number:]
        return math.prod(dim.extent for dim in factors[1:] if dim.axis == factors[0].axis)

    def narrow(self, number: int, low: int, high: int) -> Window:
        """Restrict a factor, which must be the outermost of its axis; see `isolate`."""
        axis, extent, steps = self.dims[number]
        if low == 0 and high == extent:
            return self
        origin, start = self.origin, self.start
        if low:
            origin = put(origin, axis, origin[axis] + low * self.inner(number))
            start = tuple([a + low * s for a, s in zip(start, steps, strict=True)])
        kept = (Dim(axis, high - low, steps),) if high - low > 1 else ()
        return Window(origin, start, put(self.dims, number, *kept))

    def factor(self, number: int, inner: int) -> Window:
        """Take a factor apart into one of extent `inner` and one around it."""
        axis, extent, steps = self.dims[number]
        parts = [Dim(axis, inner, steps)]
        if extent > inner:
            parts.insert(0, Dim(axis, extent // inner, tuple([inner * s for s in steps])))
        return self._replace(dims=put(self.dims, number, *parts))

    def isolate(self, number: int) -> Iterator[tuple[Window, int]]:
        """Yields windows in each of which a factor is the outermost of its axis; its number."""
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


def split(window: Window, column: int, starts: Sequence[int]) -> Iterator[tuple[Window, int]]:
    """Yields windows of which each lies in one range of a column, and the number of the range.

    `starts` are the first index of each range, ascending, and the column's extent.
    """
    low, high = window.bounds.start[column], window.bounds.stop[column]
    part = bisect.bisect_right(starts, low) - 1
    if high <= starts[part + 1]:
        yield window, part
        return
    number = _widest(window, [abs(dim.steps[column]) for dim in window.dims])
    for alone, at in window.isolate(number):
        yield from _split_along(alone, at, column, starts)


def _split_along(
    window: Window, number: int, column: int, starts: Sequence[int]
) -> Iterator[tuple[Window, int]]:
    _, extent, steps = window.dims[number]
    step = steps[column]
    bounds = window.narrow(number, 0, 1).bounds
    low, high = bounds.start[column], bounds.stop[column]  # of index `j` of the factor
    j = 0
    while j < extent:
        part = bisect.bisect_right(starts, low) - 1
        count = 1
        if high > starts[part + 1]:
            yield from split(window.narrow(number, j, j + 1), column, starts)
        else:
            distance = starts[part + 1] - high if step > 0 else low - starts[part]
            count = min(extent - j, distance // abs(step) + 1)
            yield window.narrow(number, j, j + count), part
        j += count
        low, high = low + count * step, high + count * step


def divide(window: Window, column: int, n: int) -> Iterator[Window]:
    """Yields windows with two columns, `index // n` and `index % n`, in place of one.

    Where the index crosses a multiple of `n` as a factor goes on, the factor is taken apart: at
    the multiples where it is aligned to them, so that most windows give one to three.
    """
    low, high, steps = _remainders(window, column, n)
    if low >= 0 and high < n:
        quotient, rest = divmod(window.start[column], n)
        dims = [
            Dim(axis, extent, put(s, column, (s[column] - step) // n, step))
            for (axis, extent, s), step in zip(window.dims, steps, strict=True)
        ]
        yield Window(window.origin, put(window.start, column, quotient, rest), tuple(dims))
        return
    widths = [abs(d.steps[column]) if d.steps[column] % n else 0 for d in window.dims]
    number = _widest(window, widths)
    step = window.dims[number].steps[column]
    period = n // math.gcd(step, n)
    if window.dims[number].extent % period == 0:
        # Aligned: no index is cut off, so that factors around this one stay as they are.
        factored = window.factor(number, period)
        low, high, _ = _remainders(factored, column, n)
        if period < window.dims[number].extent and low >= 0 and high < n:
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
    """Return how many indices of a factor, from its first, stay affine under division by `n`."""
    extent, step = window.dims[number].extent, window.dims[number].steps[column]
    low, high, _ = _remainders(window.narrow(number, 0, 1), column, n)
    if low < 0 or high >= n:
        return 1
    up = step % n
    if 2 * up <= n:
        return min(extent, (n - 1 - high) // up + 1)
    return min(extent, low // (n - up) + 1)


def _remainders(window: Window, column: int, n: int) -> tuple[int, int, list[int]]:
    """Return the bounds of a column's remainders by `n`, and what a step of each factor adds."""
    # What the first step adds: if any affine map gives the remainders, this one does.
    low = high = rest = window.start[column] % n
    steps = []
    for _, extent, along in window.dims:
        step = (window.start[column] + along[column]) % n - rest
        low, high = low + min(0, step * (extent - 1)), high + max(0, step * (extent - 1))
        steps.append(step)
    return low, high, steps


def _widest(window: Window, widths: Sequence[int]) -> int:
    """Return the factor of the greatest step, so that the others make small blocks within it."""
    return max(range(len(window.dims)), key=lambda i: widths[i])
