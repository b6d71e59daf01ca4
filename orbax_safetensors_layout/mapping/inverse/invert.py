"""Inverts bound expressions: each tensor of a checkpoint as an expression over the model's leaves.

`_trace` walks each leaf's expression down to the patches of tensors that the leaf holds; `assemble`
joins those of one tensor. Where leaves hold elements more than once, as `repeat` and ties make
them, `assemble` joins the copies as well, and the tensor compares both when it is read.

Saving must restore what was loaded. That is checked before a byte is written, for the dtype of the
files and not for the values of one model: a mapping that saves one checkpoint saves all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import NARROW_INTEGERS

from ..affine.binding import Tie
from ..affine.bound import BoundExpr, Constant, Valued, WholeTensor
from ..affine.index_nodes import (
    Broadcast,
    Concatenated,
    Decoded,
    Permuted,
    Reshaped,
    Sliced,
    Stacked,
    Taken,
    inverse_permutation,
    permuted,
    reshaped,
    sliced,
)
from ..casting import is_whole, whole_range
from ..expr.choices import Compared, compared
from ..expr.values import Cast, ValueOp, undone
from ..names import Shapes, TensorSpecs
from ..problems import Problem, Problems, within
from .copies import REPEATED, Copies, copied_along, copy_factors, first_copies, tie_problem
from .inverse_patches import (
    Factor,
    Patch,
    assemble,
    held_elements,
    joined,
    leaves_of,
    overlap,
    split_at,
    steps_of,
    whole_tensor,
)

_OnAxis: TypeAlias = Stacked | Concatenated | Sliced | Taken


@dataclasses.dataclass(frozen=True, slots=True)
class _Holders:
    """The leaves that hold elements of a tensor."""

    tensor: WholeTensor
    patches: dict[str, list[Patch]] = dataclasses.field(default_factory=dict)  # by saved leaf
    copies: list[Copies] = dataclasses.field(default_factory=list)

    def add(self, leaf: str, saved: str, patches: list[Patch]) -> None:
        """Adds the patches of a leaf, which is tied to the saved one if it is not that."""
        size = math.prod(self.tensor.shape)
        if leaf != saved:
            self.copies.append(Copies(saved, patches, tie_problem(leaf, saved)))
            return
        self.patches[leaf] = first_copies(patches, size)
        if any(copy_factors(patch, size) for patch in patches):
            self.copies.append(Copies(saved, patches, REPEATED))


def invert(
    expressions: Mapping[str, BoundExpr],
    leaves: Shapes,
    ties: Mapping[str, Tie] = MappingProxyType({}),
) -> dict[str, BoundExpr]:
    """Return each tensor as an expression over leaves, of those of each leaf over tensors."""
    specs = TensorSpecs.of(leaves)
    tensors: dict[str, _Holders] = {}
    problems: list[Problem] = []
    refused: set[str] = set()
    for leaf, expression in expressions.items():
        for node in expression.nodes():
            if isinstance(node, WholeTensor):
                tensors.setdefault(node.name, _Holders(node))
        traced: dict[str, list[Patch]] = {}
        saved, failure = leaf, f"leaf {leaf!r} cannot be saved"
        try:
            saved = saved_leaf(leaf, ties)
            if saved != leaf:
                failure = (
                    f"leaf {leaf!r} is tied to {saved!r} and cannot be compared with it, which"
                    " lossy_inverse=True of its rule accepts"
                )
            if 0 not in specs[leaf].shape and _is_traced(leaf, saved, expressions, ties):
                for tensor, patch in _trace(expression, Patch.whole(whole_tensor(leaf, specs))):
                    traced.setdefault(tensor.name, []).append(patch)
        except MappingError as error:
            refused.update(expression.sources())
            problems += within(error, failure).problems
            continue
        for name, patches in traced.items():
            tensors[name].add(leaf, saved, patches)
    inverted: dict[str, BoundExpr] = {}
    for name, holders in tensors.items():
        if name in refused:
            continue
        try:
            inverted[name] = _inverse(holders)
        except MappingError as error:
            problems += within(error, f"tensor {name!r} cannot be saved").problems
    if problems:
        raise Problems(problems)
    return inverted


def saved_leaf(leaf: str, ties: Mapping[str, Tie]) -> str:
    """Return the leaf that is saved for a leaf: itself, unless it is tied."""
    chain = [leaf]
    while chain[-1] in ties:
        chain.append(ties[chain[-1]].other)
        if chain[-1] in chain[:-1]:
            raise MappingError(
                f"it is tied to itself: {' to '.join(map(repr, chain))}",
                hint="Give the leaf that is saved a rule without tied_to.",
            )
    return chain[-1]


def _is_traced(
    leaf: str, saved: str, expressions: Mapping[str, BoundExpr], ties: Mapping[str, Tie]
) -> bool:
    """Whether a leaf is saved, or compared: a tied one, unless its rule accepts other bits."""
    if leaf == saved or not ties[leaf].is_compared:
        return leaf == saved
    if expressions[leaf] != expressions.get(saved):
        for node in expressions[leaf].nodes():
            if isinstance(node, Valued) and node.op.lossy_inverse:
                raise MappingError(f"its values are rounded, by {node.op}")
    return True


def _inverse(holders: _Holders) -> BoundExpr:
    """Return a tensor from its patches, which must be of one dtype and cover it exactly."""
    tensor = holders.tensor
    if 0 in tensor.shape:
        return Constant(tensor.shape, tensor.dtype, tensor.dtype.type(0))
    patches = [patch for of_leaf in holders.patches.values() for patch in of_leaf]
    dtypes = {patch.values.dtype.name for patch in patches}
    if len(dtypes) > 1:
        raise MappingError(
            f"its parts in {leaves_of(patches)} are of {' and '.join(sorted(dtypes))}"
        )
    size = math.prod(tensor.shape)
    held = held_elements(patches)
    if held < size:
        present = f"only {held} are in {leaves_of(patches)}" if patches else "none is in any leaf"
        raise MappingError(f"of its {size} elements {present}")
    if held > size:
        raise overlap(patches)
    first = assemble(tensor.shape, patches)
    copies = [
        (expr, of_leaf.problem)
        for of_leaf in holders.copies
        for expr in of_leaf.tensors(first, holders.patches)
    ]
    return compared(first, copies) if copies else first


def _trace(
    node: BoundExpr, patch: Patch, ops: tuple[ValueOp, ...] = ()
) -> Iterator[tuple[WholeTensor, Patch]]:
    """Yields the patches of tensors that hold a patch of an expression, which `ops` have loaded.

    Those of elements that the leaf holds more than once have factors of copies before others.
    """
    if isinstance(node, WholeTensor):
        _check_exact(node.dtype, ops, patch.values)
        yield node, patch
    elif isinstance(node, Permuted):
        order = [*range(copy_factors(patch, math.prod(node.shape)))]
        order += [n for axis in inverse_permutation(node.axes) for n in _span(node, patch, axis)]
        factors = tuple(patch.factors[n] for n in order)
        yield from _trace(node.operand, Patch(permuted(patch.values, order), factors), ops)
    elif isinstance(node, Reshaped):
        for part in split_at(patch, steps_of(node.operand.shape)):
            yield from _trace(node.operand, part, ops)
    elif isinstance(node, Valued):
        values = patch.values
        for op in undone(node.op, node.operand.dtype, values.dtype):
            values = Valued.of(values, op)
        yield from _trace(node.operand, patch._replace(values=values), (node.op, *ops))
    elif isinstance(node, Decoded) and isinstance(node.decoder, Compared):
        for operand in node.operands:
            yield from _trace(operand, patch, ops)
    elif isinstance(node, Decoded):
        raise MappingError("a value that is decoded or computed by a function does not invert")
    elif isinstance(node, Broadcast):
        patches, number = _single(node, patch, node.axis)
        for part in patches:
            once = copied_along(part, number) if node.is_compared else part.restrict(number, 0, 1)
            if once is not None:
                yield from _trace(node.operand, once, ops)
    elif isinstance(node, Stacked | Concatenated | Sliced | Taken):
        patches, number = _single(node, patch, node.axis)
        for part in patches:
            for operand, patch_below in _along_axis(node, part, number):
                if patch_below is not None:
                    yield from _trace(operand, patch_below, ops)


def _along_axis(
    node: _OnAxis, patch: Patch, number: int
) -> Iterator[tuple[BoundExpr, Patch | None]]:
    """Yields operands with a patch of the node as a patch of theirs; they differ along one axis."""
    if isinstance(node, Stacked | Concatenated):
        starts = node.starts if isinstance(node, Concatenated) else range(len(node.operands) + 1)
        for operand, ends in zip(node.operands, itertools.pairwise(starts), strict=True):
            yield operand, patch.restrict(number, *ends)
    elif isinstance(node, Sliced):
        extent = node.operand.shape[node.axis]
        yield node.operand, _move(patch, number, extent, node.start, node.step)
    else:
        extent = node.operand.shape[node.axis]
        for run, (start, stop) in zip(node.runs, itertools.pairwise(node.starts), strict=True):
            if stop - start > 1 and not run.step:
                raise MappingError(
                    "take(...) with an index twice does not invert; repeat(...) does"
                )
            part = patch.restrict(number, start, stop, keep=True)
            if part is not None:
                yield node.operand, _move(part, number, extent, run.first, run.step)


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


def _check_exact(stored: np.dtype[Any], ops: tuple[ValueOp, ...], values: BoundExpr) -> None:
    """Refuses a tensor of which some value, loaded by `ops`, cannot be restored by `values`.

    An operation that accepts its loss does so for itself: those before and after it are exact.
    """
    (leaf,) = [node for node in values.nodes() if isinstance(node, WholeTensor)]
    for is_lossy, run in itertools.groupby(ops, lambda op: op.lossy_inverse):
        of_run = tuple(run)
        loaded = functools.reduce(lambda dtype, op: op.result(dtype), of_run, stored)
        if not is_lossy:
            is_last = of_run[-1] is ops[-1]
            _check_run(stored, of_run, leaf.dtype if is_last else loaded)
        stored = loaded


def _check_run(stored: np.dtype[Any], ops: tuple[ValueOp, ...], leaf: np.dtype[Any]) -> None:
    """Refuses operations that lose values of a dtype, in leaves of another."""
    dtypes = [*itertools.accumulate(ops, lambda dtype, op: op.result(dtype), initial=stored)]
    back: list[ValueOp] = []
    saved = leaf
    for op, operand in zip(reversed(ops), reversed(dtypes[:-1]), strict=True):
        for inverse in undone(op, operand, saved):
            back.append(inverse)
            saved = inverse.result(saved)
    if dtypes[-1] != leaf:  # the caller's leaf may have another
        ops = (*ops, Cast(leaf))
        ops[-1].result(dtypes[-1])
    Cast(stored).result(saved)  # a leaf may be complex where the file is not
    loss = _first_loss(stored, ops, tuple(back))
    if loss is not None:
        value, loaded_as, saved_as = loss
        raise MappingError(
            f"{'.'.join(map(str, ops))} of {stored.name} does not keep every value: {value}"
            f" is loaded as {loaded_as}, and would be saved as {saved_as}",
            hint="Use a dtype that holds every result, as .cast('float32') before arithmetic;"
            " or accept the rounding with lossy_inverse=True.",
        )


@functools.lru_cache(4096)
def _first_loss(
    stored: np.dtype[Any], ops: tuple[ValueOp, ...], back: tuple[ValueOp, ...]
) -> tuple[Any, Any, Any] | None:
    """Return a value that loading and saving change: as in the file, as loaded, and as saved.

    Tries every value of dtypes of up to 16 bits, and of wider ones those at which rounding,
    overflow and underflow begin. A NaN may become another NaN. Values that are saved in the dtype
    of a leaf, since no operation casts them back, must be the same numbers. Values that loading
    refuses do not count.
    """
    with np.errstate(all="ignore"):
        loaded, kept = _applied(_probes(stored), ops)
        values, loaded = _probes(stored)[kept], loaded[kept]
        saved, kept = _applied(loaded, back)
        again, held = _applied(saved, (Cast(stored),))
        kept &= held & _same(values, again)
        if saved.dtype != stored:
            expected, held = _applied(values, (Cast(saved.dtype),))
            kept &= held & _same(expected, saved)
        lost = np.flatnonzero(~kept)
    if not lost.size:
        return None
    first = lost[0]
    return values[first], loaded[first], saved[first]


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = f"V{a.itemsize}"
    same: np.ndarray = (a.view(bits) == b.view(bits)) | ((a != a) & (b != b))
    return same


def _applied(values: np.ndarray, ops: tuple[ValueOp, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of operations, and for each value whether all of them accept it."""
    kept = np.ones(values.shape, np.bool_)
    for op in ops:
        values, fits = op.checked(values)
        kept &= fits
    return values, kept


