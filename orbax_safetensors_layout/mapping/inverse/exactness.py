"""Checks that saving restores the loaded values, by doing and undoing operations on all of them.

It runs before a byte is written, for the dtype of the files and not for the values of one model: a
mapping that saves one checkpoint saves all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import NARROW_INTEGERS

from ..affine.bound import BoundExpr, Valued
from ..casting import is_whole, to_whole, whole_range
from ..expr.values import Cast, ValueOp


def check_exact(stored: np.dtype[Any], ops: tuple[ValueOp, ...], values: BoundExpr) -> None:
    """Refuses a tensor of dtype `stored` of which some value cannot be restored.

    `ops` are the operations of loading; `values` are elements of the tensor as an expression over a
    leaf, whose dtype may not be that of the last operation.
    """
    if not ops or any(op.lossy_inverse for op in ops):
        return
    leaf, *inverse = reversed([*values.nodes()])
    back = tuple(node.op for node in inverse if isinstance(node, Valued))
    loaded = stored
    for op in ops:
        loaded = op.result(loaded)
    if loaded != leaf.dtype:
        ops = (*ops, Cast(leaf.dtype))
        ops[-1].result(loaded)
    Cast(stored).result(values.dtype)  # a leaf may be complex where the file is not
    loss = _first_loss(stored, ops, back)
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
    return np.arange(1 << limits(dtype).bits, dtype=f"u{dtype.itemsize}").view(dtype)


def _integers(dtype: np.dtype[Any]) -> np.ndarray:
    """Return all integers of a dtype of up to 16 bits; of wider ones those near powers of two."""
    low, high = whole_range(dtype)
    if high - low < 1 << 16:
        values = [*range(low, high + 1)]
    else:
        powers = [sign << n for n in range(high.bit_length() + 1) for sign in (1, -1)]
        values = [n for p in powers for n in (p - 1, p, p + 1) if low <= n <= high]
    return np.array(values, np.int8 if dtype.name in NARROW_INTEGERS else dtype).astype(dtype)
