"""Bound expressions made of others, that move indices or compute values, and their builders.

Builders leave out what changes nothing. Axes are counted from 0 and all indices are in range:
`ops.py` checks what a user writes.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from orbax_safetensors_layout.geometry import row_major_strides

from ..expr.values import ValueOp
from .bound import BoundExpr, Sink, Unary, factored_view
from .leaf_pieces import AffinePiece, DecodedPiece, Decoder, Piece, gathered, merged
from .window import Window, divide, put, split

_MANY_RUNS = 16  # fewer are a read each
_LONG_RUN_BYTES = 256 << 10  # longer ones are a read each


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Permuted(Unary):
    """Axes in another order: `numpy.transpose(operand, axes)`."""

    axes: tuple[int, ...]

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        self.operand.pull(window.permute(inverse_permutation(self.axes)), ops, sink)


def permuted(operand: BoundExpr, axes: Sequence[int]) -> BoundExpr:
    """Return `numpy.transpose(operand, axes)`."""
    axes = tuple(axes)
    if isinstance(operand, Permuted):
        axes = tuple(operand.axes[axis] for axis in axes)
        operand = operand.operand
    if axes == tuple(range(len(axes))):
        return operand
    return Permuted(tuple(operand.shape[axis] for axis in axes), operand.dtype, operand, axes)


def inverse_permutation(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the order that undoes another."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


class AxisGroup(NamedTuple):
    """Axes that are reshaped together."""

    axis: int  # the first of them
    extents: tuple[int, ...]
    inner: tuple[int, ...]  # the extents of the operand's axes that they are


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Reshaped(Unary):
    """Another shape of the same row-major elements; the last ones of `groups` come first."""

    groups: tuple[AxisGroup, ...]

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        windows: Iterable[Window] = (window,)
        for group in self.groups:
            windows = [part for w in windows for part in _regroup(w, group)]
        for part in windows:
            self.operand.pull(part, ops, sink)


def reshaped(operand: BoundExpr, shape: Sequence[int]) -> BoundExpr:
    """Return `numpy.reshape(operand, shape)`, of equal size."""
    shape = tuple(shape)
    operand = row_major(operand)
    if shape == operand.shape:
        return operand
    groups = () if 0 in shape else tuple(reversed(list(_groups(shape, operand.shape))))
    return Reshaped(shape, operand.dtype, operand, groups)


def row_major(operand: BoundExpr) -> BoundExpr:
    """Return the same row-major elements, in a shape that is cheaper where there is one."""
    return operand.operand if isinstance(operand, Reshaped) else operand


def _groups(shape: tuple[int, ...], inner: tuple[int, ...]) -> Iterator[AxisGroup]:
    """Yields the smallest groups of axes of equal size, without those that stay as they are."""
    i = j = 0
    while i < len(shape) or j < len(inner):
        first, from_ = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(inner))
        while (outer := math.prod(shape[first:i])) != (inner_size := math.prod(inner[from_:j])):
            i, j = (i + 1, j) if outer < inner_size else (i, j + 1)
        if shape[first:i] != inner[from_:j]:
            yield AxisGroup(first, shape[first:i], inner[from_:j])


def _regroup(window: Window, group: AxisGroup) -> list[Window]:
    axis, extents, inner = group
    merged = window if len(extents) == 1 else window.merge(axis, extents)
    if not inner:
        return [merged.drop(axis)]
    windows = [merged]
    for n in reversed(inner[1:]):
        windows = [part for w in windows for part in divide(w, axis, n)]
    return windows


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Sliced(Unary):
    """Every `step`-th index of an axis from `start` on, downwards if the step is negative."""

    axis: int
    start: int
    step: int

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        self.operand.pull(window.rescale(self.axis, self.start, self.step), ops, sink)


def sliced(operand: BoundExpr, axis: int, start: int, count: int, step: int = 1) -> BoundExpr:
    """Return `count` indices of an axis from `start` on."""
    if (start, step) == (0, 1) and count == operand.shape[axis]:
        return operand
    return Sliced(put(operand.shape, axis, count), operand.dtype, operand, axis, start, step)


class Run(NamedTuple):
    """Indices of an axis, from `start` on, that are equally spaced ones of the operand."""

    start: int
    first: int  # the operand's index for `start`
    step: int


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Taken(Unary):
    """Any indices of an axis; `starts` are those of the runs, and the axis's extent."""

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
        inner = window.inner(number)
        low, high = window.bounds.start[self.axis], window.bounds.stop[self.axis] - 1
        starts = self.starts
        runs = bisect.bisect_right(starts, high) - bisect.bisect_right(starts, low) + 1
        if runs == 1:
            return False
        begins, bases, strides = np.array(self.runs, np.int64).T
        index = window.start[self.axis] + steps[self.axis] * np.arange(extent)
        run = np.searchsorted(begins, index, "right") - 1
        indices = bases[run] + strides[run] * (index - begins[run])
        row_bytes = math.prod(self.operand.shape[self.axis + 1 :]) * self.dtype.itemsize
        many = runs >= _MANY_RUNS and extent // runs * row_bytes < _LONG_RUN_BYTES
        if not many and np.unique(indices).size == extent:
            return False
        # All of the operand between the first and the last index, as if it were in the leaf.
        first = int(indices.min())
        whole = window.span(number, self.axis, first, int(indices.max()) - first + 1)
        inner_sink = Sink([], sink.factored, gathers=False)
        self.operand.pull(whole, ops, inner_sink)
        pieces = merged(inner_sink.pieces)
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


