"""Patches: the elements of a tensor that a leaf holds, found by walking a bound expression down.

A tensor's axes are taken apart into factors, as fine as the reshapes on the way require; along
each factor a patch has equally spaced indices. Its values are an expression over the leaf with one
axis for each factor.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from orbax_safetensors_layout.errors import MappingError

from ..affine.bound import BoundExpr, Constant, Valued, WholeTensor
from ..affine.decoded import Computed
from ..affine.index_builders import permuted, reshaped, sliced
from ..affine.index_nodes import (
    Concatenated,
    Padded,
    Permuted,
    Repeated,
    Reshaped,
    Sliced,
    Stacked,
    Taken,
    inverse_permutation,
)
from ..expr.choices import Copies
from ..expr.values import undone

_OnAxis: TypeAlias = Sliced | Taken | Padded | Repeated


class Factor(NamedTuple):
    """Equally spaced indices of one factor of a shape.

    Attributes:
        extent: Extent of the factor.
        start: The first index.
        step: Distance of the indices, at least 1.
        length: Number of indices, at least 1.
    """

    extent: int
    start: int
    step: int
    length: int

    @classmethod
    def whole(cls, extent: int) -> Factor:
        """Return all indices."""
        return cls(extent, 0, 1, extent)


class Patch(NamedTuple):
    """Elements of an array and their values.

    Attributes:
        values: An expression over a leaf, with one axis for each factor.
        factors: The array's shape, taken apart; without factors of extent 1.
    """

    values: BoundExpr
    factors: tuple[Factor, ...]

    @classmethod
    def whole(cls, values: BoundExpr) -> Patch:
        """Return all elements of an array."""
        extents = tuple(n for n in values.shape if n > 1)
        return cls(reshaped(values, extents), tuple(map(Factor.whole, extents)))

    @property
    def boundaries(self) -> list[int]:
        """For each factor its stride in elements."""
        sizes = itertools.accumulate(reversed([f.extent for f in self.factors]), operator.mul)
        return [1, *sizes][:-1][::-1] if self.factors else []

    def put(self, number: int, factor: Factor, values: BoundExpr) -> Patch:
        """Replace a factor; one of extent 1 is left out."""
        if factor.extent > 1:
            return self.replaced(number, factor, values)
        values = reshaped(values, values.shape[:number] + values.shape[number + 1 :])
        return Patch(values, self.factors[:number] + self.factors[number + 1 :])

    def replaced(self, number: int, factor: Factor, values: BoundExpr) -> Patch:
        """Replace a factor."""
        return Patch(values, (*self.factors[:number], factor, *self.factors[number + 1 :]))


def trace(node: BoundExpr, patch: Patch) -> Iterator[tuple[WholeTensor, Patch]]:
    """Yields the patches of tensors that hold a patch of an expression over them.

    Raises:
        MappingError: An operation of the expression does not invert.
    """
    if isinstance(node, WholeTensor):
        yield node, patch
    elif isinstance(node, Permuted):
        order = [n for axis in inverse_permutation(node.axes) for n in _span(node, patch, axis)]
        factors = tuple(patch.factors[n] for n in order)
        yield from trace(node.operand, Patch(permuted(patch.values, order), factors))
    elif isinstance(node, Reshaped):
        for part in refine(patch, steps_of(node.operand.shape)):
            yield from trace(node.operand, part)
    elif isinstance(node, Valued):
        values = patch.values
        for op in undone(node.op, node.operand.dtype, values.dtype):
            values = Valued.of(values, op)
        yield from trace(node.operand, patch._replace(values=values))
    elif isinstance(node, Copies):
        for operand in node.operands:
            yield from trace(operand, patch)
    elif isinstance(node, Stacked | Concatenated):
        yield from _trace_joined(node, patch)
    elif isinstance(node, Computed):
        raise MappingError("a value that is decoded or computed by a function does not invert")
    elif isinstance(node, Sliced | Taken | Padded | Repeated):
        yield from _trace_axis(node, patch)
    elif not isinstance(node, Constant):
        raise MappingError(f"{node!r} does not invert")


def _trace_joined(
    node: Stacked | Concatenated, patch: Patch
) -> Iterator[tuple[WholeTensor, Patch]]:
    starts = node.starts if isinstance(node, Concatenated) else range(len(node.operands) + 1)
    patches, number = _single(node, patch, node.axis)
    for operand, (start, stop) in zip(node.operands, itertools.pairwise(starts), strict=True):
        for part in patches:
            restricted = restrict(part, number, start, stop)
            if restricted is not None:
                yield from trace(operand, restricted)


def _trace_axis(node: _OnAxis, patch: Patch) -> Iterator[tuple[WholeTensor, Patch]]:
    patches, number = _single(node, patch, node.axis)
    for part in patches:
        for below in _moved(node, part, number):
            if below is not None:
                yield from trace(node.operand, below)


def _moved(node: _OnAxis, patch: Patch, number: int) -> Iterator[Patch | None]:
    """Yields a patch of a node as patches of its operand, which differ along one axis."""
    n = node.operand.shape[node.axis]
    if isinstance(node, Padded):
        yield restrict(patch, number, node.before, node.before + n)
    elif isinstance(node, Repeated):
        yield _every(patch, number, node.count)
    elif isinstance(node, Sliced):
        yield _move(patch, number, n, node.start, node.step)
    else:
        for run, (start, stop) in zip(node.runs, itertools.pairwise(node.starts), strict=True):
            if stop - start > 1 and not run.step:
                raise MappingError(
                    "take(...) with an index twice does not invert; repeat(...) does"
                )
            part = restrict(patch, number, start, stop, keep=True)
            yield None if part is None else _move(part, number, n, run.first, run.step)


def steps_of(shape: Sequence[int]) -> list[int]:
    """Return the row-major strides of the axes of extent above 1."""
    return [math.prod(shape[i + 1 :]) for i, n in enumerate(shape) if n > 1]


def coarsen(patch: Patch, boundaries: Collection[int]) -> Patch:
    """Join factors where that is possible, but for some boundaries."""
    for number in reversed(range(len(patch.factors) - 1)):
        if patch.boundaries[number] not in boundaries:
            patch = _join(patch, number) or patch
    return patch


def confine(patch: Patch, boundaries: Sequence[int]) -> list[Patch]:
    """Split a patch into such with factors at some boundaries and nowhere else; as `refine`."""
    for number in reversed(range(len(patch.factors) - 1)):
        if patch.boundaries[number] not in boundaries:
            return [p for part in _joined(patch, number) for p in confine(part, boundaries)]
    return refine(patch, boundaries)


def refine(patch: Patch, boundaries: Sequence[int]) -> list[Patch]:
    """Split a patch into such with factors at all of some boundaries.

    Args:
        patch: The patch.
        boundaries: Strides of factors, in elements. Each divides the next larger one.
    """
    patches = [patch]
    for boundary in boundaries:
        patches = [part for p in patches for part in _refine(p, boundary)]
    return patches


def _refine(patch: Patch, boundary: int) -> list[Patch]:
    steps = patch.boundaries
    if boundary in steps:
        return [patch]
    number = next(i for i, step in enumerate(steps) if step < boundary)
    step, extent = steps[number], patch.factors[number].extent
    if boundary % step == 0 and (step * extent) % boundary == 0:
        return list(_cut(patch, number, boundary // step))
    # The factor begins or ends where no boundary is needed.
    first = number if boundary % step else number - 1
    return [part for joined in _joined(patch, first) for part in _refine(joined, boundary)]


def _cut(patch: Patch, number: int, inner: int) -> Iterator[Patch]:
    """Cut a factor in two, the inner one of extent `inner`; in several patches if need be."""
    extent, start, step, count = patch.factors[number]
    outer = extent // inner
    row, rest = divmod(start, inner)
    last = start + (count - 1) * step
    pair: tuple[Factor, Factor] | None = None
    if count == 1 or last // inner == row:
        pair = Factor(outer, row, 1, 1), Factor(inner, rest, step, count)
    elif step % inner == 0:
        pair = Factor(outer, row, step // inner, count), Factor(inner, rest, 1, 1)
    elif inner % step == 0 and rest < step and count % (inner // step) == 0:
        each = inner // step
        pair = Factor(outer, row, 1, count // each), Factor(inner, rest, step, each)
    if pair is not None:
        shape = patch.values.shape
        counts = (pair[0].length, pair[1].length)
        values = reshaped(patch.values, (*shape[:number], *counts, *shape[number + 1 :]))
        factors = (*patch.factors[:number], *pair, *patch.factors[number + 1 :])
        yield Patch(values, factors)
        return
    # Neither: separate whole rows from the rest before and after them, or each row.
    first = -(-(inner - rest) // step)
    if rest < step and inner % step == 0:
        first = count // (inner // step) * (inner // step)
    for low, high in ((0, first), (first, count)):
        factor = Factor(extent, start + low * step, step, high - low)
        values = sliced(patch.values, number, low, high - low)
        yield from _cut(patch.put(number, factor, values), number, inner)


def _join(patch: Patch, number: int) -> Patch | None:
    """Merge a factor and the next; None where their indices are not equally spaced."""
    outer, inner = patch.factors[number : number + 2]
    if outer.length == 1 or outer.step * inner.extent == inner.step * inner.length:
        step = inner.step
    elif inner.length == 1:
        step = outer.step * inner.extent
    else:
        return None
    count = outer.length * inner.length
    start = outer.start * inner.extent + inner.start
    factor = Factor(outer.extent * inner.extent, start, step, count)
    shape = patch.values.shape
    values = reshaped(patch.values, (*shape[:number], count, *shape[number + 2 :]))
    return Patch(values, (*patch.factors[:number], factor, *patch.factors[number + 2 :]))


def _joined(patch: Patch, number: int) -> list[Patch]:
    """Merge a factor and the next; where they are not equally spaced, for each index of one."""
    joined = _join(patch, number)
    if joined is not None:
        return [joined]
    at = min(number, number + 1, key=lambda i: patch.factors[i].length)
    extent, start, step, length = patch.factors[at]
    single = [Factor(extent, start + j * step, 1, 1) for j in range(length)]
    parts = [patch.put(at, f, sliced(patch.values, at, j, 1)) for j, f in enumerate(single)]
    return [both for part in parts if (both := _join(part, number)) is not None]


def _span(node: BoundExpr, patch: Patch, axis: int) -> range:
    """Return the factors of an axis."""
    size = math.prod(node.shape[axis + 1 :])
    steps = patch.boundaries
    start = sum(step >= size * node.shape[axis] for step in steps)
    return range(start, sum(step >= size for step in steps))


def _single(node: BoundExpr, patch: Patch, axis: int) -> tuple[list[Patch], int]:
    """Merge the factors of an axis into one, also of extent 1; return patches, and its number."""
    span = _span(node, patch, axis)
    patches = [patch]
    for number in reversed(span[:-1]):
        patches = [joined for part in patches for joined in _joined(part, number)]
    if not span:
        shape, factors = patch.values.shape, patch.factors
        values = reshaped(patch.values, (*shape[: span.start], 1, *shape[span.start :]))
        parts = (*factors[: span.start], Factor.whole(1), *factors[span.start :])
        patches = [Patch(values, parts)]
    return patches, span.start


def restrict(
    patch: Patch, number: int, start: int, stop: int, *, keep: bool = False
) -> Patch | None:
    """Restrict a factor to indices `start` to `stop`, relative to `start`; None where it has none.

    With `keep` the factor remains, also where its extent becomes 1.
    """
    _, first, step, count = patch.factors[number]
    low = max(0, -(-(start - first) // step))
    high = min(count, -(-(stop - first) // step))
    if low >= high:
        return None
    values = sliced(patch.values, number, low, high - low)
    factor = Factor(stop - start, first + low * step - start, step, high - low)
    return (patch.replaced if keep else patch.put)(number, factor, values)


def _move(patch: Patch, number: int, extent: int, start: int, step: int) -> Patch:
    """Map index `i` of a factor to index `start + i * step` of one of another extent."""
    _, first, distance, count = patch.factors[number]
    values = patch.values
    start, step = start + first * step, step * distance
    if step < 0 and count > 1:
        start, step = start + (count - 1) * step, -step
        values = sliced(values, number, count - 1, count, -1)
    return patch.put(number, Factor(extent, start, step if count > 1 else 1, count), values)


def _every(patch: Patch, number: int, n: int) -> Patch | None:
    """Return the first of each `n` indices of a factor."""
    extent, start, step, count = patch.factors[number]
    period = n // math.gcd(step, n)
    firsts = [j for j in range(min(period, count)) if (start + j * step) % n == 0]
    if not firsts:
        return None
    (low,) = firsts
    kept = -(-(count - low) // period)
    values = sliced(patch.values, number, low, kept, period)
    factor = Factor(extent // n, (start + low * step) // n, step * period // n, kept)
    return patch.put(number, factor, values)