@functools.lru_cache(64)
def _probes(dtype: np.dtype[Any]) -> np.ndarray:
    """Return every value of a dtype, or of a wide one those that arithmetic most likely changes."""
    if is_whole(dtype):
        low, high = whole_range(dtype)
        if high - low < 1 << 16:
            values = [*range(low, high + 1)]
        else:  # those near powers of two
            powers = [sign << n for n in range(high.bit_length() + 1) for sign in (1, -1)]
            values = [n for p in powers for n in (p - 1, p, p + 1) if low <= n <= high]
        return np.array(values, np.int8 if dtype.name in NARROW_INTEGERS else dtype).astype(dtype)
    if dtype.kind == "c":
        part = _probes(np.empty(0, dtype).real.dtype)
        return (part + 1j * part[::-1]).astype(dtype)
    if dtype.itemsize > 2:
        bits, mantissa = 8 * dtype.itemsize, np.finfo(dtype).nmant
        tops = np.arange(1 << (bits - mantissa), dtype=f"u{dtype.itemsize}") << mantissa
        tails = [0, *(1 << n for n in range(mantissa)), (1 << mantissa) - 1]
        return (tops[:, None] | np.array(tails, tops.dtype)).reshape(-1).view(dtype)
    limits: Any = ml_dtypes.finfo  # untyped
    return np.arange(1 << limits(dtype).bits, dtype=f"u{dtype.itemsize}").view(dtype)
