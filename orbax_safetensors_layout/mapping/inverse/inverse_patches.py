"""Patches: elements of a tensor, with the expression over a leaf that has their values.

A tensor's axes are taken apart into factors, as fine as the reshapes on the way require; along
each factor a patch has equally spaced indices. `assemble` joins patches to the tensor:

1. Their axes are taken apart at the same boundaries (`_confine`).
2. `_compose` finds an axis along which they are separate ranges, or by which they are interleaved
   and so separate once it is taken apart, and does so again with the patches of each.
3. `_cut` cuts patches where there is no such axis.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import MappingError, listed
from orbax_safetensors_layout.geometry import row_major_strides

from ..affine.bound import BoundExpr, WholeTensor
from ..affine.index_nodes import concatenated, reshaped, sliced
from ..affine.window import put
from ..names import TensorSpecs


class Factor(NamedTuple):
    """Equally spaced indices of one factor of a shape."""

    extent: int  # of the factor
    start: int
    step: int  # at least 1
    length: int  # number of indices, at least 1

    @property
    def stop(self) -> int:
        return self.start + self.step * (self.length - 1) + 1


class Patch(NamedTuple):
    """Elements of an array and their values."""

    values: BoundExpr  # over a leaf, with one axis for each factor
    factors: tuple[Factor, ...]  # the array's shape, taken apart; without those of extent 1

    @classmethod
    def whole(cls, values: BoundExpr) -> Patch:
        extents = tuple(n for n in values.shape if n > 1)
        return cls(reshaped(values, extents), tuple(Factor(n, 0, 1, n) for n in extents))

    @property
    def boundaries(self) -> tuple[int, ...]:
        """For each factor its stride in elements."""
        return row_major_strides([factor.extent for factor in self.factors])

    def replaced(self, number: int, values: BoundExpr, *factors: Factor, count: int = 1) -> Patch:
        return Patch(values, (*self.factors[:number], *factors, *self.factors[number + count :]))

    def put(self, number: int, factor: Factor, values: BoundExpr) -> Patch:
        """Replace a factor; one of extent 1 is left out."""
        if factor.extent > 1:
            return self.replaced(number, values, factor)
        return self.replaced(number, reshaped(values, put(values.shape, number)))

    def restrict(self, number: int, start: int, stop: int, *, keep: bool = False) -> Patch | None:
        """Restrict a factor to `start` to `stop`, then relative to `start`; None if it is empty."""
        _, first, step, count = self.factors[number]
        low = max(0, -(-(start - first) // step))
        high = min(count, -(-(stop - first) // step))
        if low >= high:
            return None
        values = sliced(self.values, number, low, high - low)
        factor = Factor(stop - start, first + low * step - start, step, high - low)
        # Where it is kept, a factor of extent 1 remains.
        return self.replaced(number, values, factor) if keep else self.put(number, factor, values)


def whole_tensor(name: str, specs: TensorSpecs) -> BoundExpr:
    """Return a tensor, or a leaf, as an expression of what it is stored in or made of, if any."""
    if name in specs.expressions:
        specs.bound.add(name)
        return specs.expressions[name]
    shape, dtype = specs[name]
    patches = [
        Patch(
            WholeTensor(box.shape, dtype, place),
            tuple(Factor(n, a, 1, b - a) for n, a, b in zip(shape, *box, strict=True)),
        )
        for box, place in specs.pieces.get(name, ())
    ]
    return WholeTensor(shape, dtype, name, _compose(shape, patches) if patches else None)


def assemble(shape: Sequence[int], patches: Sequence[Patch]) -> BoundExpr:
    """Join patches that have as many elements as an array; refuses ones that overlap."""
    own = set(steps_of(shape))
    steps = sorted(own.union(*(patch.boundaries for patch in patches)), reverse=True)
    if any(outer % inner for outer, inner in itertools.pairwise(steps)):
        # Leaves take the axes apart in ways that do not nest: only the tensor's own axes are kept.
        steps = sorted(own, reverse=True)
    confined = [part for patch in patches for part in _confine(patch, steps)]
    sizes = [math.prod(shape), *steps]
    extents = tuple(outer // inner for outer, inner in zip(sizes, steps, strict=False))
    return reshaped(_compose(extents, confined), shape)


def _compose(extents: tuple[int, ...], patches: Sequence[Patch]) -> BoundExpr:
    if len(patches) == 1 and patches[0].values.shape == extents:
        return patches[0].values
    for axis, extent in enumerate(extents):
        stretches = _stretches(axis, patches)
        if len(stretches) > 1:
            return _concatenated(axis, extents, stretches)
        step = math.gcd(*_steps(axis, patches))
        if 1 < step <= extent:
            interleaved = _by_remainder(axis, step, extents, patches)
            if interleaved is not None:
                return interleaved
    if len(patches) == 1:
        raise MappingError(f"only some of its elements are in {leaves_of(patches)}")
    return _cut(extents, patches)


def _cut(extents: tuple[int, ...], patches: Sequence[Patch]) -> BoundExpr:
    """Cut patches that are separate on no axis until some are, and join them.

    Long patches with several steps along an axis are cut by remainders of the steps' common
    multiple, others where any of them begins or ends.
    """
    for axis, extent in enumerate(extents):
        period = math.lcm(*_steps(axis, patches))
        factors = [patch.factors[axis] for patch in patches]
        ends = {0, extent, *(f.start for f in factors), *(f.stop for f in factors)}
        if period >= extent > 1:
            ends, period = set(range(extent + 1)), 1
        cuts = [*itertools.pairwise(sorted(ends))]
        longest = max(stop - start for start, stop in cuts)
        if longest < extent and (period == 1 or 2 * longest <= extent):
            stretches = [*_cut_at(axis, cuts, patches)]
            if not all(stretch.patches for stretch in stretches):
                break
            return _concatenated(axis, extents, stretches)
        if period > 1:
            interleaved = _by_remainder(axis, period, extents, patches)
            if interleaved is None:
                break
            return interleaved
    raise overlap(patches)


class _Stretch(NamedTuple):
    """A range of an axis, and patches whose indices are relative to `start`."""

    start: int
    stop: int
    patches: list[Patch]


def _stretches(axis: int, patches: Sequence[Patch]) -> list[_Stretch]:
    """Group patches by the range of an axis that they share with no other group."""
    groups: list[_Stretch] = []
    ranges = [(patch.factors[axis].start, patch.factors[axis].stop, patch) for patch in patches]
    for start, stop, patch in sorted(ranges, key=operator.itemgetter(0, 1)):
        if groups and start < groups[-1].stop:
            groups[-1].patches.append(patch)
            groups[-1] = groups[-1]._replace(stop=max(stop, groups[-1].stop))
        else:
            groups.append(_Stretch(start, stop, [patch]))
    return groups if len(groups) == 1 else [_within(axis, *group) for group in groups]


def _cut_at(
    axis: int, cuts: Iterable[tuple[int, int]], patches: Iterable[Patch]
) -> Iterator[_Stretch]:
    """Yields the patches in each of successive ranges, of which most may be of few."""
    in_order = sorted(enumerate(patches), key=lambda item: item[1].factors[axis].start)
    coming, active = collections.deque(in_order), dict[int, Patch]()
    for start, stop in cuts:
        while coming and coming[0][1].factors[axis].start < stop:
            number, patch = coming.popleft()
            active[number] = patch
        active = {n: patch for n, patch in active.items() if patch.factors[axis].stop > start}
        yield _within(axis, start, stop, (active[number] for number in sorted(active)))


def _within(axis: int, start: int, stop: int, patches: Iterable[Patch]) -> _Stretch:
    restricted = (patch.restrict(axis, start, stop, keep=True) for patch in patches)
    return _Stretch(start, stop, [patch for patch in restricted if patch is not None])


def _concatenated(axis: int, extents: tuple[int, ...], stretches: Sequence[_Stretch]) -> BoundExpr:
    operands, reached = [], 0
    for start, stop, patches in stretches:
        if start != reached:
            names = leaves_of(patches)
            raise MappingError(f"no leaf holds what comes before its elements in {names}")
        operands.append(_compose(put(extents, axis, stop - start), patches))
        reached = stop
    if reached != extents[axis]:
        names = leaves_of(stretches[-1].patches)
        raise MappingError(f"no leaf holds what comes after its elements in {names}")
    return concatenated(operands, axis)


def _by_remainder(
    axis: int, period: int, extents: tuple[int, ...], patches: Sequence[Patch]
) -> BoundExpr | None:
    """Join patches after an axis is taken apart by `period`; None if they lack a remainder."""
    remainders: set[int] = set()
    for _, start, step, length in (patch.factors[axis] for patch in patches):
        distinct = min(length, period // math.gcd(step, period))
        remainders.update((start + j * step) % period for j in range(distinct))
    if len(remainders) < period:
        return None
    outer, rest = divmod(extents[axis], period)
    if rest:
        whole = outer * period
        first, last = _within(axis, 0, whole, patches), _within(axis, whole, whole + rest, patches)
        return _concatenated(axis, extents, [first, last]) if last.patches else None
    parts = [part for patch in patches for part in _divide(patch, axis, period)]
    return reshaped(_compose(put(extents, axis, outer, period), parts), extents)


def _steps(axis: int, patches: Iterable[Patch]) -> list[int]:
    factors = (patch.factors[axis] for patch in patches)
    return [factor.step for factor in factors if factor.length > 1]


def overlap(patches: Sequence[Patch]) -> MappingError:
    """Return the error for patches that have elements in common."""
    return MappingError(
        f"its parts in {leaves_of(patches)} overlap, or leave gaps",
        hint="Where leaves hold the same values, say so: rule(..., tied_to=...).",
    )


def held_elements(patches: Sequence[Patch]) -> int:
    """Return how many elements patches have."""
    return sum(math.prod(patch.values.shape) for patch in patches)


def leaves_of(patches: Sequence[Patch]) -> str:
    """Name the leaves of patches, for errors."""
    names = [*dict.fromkeys(repr(n) for patch in patches for n in patch.values.sources())]
    return f"{'leaf' if len(names) == 1 else 'leaves'} {listed(names, 4)}"


def steps_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of the axes of extent above 1."""
    return row_major_strides([n for n in shape if n > 1])


