"""Casts and arithmetic of traced arrays, with the values that numpy gives.

Floats are moved as the integers of their bits: XLA may change NaN where it moves floats. Programs
are compiled without excess precision, so that each operation rounds as numpy's does.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from orbax_safetensors_layout.format import NARROW_INTEGERS

from ..casting import cast_problem, held, is_integer, is_whole, rounded, whole_range
from ..expr.values import Add, Scale

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""With excess precision 94 % of the values of a chain of casts differ from numpy's."""

_BF16 = np.dtype(ml_dtypes.bfloat16)
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}  # by bytes of an element


def has_bits(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype's values are moved as integers."""
    return dtype.kind == "f" or dtype == _BF16 or dtype.name.startswith("float8")


def to_bits(values: jax.Array) -> jax.Array:
    """Return values as they are moved: the bits of floats."""
    dtype = np.dtype(values.dtype)
    return lax.bitcast_convert_type(values, _BITS[dtype.itemsize]) if has_bits(dtype) else values


def compared_bits(values: jax.Array) -> jax.Array:
    """Return values, or `to_bits` of them, as what is equal where all their bits are.

    Complex numbers have a last axis more.
    """
    dtype = np.dtype(values.dtype)
    if dtype.kind == "c":
        return to_bits(jnp.stack([values.real, values.imag], -1))
    if dtype.name.startswith("float4"):
        return lax.bitcast_convert_type(values, jnp.uint4)
    return values


def of_bits(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return the values of `to_bits`."""
    return lax.bitcast_convert_type(bits, dtype) if has_bits(dtype) else bits


@functools.cache
def _casts_exactly(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether JAX casts to a float of 8 bits as numpy does, by trying: old releases round twice."""
    with jax.ensure_compile_time_eval():
        compute = jax.jit(lambda x: x.astype(dtype), compiler_options=COMPILER_OPTIONS)
        values = _samples(source)
        result, expected = np.asarray(compute(jnp.asarray(values))), rounded(values, dtype)
    are_nan = np.isnan(result.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    return bool((are_nan | (result.view(np.uint8) == expected.view(np.uint8))).all())


def _samples(dtype: np.dtype[Any]) -> np.ndarray:
    """Return all values of a dtype of up to 16 bits; of a wider one such as are hard to round."""
    if dtype.kind == "b" or dtype.name in NARROW_INTEGERS:
        low, high = whole_range(dtype)
        return np.arange(low, high + 1, dtype=np.int8).astype(dtype)
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    if is_integer(dtype):
        return np.arange(1 << 15).astype(dtype)
    beside_ties = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | beside_ties
    return bits.reshape(-1).view(np.float32).astype(dtype)


def cast_refusal(source: np.dtype[Any], dtype: np.dtype[Any]) -> str | None:
    """Return why a cast is not computed on live arrays; None if it is."""
    if not is_whole(dtype) and dtype.itemsize == 1 and not _casts_exactly(source, dtype):
        return f"has no exact cast to {dtype.name} with jax {jax.__version__}: install a newer one"
    if any(side.name.startswith("float6") for side in (source, dtype)):
        return f"has no cast between {source.name} and {dtype.name}"
    return cast_problem(source, dtype)


def arithmetic_refusal(dtype: np.dtype[Any]) -> str | None:
    """Return why arithmetic in a dtype is not computed on live arrays; None if it is."""
    is_plain = is_integer(dtype) or dtype.kind in "fc" or dtype == _BF16
    return None if is_plain else f"has no arithmetic in {dtype.name}: cast to a wider dtype first"


def cast(values: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array | None]:
    """Return values in another dtype, and which of them it holds, where it must hold all."""
    return _to_whole(values, dtype) if is_whole(dtype) else (values.astype(dtype), None)


def _to_whole(values: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array | None]:
    low, high = whole_range(dtype)
    source = np.dtype(values.dtype)
    kept: jax.Array | None = None
    if not is_whole(source):
        if source.itemsize < 4:
            values = values.astype(jnp.float32)
        least, past = (np.asarray(bound, values.dtype) for bound in (low, high + 1))
        # `high + 1` is a power of two, and so exact in floats.
        kept = (jnp.trunc(values) == values) & (values >= least) & (values < past)
    elif source.kind != "b":
        kept = _in_range(values, low, high)
        values = _in_bytes(values)
    if dtype.kind == "b":
        return values != 0, kept
    if dtype.name in NARROW_INTEGERS:
        values = values.astype(jnp.int8)
    return values.astype(dtype), kept


def _in_bytes(values: jax.Array) -> jax.Array:
    """Return integers narrower than a byte as bytes; others as they are."""
    narrow = np.dtype(values.dtype).name in NARROW_INTEGERS
    return values.astype(jnp.int8) if narrow else values


def _in_range(values: jax.Array, low: int, high: int) -> jax.Array | None:
    """Return which integers are in a range; None where all of their dtype are."""
    least, most = whole_range(np.dtype(values.dtype))
    values = _in_bytes(values)
    bounds = [values >= low] if low > least else []
    bounds += [values <= high] if high < most else []
    return functools.reduce(jnp.logical_and, bounds) if bounds else None


def arithmetic(op: Scale | Add, values: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the results, and which of them fit, where all have to: in integers."""
    dtype = np.dtype(values.dtype)
    constant = held(np.asarray(op.constant), dtype)
    assert constant is not None  # else binding refuses
    kept = None
    if is_integer(dtype):
        kept = _in_range(values, *op.operands(int(constant), *whole_range(dtype)))
        constant = np.asarray(int(constant), np.int8 if dtype.name in NARROW_INTEGERS else dtype)
        values = _in_bytes(values)
    result = values * constant if isinstance(op, Scale) else values + constant
    if not is_integer(dtype):
        # The choice keeps a product and a sum from being one operation, which rounds once.
        result = jnp.where(jnp.isnan(values), values, result)
    return result.astype(dtype), kept
