"""The saving direction: each tensor of a checkpoint as an expression over the model's leaves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.mapping.bound import Bound, Constant, Source
from orbax_safetensors_layout.mapping.builders import concatenated, interleaved, reshaped
from orbax_safetensors_layout.mapping.facts import Fact
from orbax_safetensors_layout.mapping.patches import Factor, Patch, coarsen, refine, steps_of, trace
from orbax_safetensors_layout.mapping.problems import Problem, Problems, problems_of


class Part(NamedTuple):
    """A patch of a tensor and the leaf that has it."""

    leaf: str
    patch: Patch


def invert(expressions: Mapping[str, Bound], leaves: Mapping[str, Fact]) -> dict[str, Bound]:
    """Each tensor as an expression over leaves.

    Args:
        expressions: Each leaf that is to be saved, as an expression over tensors.
        leaves: Shape and dtype of the leaves.

    Raises:
        Problems: Operations do not invert, or leaves overlap in a tensor or leave gaps.
    """
    parts: dict[str, list[Part]] = {}
    sources: dict[str, Source] = {}
    problems: list[Problem] = []
    refused: set[str] = set()
    for leaf, expression in expressions.items():
        sources.update((n.name, n) for n in expression.nodes() if isinstance(n, Source))
        shape, dtype = leaves[leaf]
        try:
            if 0 not in shape:
                for source, patch in trace(expression, Patch.whole(Source(shape, dtype, leaf))):
                    parts.setdefault(source.name, []).append(Part(leaf, patch))
        except MappingError as error:
            refused.update(expression.sources())
            problems += [
                p._replace(text=f"leaf {leaf!r} can not be saved: {p.text}")
                for p in problems_of(error)
            ]
    inverted: dict[str, Bound] = {}
    for name, source in sources.items():
        if name in refused:
            continue
        try:
            inverted[name] = _assemble(source, parts.get(name, []))
        except MappingError as error:
            problems += [
                p._replace(text=f"tensor {name!r} can not be saved: {p.text}")
                for p in problems_of(error)
            ]
    if problems:
        raise Problems(problems)
    return inverted


def _assemble(source: Source, parts: Sequence[Part]) -> Bound:
    """A tensor from its parts, which have to cover it exactly.

    Raises:
        MappingError: They overlap, leave gaps, or differ in dtype.
    """
    if 0 in source.shape:
        return Constant(source.shape, source.dtype, source.dtype.type(0))
    dtypes = {part.patch.values.dtype.name for part in parts}
    if len(dtypes) > 1:
        raise MappingError(f"its parts in {_leaves(parts)} are of {' and '.join(sorted(dtypes))}")
    size = math.prod(source.shape)
    held = sum(math.prod(part.patch.values.shape) for part in parts)
    if held < size:
        having = f"only {held} are in {_leaves(parts)}" if parts else "none is in any leaf"
        raise MappingError(f"of its {size} elements {having}")
    own = set(steps_of(source.shape))
    coarse = [part._replace(patch=coarsen(part.patch, own)) for part in parts]
    steps = sorted(own.union(*(part.patch.boundaries for part in coarse)), reverse=True)
    if any(outer % inner for outer, inner in itertools.pairwise(steps)):
        raise MappingError(f"its parts in {_leaves(parts)} split its axes in ways that do not nest")
    refined = [Part(part.leaf, patch) for part in coarse for patch in refine(part.patch, steps)]
    extents = [outer // inner for outer, inner in zip([size, *steps], steps, strict=False)]
    return reshaped(_compose(extents, refined), source.shape)


def _compose(extents: Sequence[int], parts: Sequence[Part]) -> Bound:
    """Parts put together along the axes on which they lie apart."""
    first = parts[0].patch
    if len(parts) == 1 and first.values.shape == tuple(extents):
        return first.values
    for axis, extent in enumerate(extents):
        intervals = _intervals(axis, parts)
        if len(intervals) > 1:
            return _concatenated(axis, extents, intervals)
        step = math.gcd(*(p.patch.factors[axis].step for p in parts if _many(p, axis)))
        by_rest: dict[int, list[Part]] = {}
        for part in parts:
            by_rest.setdefault(part.patch.factors[axis].start % (step or 1), []).append(part)
        if step > 1 and len(by_rest) == step <= extent:
            operands = []
            for rest in range(step):
                within = _extents(extents, axis, len(range(rest, extent, step)))
                operands.append(_compose(within, _every(axis, step, by_rest[rest])))
            return interleaved(operands, axis)
    if len(parts) == 1:
        raise MappingError(f"only some of its elements are in {_leaves(parts)}")
    raise MappingError(
        f"its parts in {_leaves(parts)} overlap, or leave gaps",
        hint="Where leaves hold the same values, say so: rule(..., tied_to=...).",
    )


def _intervals(axis: int, parts: Sequence[Part]) -> list[tuple[int, int, list[Part]]]:
    """Parts grouped by the stretch of an axis that they share with no other group."""

    def ends(part: Part) -> tuple[int, int]:
        _, start, step, count = part.patch.factors[axis]
        return start, start + step * (count - 1) + 1

    groups: list[tuple[int, int, list[Part]]] = []
    for part in sorted(parts, key=ends):
        start, stop = ends(part)
        if groups and start < groups[-1][1]:
            low, high, members = groups.pop()
            groups.append((low, max(high, stop), [*members, part]))
        else:
            groups.append((start, stop, [part]))
    return groups


def _concatenated(
    axis: int, extents: Sequence[int], intervals: Sequence[tuple[int, int, list[Part]]]
) -> Bound:
    operands, reached = [], 0
    for start, stop, parts in intervals:
        if start != reached:
            raise MappingError(f"no leaf holds what comes before its elements in {_leaves(parts)}")
        moved = [_put(p, axis, start=p.patch.factors[axis].start - start) for p in parts]
        operands.append(_compose(_extents(extents, axis, stop - start), moved))
        reached = stop
    if reached != extents[axis]:
        raise MappingError(f"no leaf holds what comes after its elements in {_leaves(parts)}")
    return concatenated(operands, axis)


def _every(axis: int, step: int, parts: Iterable[Part]) -> list[Part]:
    """Parts of one remainder, by their quotients."""
    return [
        _put(
            part,
            axis,
            start=part.patch.factors[axis].start // step,
            step=max(1, part.patch.factors[axis].step // step) if _many(part, axis) else 1,
        )
        for part in parts
    ]


def _many(part: Part, axis: int) -> bool:
    return part.patch.factors[axis].length > 1


def _put(part: Part, axis: int, **changes: int) -> Part:
    factors = list(part.patch.factors)
    factors[axis] = Factor(**{**factors[axis]._asdict(), **changes})
    return part._replace(patch=Patch(part.patch.values, tuple(factors)))


def _extents(extents: Sequence[int], axis: int, n: int) -> list[int]:
    return [*extents[:axis], n, *extents[axis + 1 :]]


def _leaves(parts: Sequence[Part]) -> str:
    names = [repr(name) for name in dict.fromkeys(part.leaf for part in parts)]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{'leaf' if len(names) == 1 else 'leaves'} {listed}"
