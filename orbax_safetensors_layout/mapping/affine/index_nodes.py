"""Bound expressions that move indices and leave values alone; `index_builders.py` builds them."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.geometry import StridedRuns

from ..expr.values import ValueOp
from .bound import BoundExpr, Sink, filled
from .leaf_pieces import AffinePiece, Piece, gathered, merged
from .window import Window, divide, put, split

_MANY_RUNS = 16  # fewer are a read each
_LONG_RUN_BYTES = 256 << 10  # longer ones are a read each


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class _Unary(BoundExpr):
    operand: BoundExpr

    def below(self) -> Sequence[BoundExpr]:
        return (self.operand,)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Permuted(_Unary):
    """Axes in another order: `numpy.transpose(operand, axes)`."""

    axes: tuple[int, ...]

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        self.operand.pull(window.permute(inverse_permutation(self.axes)), ops, sink)


class AxisGroup(NamedTuple):
    """Axes that are reshaped together.

    Attributes:
        axis: The first of them.
        extents: Their extents.
        inner: The extents of the operand's axes that they are.
    """

    axis: int
    extents: tuple[int, ...]
    inner: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Reshaped(_Unary):
    """Another shape of the same row-major elements; the last ones of `groups` come first."""

    groups: tuple[AxisGroup, ...]

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        windows: Iterable[Window] = (window,)
        for group in self.groups:
            windows = [part for w in windows for part in _regroup(w, group)]
        for part in windows:
            self.operand.pull(part, ops, sink)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Sliced(_Unary):
    """Every `step`-th index of an axis from `start` on, downwards if the step is negative."""

    axis: int
    start: int
    step: int

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        self.operand.pull(window.rescale(self.axis, self.start, self.step), ops, sink)


class Run(NamedTuple):
    """Indices of an axis, from `start` on, that are equally spaced indices of the operand.

    Attributes:
        start: The first index.
        first: The operand's index for it.
        step: The operand's distance from one index to the next.
    """

    start: int
    first: int
    step: int


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Taken(_Unary):
    """Any indices of an axis.

    Attributes:
        axis: The axis.
        runs: The indices.
        starts: `start` of each run, and the axis's extent.
    """

    axis: int
    runs: tuple[Run, ...]
    starts: tuple[int, ...]

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        if sink.gathers and self._gather(window, ops, sink):
            return
        for part, number in split(window, self.axis, self.starts):
            start, first, step = self.runs[number]
            self.operand.pull(part.rescale(self.axis, first - step * start, step), ops, sink)

    def _gather(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> bool:
        """Adds the pieces of a window as gathers, where that is possible and better than runs."""
        moving = [dim for dim in window.dims if dim.steps[self.axis]]
        if len(moving) != 1:
            return False
        ((axis, extent, steps),) = moving
        number = window.dims.index(moving[0])
        outermost = all(dim.axis != axis for dim in window.dims[:number])
        if not outermost or any(put(steps, self.axis)):
            return False
        inner = math.prod(dim.extent for dim in window.dims[number + 1 :] if dim.axis == axis)
        low, high = window.bounds.start[self.axis], window.bounds.stop[self.axis] - 1
        starts = self.starts
        runs = bisect.bisect_right(starts, high) - bisect.bisect_right(starts, low) + 1
        if runs == 1:
            return False
        indices = self._indices()[window.start[self.axis] + steps[self.axis] * np.arange(extent)]
        row_bytes = math.prod(self.operand.shape[self.axis + 1 :]) * self.dtype.itemsize
        many = runs >= _MANY_RUNS and extent // runs * row_bytes < _LONG_RUN_BYTES
        if not many and np.unique(indices).size == extent:
            return False
        # All of the operand between the first and the last index, as if it were in the leaf.
        first = int(indices.min())
        whole = window.span(number, self.axis, first, int(indices.max()) - first + 1)
        below = Sink([], sink.refined, gathers=False)
        self.operand.pull(whole, ops, below)
        pieces = merged(below.pieces)
        indices = ((indices[:, None] - first) * inner + np.arange(inner)).reshape(-1)
        if len(pieces) > indices.size or not all(map(_is_regular, pieces)):
            return False
        order = np.argsort(indices, kind="stable")
        indices = indices[order]
        for piece in pieces:
            start, stop = np.searchsorted(indices, (piece.box.start[axis], piece.box.stop[axis]))
            if start < stop:
                assert isinstance(piece, AffinePiece)
                places = window.origin[axis] + order[start:stop]
                among = (indices[start:stop] - piece.box.start[axis]) * piece.view.strides[axis]
                sink.pieces.append(gathered(piece, axis, places, piece.view.offset + among))
        return True

    def _indices(self) -> npt.NDArray[np.int64]:
        start, first, step = np.array(self.runs, np.int64).T
        lengths = np.diff(self.starts)
        number = np.arange(self.starts[-1])
        return np.repeat(first - step * start, lengths) + np.repeat(step, lengths) * number


def _is_regular(piece: Piece) -> bool:
    """Return whether it is runs of one tensor, and each of its dimensions is one of its box."""
    if not isinstance(piece, AffinePiece) or piece.view.shape != piece.box.shape:
        return False
    try:
        StridedRuns.of(piece.view, 1)
    except ValueError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Repeated(_Unary):
    """Each index of an axis several times in a row: `numpy.repeat(operand, count, axis)`."""

    axis: int
    count: int

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        for part in divide(window, self.axis, self.count):
            self.operand.pull(part.drop(self.axis + 1), ops, sink)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Padded(_Unary):
    """A value, of `dtype`, before and after the indices of an axis; `before` indices before."""

    axis: int
    before: int
    value: Any

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        stop = self.before + self.operand.shape[self.axis]
        starts = (0, self.before, stop, self.shape[self.axis])
        for part, number in split(window, self.axis, starts):
            if number == 1:
                self.operand.pull(part.rescale(self.axis, -self.before, 1), ops, sink)
            else:
                sink.pieces.append(filled(part, self.value, ops))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class _Joined(BoundExpr):
    operands: tuple[BoundExpr, ...]
    axis: int

    def below(self) -> Sequence[BoundExpr]:
        return self.operands


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Stacked(_Joined):
    """Operands of one shape along a new axis."""

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        for part, number in _unit_parts(window, self.axis):
            self.operands[number].pull(part, ops, sink)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Concatenated(_Joined):
    """Operands one after the other along an axis.

    Attributes:
        starts: The first index of each, and the axis's extent.
    """

    starts: tuple[int, ...]

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        for part, number in split(window, self.axis, self.starts):
            moved = part.rescale(self.axis, -self.starts[number], 1)
            self.operands[number].pull(moved, ops, sink)


def _regroup(window: Window, group: AxisGroup) -> list[Window]:
    axis, extents, inner = group
    merged = window if len(extents) == 1 else window.merge(axis, extents)
    if not inner:
        return [merged.drop(axis)]
    windows = [merged]
    for n in reversed(inner[1:]):
        windows = [part for w in windows for part in divide(w, axis, n)]
    return windows


def _unit_parts(window: Window, column: int) -> Iterator[tuple[Window, int]]:
    """Yields windows without a column, for each of its indices, and the index."""
    active = [i for i, dim in enumerate(window.dims) if dim.steps[column]]
    if not active:
        yield window.drop(column), window.start[column]
        return
    number = active[0]
    axis, extent, steps = window.dims[number]
    if len(active) > 1 or any(dim.axis == axis for dim in window.dims[:number]):
        for part, index in split(window, column, range(window.bounds.stop[column] + 1)):
            yield part.drop(column), index
        return
    inner = math.prod(dim.extent for dim in window.dims[number + 1 :] if dim.axis == axis)
    index, step = window.start[column], steps[column]
    origin, start, dims = window.narrow(number, 0, 1).drop(column)
    other = put(steps, column)
    moves = any(other)
    for j in range(extent):
        place = put(origin, axis, origin[axis] + j * inner)
        moved = tuple([a + j * s for a, s in zip(start, other, strict=True)]) if moves else start
        yield Window(place, moved, dims), index + j * step


def inverse_permutation(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the order that undoes another."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))