def taken(operand: BoundExpr, axis: int, indices: Sequence[int]) -> BoundExpr:
    """Return `numpy.take(operand, indices, axis)`."""
    runs = tuple(_runs(indices))
    if len(runs) == 1 and (runs[0].step or len(indices) == 1):
        return sliced(operand, axis, runs[0].first, len(indices), runs[0].step or 1)
    shape = put(operand.shape, axis, len(indices))
    starts = (*(run.start for run in runs), len(indices))
    return Taken(shape, operand.dtype, operand, axis, runs, starts)


def _runs(indices: Sequence[int]) -> Iterator[Run]:
    """Yields indices as runs of equal step, each as long as it can be."""
    i = 0
    while i < len(indices):
        step = indices[i + 1] - indices[i] if i + 1 < len(indices) else 0
        j = i + 1
        while j < len(indices) and indices[j] - indices[j - 1] == step:
            j += 1
        # Two far from each other are two runs: each is read with its own neighbours in the file.
        if j - i == 2 and abs(step) > 1 and len(indices) > 2:
            j, step = i + 1, 0
        yield Run(i, indices[i], step)
        i = j


def _is_regular(piece: Piece) -> bool:
    """Return whether it is runs of one tensor, and each of its dimensions is one of its box."""
    if not isinstance(piece, AffinePiece) or piece.view.shape != piece.box.shape:
        return False
    return piece.view.is_nested


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Broadcast(Unary):
    """The same operand for each index of a new axis."""

    axis: int
    is_compared: bool = True  # whether saving refuses other values than those of the first index

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        self.operand.pull(window.drop(self.axis), ops, sink)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class _Joined(BoundExpr):
    operands: tuple[BoundExpr, ...]
    axis: int

    def children(self) -> Sequence[BoundExpr]:
        return self.operands


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Stacked(_Joined):
    """Operands of one shape along a new axis."""

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        for part, number in _unit_parts(window, self.axis):
            self.operands[number].pull(part, ops, sink)


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
    inner = window.inner(number)
    index, step = window.start[column], steps[column]
    origin, start, dims = window.narrow(number, 0, 1).drop(column)
    other = put(steps, column)
    moves = any(other)
    for j in range(extent):
        place = put(origin, axis, origin[axis] + j * inner)
        moved = tuple([a + j * s for a, s in zip(start, other, strict=True)]) if moves else start
        yield Window(place, moved, dims), index + j * step


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Concatenated(_Joined):
    """Operands one after the other; `starts` are their first indices, and the axis's extent."""

    starts: tuple[int, ...]

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        for part, number in split(window, self.axis, self.starts):
            self.operands[number].pull(part.rescale(self.axis, -self.starts[number], 1), ops, sink)


def concatenated(operands: Sequence[BoundExpr], axis: int) -> BoundExpr:
    """Return `numpy.concatenate(operands, axis)`, of at least one."""
    if len(operands) == 1:
        return operands[0]
    starts = tuple(itertools.accumulate((operand.shape[axis] for operand in operands), initial=0))
    shape = put(operands[0].shape, axis, starts[-1])
    return Concatenated(shape, operands[0].dtype, tuple(operands), axis, starts)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Decoded(BoundExpr):
    """A function of expressions that is not elementwise."""

    operands: tuple[BoundExpr, ...]
    decoder: Decoder

    def children(self) -> Sequence[BoundExpr]:
        return self.operands

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        operands = self.operands
        for axis in range(self.decoder.free):
            window, operands = _without_gaps(window, operands, axis)
        decoded = self.decoder.widen(window.bounds)
        start = tuple(map(operator.sub, window.start, decoded.start))
        view, _ = factored_view(window._replace(start=start), row_major_strides(decoded.shape))
        inputs = tuple(zip(operands, self.decoder.needs(decoded), strict=True))
        sink.pieces.append(DecodedPiece(window.box, inputs, self.decoder, decoded, view, ops))


def bytes_by_rows(nodes: Iterable[BoundExpr]) -> int:
    """Return the bytes that are decoded, if a few rows need few of them; 0 if not."""
    decoded = [node for node in nodes if isinstance(node, Decoded)]
    if not all(getattr(node.decoder, "by_rows", False) for node in decoded):
        return 0
    operands = [operand for node in decoded for operand in node.operands]
    return sum(math.prod(operand.shape) * operand.dtype.itemsize for operand in operands)


class Scanning(Protocol):
    """A `Decoder` of one input that needs all of it for each box, unless it has seen it before."""

    @property
    def unseen(self) -> bool:
        """Whether there is something to scan."""

    def scan(self, first: int, values: np.ndarray) -> None:
        """Sees rows of the input, from number `first` on."""

    def complete(self) -> None:
        """Says that all were scanned."""


def unseen_inputs(nodes: Iterable[BoundExpr]) -> Iterator[tuple[BoundExpr, Scanning]]:
    """Yields what has to be scanned before `bytes_by_rows` holds, and by which decoder."""
    for node in nodes:
        if isinstance(node, Decoded) and getattr(node.decoder, "unseen", False):
            yield node.operands[0], cast(Scanning, node.decoder)


def _without_gaps(
    window: Window, operands: tuple[BoundExpr, ...], axis: int
) -> tuple[Window, tuple[BoundExpr, ...]]:
    """Leave only the indices of operands that a window takes along an axis."""
    step = math.gcd(*(dim.steps[axis] for dim in window.dims))
    if step < 2:
        return window, operands
    low, high = window.bounds.start[axis], window.bounds.stop[axis]
    count = (high - 1 - low) // step + 1
    kept = tuple(sliced(operand, axis, low, count, step) for operand in operands)
    dims = [d._replace(steps=put(d.steps, axis, d.steps[axis] // step)) for d in window.dims]
    start = put(window.start, axis, (window.start[axis] - low) // step)
    return Window(window.origin, start, tuple(dims)), kept
