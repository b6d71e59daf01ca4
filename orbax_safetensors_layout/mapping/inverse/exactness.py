"""Checks that saving restores the loaded values, by doing and undoing operations on all of them.

It runs before a byte is written, for the dtype of the files and not for the values of one model: a
mapping that saves one checkpoint saves all of them.

1. `check_exact` walks a leaf's expression down and collects value operations and their inverses;
2. `first_loss` applies both to every value of the tensor's dtype (of wide ones to a selection);
3. a value that does not come back is an error, unless an operation has `lossy_inverse`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import NARROW_INTEGERS

from ..affine.bound import BoundExpr, Valued, WholeTensor
from ..casting import is_whole, to_whole, whole_range
from ..expr.values import Cast, ValueOp, undone


def check_exact(expression: BoundExpr, leaf: np.dtype[Any]) -> None:
    """Refuses a leaf from which some value of its tensors cannot be restored.

    Args:
        expression: The leaf as an expression over tensors.
        leaf: The leaf's dtype, which may not be the expression's.
    """
    last = () if leaf == expression.dtype else (Cast(leaf),)
    _check(expression, (), (), leaf, last)


def _check(
    node: BoundExpr,
    ops: tuple[ValueOp, ...],
    back: tuple[ValueOp, ...],
    dtype: np.dtype[Any],
    last: tuple[Cast, ...],
) -> None:
    """Checks a node and its operands.

    Args:
        node: The node.
        ops: The operations of loading on its values.
        back: Their inverses.
        dtype: Dtype of the result of `back`.
        last: The cast to the leaf's dtype.
    """
    if isinstance(node, Valued):
        more = undone(node.op, node.operand.dtype, dtype)
        for op in more:
            dtype = op.result(dtype)
        _check(node.operand, (node.op, *ops), (*back, *more), dtype, last)
    elif isinstance(node, WholeTensor) and ops and not any(op.lossy_inverse for op in ops):
        done, loaded = (*ops, *last), node.dtype
        for op in done:
            loaded = op.result(loaded)
        Cast(node.dtype).result(dtype)  # a leaf may be complex where the file is not
        loss = first_loss(node.dtype, done, back)
        if loss is not None:
            named = f"{'.'.join(map(str, done))} of {node.dtype.name}"
            raise MappingError(
                f"{named} does not keep every value: {loss.stored} is loaded as {loss.loaded},"
                f" and would be saved as {loss.saved}",
                hint="Use a dtype that holds every result, as .cast('float32') before arithmetic;"
                " or accept the rounding with lossy_inverse=True.",
            )
    for operand in () if isinstance(node, Valued) else node.below():
        _check(operand, ops, back, dtype, last)


class Loss(NamedTuple):
    """A value that loading and saving change: in the file, as loaded, and as saved."""

    stored: Any
    loaded: Any
    saved: Any


@functools.lru_cache(4096)
def first_loss(
    stored: np.dtype[Any], ops: tuple[ValueOp, ...], back: tuple[ValueOp, ...]
) -> Loss | None:
    """Return a value of a dtype that saving does not restore, if there is one.

    Tries every value of dtypes of up to 16 bits, and of wider ones those at which rounding,
    overflow and underflow begin. A NaN may become another NaN. Values that are saved in the dtype
    of a leaf, since no operation casts them back, must be the same numbers.

    Args:
        stored: The dtype in the file.
        ops: The operations of loading; values that they refuse do not count.
        back: The operations of saving.
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
    return Loss(values[lost[0]], loaded[lost[0]], saved[lost[0]]) if lost.size else None


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where arrays of one dtype have the same bits, or NaN."""
    bits = f"V{a.itemsize}"
    same: np.ndarray = (a.view(bits) == b.view(bits)) | ((a != a) & (b != b))
    return same


def _applied(values: np.ndarray, ops: tuple[ValueOp, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of operations, and for each value whether all of them accept it."""
    kept = np.ones(values.shape, np.bool_)
    for op in ops:
        if isinstance(op, Cast) and is_whole(op.dtype):
            values, held = to_whole(values, op.dtype)
            kept &= held
        else:
            values = op.apply(values)
    return values, kept


@functools.lru_cache(64)
def _probes(dtype: np.dtype[Any]) -> np.ndarray:
    """Return every value of a dtype, or of a wide one those that arithmetic most likely changes."""
    if is_whole(dtype):
        return _integers(dtype)
    if dtype.kind == "c":
        part = _probes(np.empty(0, dtype).real.dtype)
        return (part + 1j * part[::-1]).astype(dtype)
    if dtype.itemsize > 2:
        bits, mantissa = 8 * dtype.itemsize, np.finfo(dtype).nmant
        tops = np.arange(1 << (bits - mantissa), dtype=f"u{dtype.itemsize}") << mantissa
        tails = [0, *(1 << n for n in range(mantissa)), (1 << mantissa) - 1]
        return (tops[:, None] | np.array(tails, tops.dtype)).reshape(-1).view(dtype)
    limits: Any = ml_dtypes.finfo  # untyped
    bits = limits(dtype).bits
    return np.arange(1 << bits, dtype=f"u{dtype.itemsize}").view(dtype)


def _integers(dtype: np.dtype[Any]) -> np.ndarray:
    """Return all integers of a dtype of up to 16 bits; of wider ones those near powers of two."""
    low, high = whole_range(dtype)
    if high - low < 1 << 16:
        values = [*range(low, high + 1)]
    else:
        powers = [sign << n for n in range(high.bit_length() + 1) for sign in (1, -1)]
        values = [n for p in powers for n in (p - 1, p, p + 1) if low <= n <= high]
    return np.array(values, np.int8 if dtype.name in NARROW_INTEGERS else dtype).astype(dtype)
