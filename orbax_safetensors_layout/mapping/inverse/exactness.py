"""Whether saving gives back what loading took: operations on values are tried, and undone.

Checked before a byte is written, for the dtype of the files and not for the values of one model: a
mapping that saves one checkpoint saves all of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError

from ..affine.bound import BoundExpr, Valued, WholeTensor
from ..expr.values import Cast, ValueOp, undone
from ..integers import NARROW_INTEGERS, is_whole, whole_or_lost, whole_range


def check_exact(expression: BoundExpr, leaf: np.dtype[Any]) -> None:
    """Refuses a leaf that does not give back every value of its tensors.

    Args:
        expression: What loading makes the leaf of.
        leaf: The leaf's dtype, which may not be the expression's.

    Raises:
        MappingError: A value would be lost, and no operation has `lossy_inverse`.
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
    """Checks what is below a node.

    Args:
        node: The node.
        ops: What loading does with its values.
        back: What undoes that.
        dtype: Dtype of what is undone so far.
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
    """A value that does not come back from loading and saving.

    Attributes:
        stored: The value in the file.
        loaded: What loading makes of it.
        saved: What saving makes of that.
    """

    stored: Any
    loaded: Any
    saved: Any


@functools.lru_cache(4096)
def first_loss(
    stored: np.dtype[Any], ops: tuple[ValueOp, ...], back: tuple[ValueOp, ...]
) -> Loss | None:
    """A value of a dtype that saving does not give back, if there is one.

    Tries every value of dtypes of up to 16 bits, and of wider ones those at which rounding,
    overflow and underflow begin. A NaN may come back as another NaN. What is saved in the dtype of
    a leaf, since nothing casts it back, has to be the same numbers.

    Args:
        stored: The dtype in the file.
        ops: What loading does; a value that it refuses is none that saving meets.
        back: What saving does with the result.
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


def _same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where arrays of one dtype have the same bits, or NaN."""
    bits = f"V{one.itemsize}"
    same: np.ndarray = (one.view(bits) == other.view(bits)) | ((one != one) & (other != other))
    return same


def _applied(values: np.ndarray, ops: tuple[ValueOp, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The results of operations, and for each value whether none of them refuses it."""
    kept = np.ones(values.shape, np.bool_)
    for op in ops:
        if isinstance(op, Cast) and is_whole(op.dtype):
            values, held = whole_or_lost(values, op.dtype)
            kept &= held
        else:
            values = op.apply(values)
    return values, kept


@functools.lru_cache(64)
def _probes(dtype: np.dtype[Any]) -> np.ndarray:
    """Every value of a dtype, or of a wide one those that arithmetic is most likely to change."""
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
    """All integers of a dtype of up to 16 bits; of wider ones those next to powers of two."""
    low, high = (0, 1) if dtype.kind == "b" else whole_range(dtype)
    if high - low < 1 << 16:
        found = [*range(low, high + 1)]
    else:
        powers = [sign << n for n in range(high.bit_length() + 1) for sign in (1, -1)]
        found = [n for p in powers for n in (p - 1, p, p + 1) if low <= n <= high]
    whole = np.array(found, np.int8) if dtype.name in NARROW_INTEGERS else np.array(found, dtype)
    return whole.astype(dtype)
