"""Inverts bound expressions: each tensor of a checkpoint as an expression over the model's leaves.

1. `trace` finds the patches of tensors that each leaf holds, with expressions over the leaf.
2. Patches of one tensor are counted: they must have as many elements as it, and one dtype.
3. Their axes are taken apart at the same boundaries (`coarsen`, `confine`).
4. `_compose` finds an axis along which they are separate ranges (a concatenation) or separate
   remainders (interleaved), and does so again with the parts of each; `_cut` cuts patches where
   there is no such axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import MappingError

from ..affine.bound import BoundExpr, Constant, WholeTensor
from ..affine.index_builders import concatenated, interleaved, reshaped, sliced
from ..problems import Problem, Problems, problems_of
from ..shapes import TensorSpec
from .exactness import check_exact
from .inverse_patches import Factor, Patch, coarsen, confine, restrict, steps_of, trace


class InversePart(NamedTuple):
    """A patch of a tensor and the leaf that has it."""

    leaf: str
    patch: Patch


def invert(
    expressions: Mapping[str, BoundExpr], leaves: Mapping[str, TensorSpec]
) -> dict[str, BoundExpr]:
    """Return each tensor as an expression over leaves.

    Args:
        expressions: Each saved leaf as an expression over tensors.
        leaves: Shape and dtype of the leaves.

    Raises:
        Problems: Operations do not invert, or leaves overlap in a tensor or leave gaps.
    """
    parts: dict[str, list[InversePart]] = {}
    sources: dict[str, WholeTensor] = {}
    problems: list[Problem] = []
    refused: set[str] = set()
    for leaf, expression in expressions.items():
        sources.update((n.name, n) for n in expression.nodes() if isinstance(n, WholeTensor))
        shape, dtype = leaves[leaf]
        try:
            if 0 not in shape:
                check_exact(expression, dtype)
                for source, patch in trace(
                    expression, Patch.whole(WholeTensor(shape, dtype, leaf))
                ):
                    parts.setdefault(source.name, []).append(InversePart(leaf, patch))
        except MappingError as error:
            refused.update(expression.sources())
            problems += [
                p._replace(text=f"leaf {leaf!r} cannot be saved: {p.text}")
                for p in problems_of(error)
            ]
    inverted: dict[str, BoundExpr] = {}
    for name, source in sources.items():
        if name in refused:
            continue
        try:
            inverted[name] = _assemble(source, parts.get(name, []))
        except MappingError as error:
            problems += [
                p._replace(text=f"tensor {name!r} cannot be saved: {p.text}")
                for p in problems_of(error)
            ]
    if problems:
        raise Problems(problems)
    return inverted


def _assemble(source: WholeTensor, parts: Sequence[InversePart]) -> BoundExpr:
    """Return a tensor from its parts, which must be of one dtype and cover it exactly."""
    if 0 in source.shape:
        return Constant(source.shape, source.dtype, source.dtype.type(0))
    dtypes = {part.patch.values.dtype.name for part in parts}
    if len(dtypes) > 1:
        raise MappingError(f"its parts in {_leaves(parts)} are of {' and '.join(sorted(dtypes))}")
    size = math.prod(source.shape)
    held = sum(math.prod(part.patch.values.shape) for part in parts)
    if held < size:
        present = f"only {held} are in {_leaves(parts)}" if parts else "none is in any leaf"
        raise MappingError(f"of its {size} elements {present}")
    if held > size:
        raise _overlap(parts)
    own = set(steps_of(source.shape))
    coarse = [part._replace(patch=coarsen(part.patch, own)) for part in parts]
    steps = sorted(own.union(*(part.patch.boundaries for part in coarse)), reverse=True)
    if any(outer % inner for outer, inner in itertools.pairwise(steps)):
        # Leaves take the axes apart in ways that do not nest: only the tensor's own axes are kept.
        steps = sorted(own, reverse=True)
    refined = [
        InversePart(part.leaf, patch) for part in coarse for patch in confine(part.patch, steps)
    ]
    extents = [outer // inner for outer, inner in zip([size, *steps], steps, strict=False)]
    return reshaped(_compose(extents, refined), source.shape)


def _compose(extents: Sequence[int], parts: Sequence[InversePart]) -> BoundExpr:
    """Join parts along the axes on which they are separate."""
    first = parts[0].patch
    if len(parts) == 1 and first.values.shape == tuple(extents):
        return first.values
    for axis, extent in enumerate(extents):
        stretches = _stretches(axis, parts)
        if len(stretches) > 1:
            return _concatenated(axis, extents, stretches)
        step = math.gcd(*_steps(axis, parts))
        if 1 < step <= extent:
            turns = _turns(axis, step, parts)
            if len(turns) == step:
                return _interleaved(axis, extents, turns)
    if len(parts) == 1:
        raise MappingError(f"only some of its elements are in {_leaves(parts)}")
    return _cut(extents, parts)


def _cut(extents: Sequence[int], parts: Sequence[InversePart]) -> BoundExpr:
    """Cut parts that are separate on no axis until some are.

    Long parts with several steps along an axis are cut by remainders of the steps' common multiple,
    others where any of them begins or ends.
    """
    for axis, extent in enumerate(extents):
        period = math.lcm(*_steps(axis, parts))
        ends = {0, extent, *(end for part in parts for end in _ends(axis, part))}
        if period >= extent > 1:
            ends, period = set(range(extent + 1)), 1
        cuts = [*itertools.pairwise(sorted(ends))]
        longest = max(stop - start for start, stop in cuts)
        if longest < extent and (period == 1 or 2 * longest <= extent):
            stretches = [_within(axis, *cut, parts) for cut in cuts]
            if not all(stretch.parts for stretch in stretches):
                break
            return _concatenated(axis, extents, stretches)
        if period > 1:
            turns = _turns(axis, period, parts)
            if len(turns) < period:
                break
            return _interleaved(axis, extents, turns)
    raise _overlap(parts)


class _Stretch(NamedTuple):
    """A range of an axis, and parts whose indices are relative to `start`."""

    start: int
    stop: int
    parts: list[InversePart]


def _stretches(axis: int, parts: Sequence[InversePart]) -> list[_Stretch]:
    """Group parts by the range of an axis that they share with no other group."""
    groups: list[_Stretch] = []
    for part in sorted(parts, key=lambda part: _ends(axis, part)):
        start, stop = _ends(axis, part)
        if groups and start < groups[-1].stop:
            groups[-1].parts.append(part)
            groups[-1] = groups[-1]._replace(stop=max(stop, groups[-1].stop))
        else:
            groups.append(_Stretch(start, stop, [part]))
    if len(groups) == 1:
        return groups
    return [_within(axis, *group) for group in groups]


def _within(axis: int, start: int, stop: int, parts: Iterable[InversePart]) -> _Stretch:
    """Restrict parts to a range of an axis."""
    inside = [(part.leaf, restrict(part.patch, axis, start, stop, keep=True)) for part in parts]
    return _Stretch(
        start, stop, [InversePart(leaf, patch) for leaf, patch in inside if patch is not None]
    )


def _concatenated(axis: int, extents: Sequence[int], stretches: Sequence[_Stretch]) -> BoundExpr:
    operands, reached = [], 0
    for start, stop, parts in stretches:
        if start != reached:
            raise MappingError(f"no leaf holds what comes before its elements in {_leaves(parts)}")
        operands.append(_compose(_extents(extents, axis, stop - start), parts))
        reached = stop
    if reached != extents[axis]:
        parts = stretches[-1].parts
        raise MappingError(f"no leaf holds what comes after its elements in {_leaves(parts)}")
    return concatenated(operands, axis)


def _turns(axis: int, period: int, parts: Iterable[InversePart]) -> dict[int, list[InversePart]]:
    """Split parts by the remainder of their indices by `period`; the indices become quotients."""
    turns: dict[int, list[InversePart]] = {}
    for part in parts:
        extent, start, step, count = part.patch.factors[axis]
        apart = period // math.gcd(step, period)  # after so many indices the remainder is the same
        for first in range(min(apart, count)):
            length = -(-(count - first) // apart)
            values = sliced(part.patch.values, axis, first, length, apart if length > 1 else 1)
            quotient, rest = divmod(start + first * step, period)
            each = step * apart // period if length > 1 else 1
            factor = Factor(len(range(rest, extent, period)), quotient, each, length)
            moved = part.patch.replaced(axis, factor, values)
            turns.setdefault(rest, []).append(InversePart(part.leaf, moved))
    return turns


def _interleaved(
    axis: int, extents: Sequence[int], turns: dict[int, list[InversePart]]
) -> BoundExpr:
    operands = []
    for rest, parts in sorted(turns.items()):
        n = len(range(rest, extents[axis], len(turns)))
        operands.append(_compose(_extents(extents, axis, n), parts))
    return interleaved(operands, axis)


def _steps(axis: int, parts: Iterable[InversePart]) -> list[int]:
    """Return the steps of the parts that have several indices of an axis."""
    factors = (part.patch.factors[axis] for part in parts)
    return [factor.step for factor in factors if factor.length > 1]


def _ends(axis: int, part: InversePart) -> tuple[int, int]:
    """Return the first index of a part along an axis, and one past the last."""
    _, start, step, count = part.patch.factors[axis]
    return start, start + step * (count - 1) + 1


def _overlap(parts: Sequence[InversePart]) -> MappingError:
    return MappingError(
        f"its parts in {_leaves(parts)} overlap, or leave gaps",
        hint="Where leaves hold the same values, say so: rule(..., tied_to=...).",
    )


def _extents(extents: Sequence[int], axis: int, n: int) -> list[int]:
    return [*extents[:axis], n, *extents[axis + 1 :]]


def _leaves(parts: Sequence[InversePart]) -> str:
    names = [repr(name) for name in dict.fromkeys(part.leaf for part in parts)]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{'leaf' if len(names) == 1 else 'leaves'} {listed}"