def _confine(patch: Patch, boundaries: Sequence[int]) -> list[Patch]:
    """Split a patch into such with factors at some boundaries and nowhere else; as `split_at`."""
    for number in reversed(range(len(patch.factors) - 1)):
        if patch.boundaries[number] not in boundaries:
            return [p for part in joined(patch, number) for p in _confine(part, boundaries)]
    return split_at(patch, boundaries)


def split_at(patch: Patch, boundaries: Sequence[int]) -> list[Patch]:
    """Split a patch into such with factors at all of some strides, each dividing the one before."""
    patches = [patch]
    for boundary in boundaries:
        patches = [part for p in patches for part in _split_at(p, boundary)]
    return patches


def _split_at(patch: Patch, boundary: int) -> list[Patch]:
    steps = patch.boundaries
    if boundary in steps:
        return [patch]
    number = next(i for i, step in enumerate(steps) if step < boundary)
    step, extent = steps[number], patch.factors[number].extent
    if boundary % step == 0 and (step * extent) % boundary == 0:
        return list(_divide(patch, number, boundary // step))
    # The factor begins or ends where no boundary is needed.
    first = number if boundary % step else number - 1
    return [part for both in joined(patch, first) for part in _split_at(both, boundary)]


def _divide(patch: Patch, number: int, inner: int) -> Iterator[Patch]:
    """Cut a factor in two, the inner one of extent `inner`; in several patches if need be."""
    whole, done = patch, 0
    while True:
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
            shape = put(patch.values.shape, number, pair[0].length, pair[1].length)
            yield patch.replaced(number, reshaped(patch.values, shape), *pair)
            return
        # Neither: separate whole rows from the rest before and after them, or each row.
        first = -(-(inner - rest) // step)
        if rest < step and inner % step == 0:
            first = count // (inner // step) * (inner // step)
        yield from _divide(_along(whole, number, done, done + first), number, inner)
        done += first
        patch = _along(whole, number, done, whole.factors[number].length)


def _along(patch: Patch, number: int, low: int, high: int) -> Patch:
    """Return the part of a patch from one index of a factor to another."""
    extent, start, step, _ = patch.factors[number]
    factor = Factor(extent, start + low * step, step, high - low)
    return patch.put(number, factor, sliced(patch.values, number, low, high - low))


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
    return patch.replaced(number, values, factor, count=2)


def joined(patch: Patch, number: int) -> list[Patch]:
    """Merge a factor and the next; where they are not equally spaced, for each index of one."""
    both = _join(patch, number)
    if both is not None:
        return [both]
    at = min(number, number + 1, key=lambda i: patch.factors[i].length)
    extent, start, step, length = patch.factors[at]
    single = [Factor(extent, start + j * step, 1, 1) for j in range(length)]
    parts = [patch.put(at, f, sliced(patch.values, at, j, 1)) for j, f in enumerate(single)]
    return [both for part in parts if (both := _join(part, number)) is not None]
