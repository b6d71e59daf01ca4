"""Builds bound expressions that move indices, and leaves out what changes nothing.

Axes are counted from 0 here and all indices are in range: `ops.py` checks what a user writes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .bound import BoundExpr
from .index_nodes import (
    AxisGroup,
    Concatenated,
    Padded,
    Permuted,
    Repeated,
    Reshaped,
    Run,
    Sliced,
    Stacked,
    Taken,
)
from .window import put


def permuted(operand: BoundExpr, axes: Sequence[int]) -> BoundExpr:
    """Return `numpy.transpose(operand, axes)`."""
    axes = tuple(axes)
    if isinstance(operand, Permuted):
        axes = tuple(operand.axes[axis] for axis in axes)
        operand = operand.operand
    if axes == tuple(range(len(axes))):
        return operand
    shape = tuple(operand.shape[axis] for axis in axes)
    return Permuted(shape, operand.dtype, operand, axes)


def reshaped(operand: BoundExpr, shape: Sequence[int]) -> BoundExpr:
    """Return `numpy.reshape(operand, shape)`, of equal size."""
    shape = tuple(shape)
    if isinstance(operand, Reshaped):
        operand = operand.operand
    if shape == operand.shape:
        return operand
    groups = () if 0 in shape else tuple(reversed(list(_groups(shape, operand.shape))))
    return Reshaped(shape, operand.dtype, operand, groups)


def sliced(operand: BoundExpr, axis: int, start: int, count: int, step: int = 1) -> BoundExpr:
    """Return `count` indices of an axis from `start` on."""
    if (start, step) == (0, 1) and count == operand.shape[axis]:
        return operand
    shape = put(operand.shape, axis, count)
    return Sliced(shape, operand.dtype, operand, axis, start, step)


def taken(operand: BoundExpr, axis: int, indices: Sequence[int]) -> BoundExpr:
    """Return `numpy.take(operand, indices, axis)`."""
    runs = tuple(_runs(indices))
    if len(runs) == 1 and (runs[0].step or len(indices) == 1):
        return sliced(operand, axis, runs[0].first, len(indices), runs[0].step or 1)
    shape = put(operand.shape, axis, len(indices))
    starts = (*(run.start for run in runs), len(indices))
    return Taken(shape, operand.dtype, operand, axis, runs, starts)


def repeated(operand: BoundExpr, axis: int, count: int) -> BoundExpr:
    """Return `numpy.repeat(operand, count, axis)`."""
    if count == 1:
        return operand
    shape = put(operand.shape, axis, operand.shape[axis] * count)
    return Repeated(shape, operand.dtype, operand, axis, count)


def padded(operand: BoundExpr, axis: int, before: int, after: int, value: Any) -> BoundExpr:
    """Add `before` and `after` indices that hold `value`."""
    if not before and not after:
        return operand
    shape = put(operand.shape, axis, before + operand.shape[axis] + after)
    return Padded(shape, operand.dtype, operand, axis, before, value)


def stacked(operands: Sequence[BoundExpr], axis: int) -> BoundExpr:
    """Return `numpy.stack(operands, axis)`, of at least one."""
    inner = operands[0].shape
    shape = (*inner[:axis], len(operands), *inner[axis:])
    return Stacked(shape, operands[0].dtype, tuple(operands), axis)


def concatenated(operands: Sequence[BoundExpr], axis: int) -> BoundExpr:
    """Return `numpy.concatenate(operands, axis)`, of at least one."""
    if len(operands) == 1:
        return operands[0]
    extents = (operand.shape[axis] for operand in operands)
    starts = tuple(itertools.accumulate(extents, initial=0))
    shape = put(operands[0].shape, axis, starts[-1])
    return Concatenated(shape, operands[0].dtype, tuple(operands), axis, starts)


def interleaved(operands: Sequence[BoundExpr], axis: int) -> BoundExpr:
    """Return operands by turns along an axis; the first ones may be longer by one."""
    least = operands[-1].shape[axis]
    turns = stacked([sliced(operand, axis, 0, least) for operand in operands], axis + 1)
    last = [sliced(operand, axis, least, 1) for operand in operands if operand.shape[axis] > least]
    shape = put(operands[0].shape, axis, least * len(operands))
    return concatenated([reshaped(turns, shape), *last], axis)


def row_major(operand: BoundExpr) -> BoundExpr:
    """Return the same row-major elements, in a shape that is cheaper where there is one."""
    return operand.operand if isinstance(operand, Reshaped) else operand


def _groups(shape: tuple[int, ...], inner: tuple[int, ...]) -> Iterator[AxisGroup]:
    """Yields the least groups of axes of equal size, without those that stay as they are."""
    i = j = 0
    while i < len(shape) or j < len(inner):
        first, from_ = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(inner))
        while (outer := math.prod(shape[first:i])) != (below := math.prod(inner[from_:j])):
            i, j = (i + 1, j) if outer < below else (i, j + 1)
        if shape[first:i] != inner[from_:j]:
            yield AxisGroup(first, shape[first:i], inner[from_:j])


def _runs(indices: Sequence[int]) -> Iterator[Run]:
    """Yields indices as runs of equal step, each as long as it can be.

    Two indices far from each other are two runs: each is read with its own neighbours in the file.
    """
    i = 0
    while i < len(indices):
        step = indices[i + 1] - indices[i] if i + 1 < len(indices) else 0
        j = i + 1
        while j < len(indices) and indices[j] - indices[j - 1] == step:
            j += 1
        if j - i == 2 and abs(step) > 1 and len(indices) > 2:
            j, step = i + 1, 0
        yield Run(i, indices[i], step)
        i = j
