"""Builds bound expressions that move indices, and leaves out what changes nothing.

Axes are counted from 0 here and all indices are in range: `ops.py` and `joins.py` check what a user
writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .bound import BoundExpr
from .index_nodes import (
    AxisGroup,
    Concatenated,
    Interleaved,
    Padded,
    Permuted,
    Repeated,
    Reshaped,
    Run,
    Sliced,
    Stacked,
    Taken,
)


def permuted(operand: BoundExpr, axes: Sequence[int]) -> BoundExpr:
    """`numpy.transpose(operand, axes)`."""
    axes = tuple(axes)
    if isinstance(operand, Permuted):
        axes = tuple(operand.axes[axis] for axis in axes)
        operand = operand.operand
    if axes == tuple(range(len(axes))):
        return operand
    shape = tuple(operand.shape[axis] for axis in axes)
    return Permuted(shape, operand.dtype, operand, axes)


def reshaped(operand: BoundExpr, shape: Sequence[int]) -> BoundExpr:
    """`numpy.reshape(operand, shape)`, of equal size."""
    shape = tuple(shape)
    if isinstance(operand, Reshaped):
        operand = operand.operand
    if shape == operand.shape:
        return operand
    groups = () if 0 in shape else tuple(reversed(list(_groups(shape, operand.shape))))
    return Reshaped(shape, operand.dtype, operand, groups)


def sliced(operand: BoundExpr, axis: int, start: int, count: int, step: int = 1) -> BoundExpr:
    """`count` indices of an axis from `start` on."""
    if (start, step) == (0, 1) and count == operand.shape[axis]:
        return operand
    shape = (*operand.shape[:axis], count, *operand.shape[axis + 1 :])
    return Sliced(shape, operand.dtype, operand, axis, start, step)


def taken(operand: BoundExpr, axis: int, indices: Sequence[int]) -> BoundExpr:
    """`numpy.take(operand, indices, axis)`."""
    runs = tuple(_runs(indices))
    if len(runs) == 1 and (runs[0].step or len(indices) == 1):
        return sliced(operand, axis, runs[0].first, len(indices), runs[0].step or 1)
    shape = (*operand.shape[:axis], len(indices), *operand.shape[axis + 1 :])
    starts = (*(run.start for run in runs), len(indices))
    return Taken(shape, operand.dtype, operand, axis, runs, starts)


def repeated(operand: BoundExpr, axis: int, count: int) -> BoundExpr:
    """`numpy.repeat(operand, count, axis)`."""
    if count == 1:
        return operand
    n = operand.shape[axis] * count
    shape = (*operand.shape[:axis], n, *operand.shape[axis + 1 :])
    return Repeated(shape, operand.dtype, operand, axis, count)


def padded(operand: BoundExpr, axis: int, before: int, after: int, value: Any) -> BoundExpr:
    """`before` and `after` indices more, that hold `value`."""
    if not before and not after:
        return operand
    n = before + operand.shape[axis] + after
    shape = (*operand.shape[:axis], n, *operand.shape[axis + 1 :])
    return Padded(shape, operand.dtype, operand, axis, before, value)


def stacked(operands: Sequence[BoundExpr], axis: int) -> BoundExpr:
    """`numpy.stack(operands, axis)`, of at least one."""
    inner = operands[0].shape
    shape = (*inner[:axis], len(operands), *inner[axis:])
    return Stacked(shape, operands[0].dtype, tuple(operands), axis)


def concatenated(operands: Sequence[BoundExpr], axis: int) -> BoundExpr:
    """`numpy.concatenate(operands, axis)`, of at least one."""
    if len(operands) == 1:
        return operands[0]
    starts = [0]
    for operand in operands:
        starts.append(starts[-1] + operand.shape[axis])
    inner = operands[0].shape
    shape = (*inner[:axis], starts[-1], *inner[axis + 1 :])
    return Concatenated(shape, operands[0].dtype, tuple(operands), axis, tuple(starts))


def interleaved(operands: Sequence[BoundExpr], axis: int) -> BoundExpr:
    """Operands by turns along an axis, of at least two."""
    inner = operands[0].shape
    n = sum(operand.shape[axis] for operand in operands)
    shape = (*inner[:axis], n, *inner[axis + 1 :])
    return Interleaved(shape, operands[0].dtype, tuple(operands), axis)


def _groups(shape: tuple[int, ...], inner: tuple[int, ...]) -> Iterator[AxisGroup]:
    """The least groups of axes of equal size, without those that stay as they are."""
    i = j = 0
    while i < len(shape) or j < len(inner):
        first, from_ = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(inner))
        while (one := math.prod(shape[first:i])) != (two := math.prod(inner[from_:j])):
            i, j = (i + 1, j) if one < two else (i, j + 1)
        if shape[first:i] != inner[from_:j]:
            yield AxisGroup(first, shape[first:i], inner[from_:j])


def _runs(indices: Sequence[int]) -> Iterator[Run]:
    """Indices as runs of equal step, each as long as it can be.

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
