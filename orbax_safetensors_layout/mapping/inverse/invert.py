"""Inverts bound expressions: each tensor of a checkpoint as an expression over the model's leaves.

1. `_trace` walks each leaf's expression down to the patches of tensors that the leaf holds.
2. Patches of one tensor are counted: they must have as many elements as it, and one dtype.
3. `assemble` joins them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from orbax_safetensors_layout.errors import MappingError

from ..affine.bound import BoundExpr, Constant, Valued, WholeTensor
from ..affine.index_nodes import (
    Computed,
    Concatenated,
    Permuted,
    Repeated,
    Reshaped,
    Sliced,
    Stacked,
    Taken,
    inverse_permutation,
    permuted,
    reshaped,
    sliced,
)
from ..expr.choices import Compared
from ..expr.values import ValueOp, undone
from ..problems import Problem, Problems, within
from ..shapes import Shapes, TensorSpecs
from .exactness import check_exact
from .inverse_patches import (
    Factor,
    Patch,
    assemble,
    divide,
    joined,
    leaves_of,
    overlap,
    refine,
    steps_of,
    whole_tensor,
)

_OnAxis: TypeAlias = Stacked | Concatenated | Sliced | Taken | Repeated


def invert(expressions: Mapping[str, BoundExpr], leaves: Shapes) -> dict[str, BoundExpr]:
    """Return each tensor as an expression over leaves, of those of each saved leaf over tensors.

    Raises:
        Problems: Operations do not invert, or leaves overlap in a tensor or leave gaps.
    """
    specs = TensorSpecs.of(leaves)
    patches: dict[str, list[Patch]] = {}
    tensors: dict[str, WholeTensor] = {}
    problems: list[Problem] = []
    refused: set[str] = set()
    for leaf, expression in expressions.items():
        tensors.update((n.name, n) for n in expression.nodes() if isinstance(n, WholeTensor))
        if 0 in specs[leaf].shape:
            continue
        try:
            for tensor, patch in _trace(expression, Patch.whole(whole_tensor(leaf, specs))):
                patches.setdefault(tensor.name, []).append(patch)
        except MappingError as error:
            refused.update(expression.sources())
            problems += within(error, f"leaf {leaf!r} cannot be saved").problems
    inverted: dict[str, BoundExpr] = {}
    for name, tensor in tensors.items():
        if name in refused:
            continue
        try:
            inverted[name] = _inverse(tensor, patches.get(name, []))
        except MappingError as error:
            problems += within(error, f"tensor {name!r} cannot be saved").problems
    if problems:
        raise Problems(problems)
    return inverted


def _inverse(tensor: WholeTensor, patches: Sequence[Patch]) -> BoundExpr:
    """Return a tensor from its patches, which must be of one dtype and cover it exactly."""
    if 0 in tensor.shape:
        return Constant(tensor.shape, tensor.dtype, tensor.dtype.type(0))
    dtypes = {patch.values.dtype.name for patch in patches}
    if len(dtypes) > 1:
        raise MappingError(
            f"its parts in {leaves_of(patches)} are of {' and '.join(sorted(dtypes))}"
        )
    size = math.prod(tensor.shape)
    held = sum(math.prod(patch.values.shape) for patch in patches)
    if held < size:
        present = f"only {held} are in {leaves_of(patches)}" if patches else "none is in any leaf"
        raise MappingError(f"of its {size} elements {present}")
    if held > size:
        raise overlap(patches)
    return assemble(tensor.shape, patches)


def _trace(
    node: BoundExpr, patch: Patch, ops: tuple[ValueOp, ...] = ()
) -> Iterator[tuple[WholeTensor, Patch]]:
    """Yields the patches of tensors that hold a patch of an expression over them.

    `ops` are the operations of loading on its values. A `Constant` has no patches.
    """
    if isinstance(node, WholeTensor):
        check_exact(node.dtype, ops, patch.values)
        yield node, patch
    elif isinstance(node, Permuted):
        order = [n for axis in inverse_permutation(node.axes) for n in _span(node, patch, axis)]
        factors = tuple(patch.factors[n] for n in order)
        yield from _trace(node.operand, Patch(permuted(patch.values, order), factors), ops)
    elif isinstance(node, Reshaped):
        for part in refine(patch, steps_of(node.operand.shape)):
            yield from _trace(node.operand, part, ops)
    elif isinstance(node, Valued):
        values = patch.values
        for op in undone(node.op, node.operand.dtype, values.dtype):
            values = Valued.of(values, op)
        yield from _trace(node.operand, patch._replace(values=values), (node.op, *ops))
    elif isinstance(node, Computed) and isinstance(node.decoder, Compared):
        for operand in node.operands:
            yield from _trace(operand, patch, ops)
    elif isinstance(node, Computed):
        raise MappingError("a value that is decoded or computed by a function does not invert")
    elif isinstance(node, Stacked | Concatenated | Sliced | Taken | Repeated):
        patches, number = _single(node, patch, node.axis)
        for part in patches:
            for operand, below in _along_axis(node, part, number):
                if below is not None:
                    yield from _trace(operand, below, ops)


def _along_axis(
    node: _OnAxis, patch: Patch, number: int
) -> Iterator[tuple[BoundExpr, Patch | None]]:
    """Yields operands with a patch of the node as a patch of theirs; they differ along one axis."""
    if isinstance(node, Stacked | Concatenated):
        count = len(node.operands)
        starts = node.starts if isinstance(node, Concatenated) else range(count + 1)
        for operand, ends in zip(node.operands, itertools.pairwise(starts), strict=True):
            yield operand, patch.restrict(number, *ends)
        return
    operand, n = node.operand, node.operand.shape[node.axis]
    if isinstance(node, Repeated):
        for rows in divide(patch, number, node.count):
            first = rows.restrict(number + 1, 0, 1)
            if first is not None:
                yield operand, first.put(number, first.factors[number], first.values)
    elif isinstance(node, Sliced):
        yield operand, _move(patch, number, n, node.start, node.step)
    else:
        for run, (start, stop) in zip(node.runs, itertools.pairwise(node.starts), strict=True):
            if stop - start > 1 and not run.step:
                raise MappingError(
                    "take(...) with an index twice does not invert; repeat(...) does"
                )
            part = patch.restrict(number, start, stop, keep=True)
            if part is not None:
                yield operand, _move(part, number, n, run.first, run.step)


def _span(node: BoundExpr, patch: Patch, axis: int) -> range:
    size = math.prod(node.shape[axis + 1 :])
    steps = patch.boundaries
    start = sum(step >= size * node.shape[axis] for step in steps)
    return range(start, sum(step >= size for step in steps))


def _single(node: BoundExpr, patch: Patch, axis: int) -> tuple[list[Patch], int]:
    """Merge the factors of an axis into one, also of extent 1; return patches, and its number."""
    span = _span(node, patch, axis)
    first = span.start
    patches = [patch]
    for number in reversed(span[:-1]):
        patches = [both for part in patches for both in joined(part, number)]
    if not span:
        shape = patch.values.shape
        values = reshaped(patch.values, (*shape[:first], 1, *shape[first:]))
        patches = [patch.replaced(first, values, Factor(1, 0, 1, 1), count=0)]
    return patches, first


def _move(patch: Patch, number: int, extent: int, start: int, step: int) -> Patch:
    """Map index `i` of a factor to index `start + i * step` of one of another extent."""
    _, first, distance, count = patch.factors[number]
    values = patch.values
    start, step = start + first * step, step * distance
    if step < 0 and count > 1:
        start, step = start + (count - 1) * step, -step
        values = sliced(values, number, count - 1, count, -1)
    return patch.put(number, Factor(extent, start, step if count > 1 else 1, count), values)
