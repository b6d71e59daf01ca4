"""Casts and arithmetic of traced arrays, with the bits that numpy gives.

XLA may take subnormal numbers for zero, keeps more precision between operations than their dtype
has, and makes NaN bits of its own. So floats are cast as integers: the bits of each are widened to
those of a float32, and these are rounded to fewer.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from orbax_safetensors_layout.format import NARROW_INTEGERS

from ..casting import cast_problem, held, is_integer, is_whole, rounded, whole_range
from ..expr.values import Add, Scale

_F32, _F16, _BF16 = (np.dtype(name) for name in (np.float32, np.float16, ml_dtypes.bfloat16))
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}  # by bytes of an element
_BYTE_FLOATS = frozenset(
    {
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    }
)
_SIGN, _MAGNITUDE, _INFINITE, _NAN, _QUIET, _UNIT = (
    np.uint32(n) for n in (1 << 31, (1 << 31) - 1, 0x7F800000, 0x7FC00000, 1 << 22, 1)
)
_LEAST_NORMAL = np.uint32(1 << 23)


def has_bits(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype's values are moved as integers: XLA may change NaN where it moves floats."""
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


def cast_refusal(source: np.dtype[Any], dtype: np.dtype[Any]) -> str | None:
    """Return why a cast is not computed on live arrays; None if it is."""
    for side in (source, dtype):
        if is_whole(side) or side in (_F32, _F16, _BF16) or side.name in _BYTE_FLOATS:
            continue
        if side.name == "float8_e8m0fnu" and side is source:
            continue
        return f"has no cast between {source.name} and {dtype.name}"
    return cast_problem(source, dtype)


def arithmetic_refusal(dtype: np.dtype[Any]) -> str | None:
    """Return why arithmetic in a dtype is not computed on live arrays; None if it is."""
    if is_integer(dtype) or cast_refusal(dtype, _F32) is None:
        return None
    return f"has no arithmetic in {dtype.name}"


def cast(values: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array | None]:
    """Return values in another dtype, and which of them it holds, where it must hold all."""
    source = np.dtype(values.dtype)
    if is_whole(dtype):
        return _to_whole(values, dtype)
    if is_whole(source):
        values = _in_bytes(values).astype(_F32)
        source = _F32
    bits = widened(values)
    if source != _F32 and dtype == _F16:
        bits = jnp.where((bits & _MAGNITUDE) > _INFINITE, bits & _SIGN | _NAN, bits)
    return narrowed(bits, dtype), None


def _to_whole(values: jax.Array, dtype: np.dtype[Any]) -> tuple[jax.Array, jax.Array | None]:
    low, high = whole_range(dtype)
    source = np.dtype(values.dtype)
    kept: jax.Array | None = None
    if not is_whole(source):
        bits = widened(values)
        values = lax.bitcast_convert_type(bits, _F32)
        magnitude = bits & _MAGNITUDE
        kept = (magnitude == 0) | ((magnitude >= _LEAST_NORMAL) & (magnitude < _INFINITE))
        kept &= (jnp.trunc(values) == values) & (values >= np.float32(low))
        kept &= values < np.float32(high + 1)  # a power of two, and so exact
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


def widened(values: jax.Array) -> jax.Array:
    """Return the bits of each float as a float32."""
    dtype = np.dtype(values.dtype)
    bits = to_bits(values)
    if dtype == _F32:
        return bits
    if dtype.itemsize == 1:
        every = np.arange(256, dtype=np.uint8).view(dtype)
        table = rounded(every, _F32).view(np.uint32)
        return jnp.asarray(table).at[bits].get(mode="promise_in_bounds")
    bits = bits.astype(jnp.uint32)
    if dtype == _BF16:
        return bits << np.uint32(16)
    magnitude = bits & np.uint32(0x7FFF)
    rebias = np.uint32(112 << 23)
    normal = (magnitude << np.uint32(13)) + rebias
    least = to_bits(magnitude.astype(jnp.float32) * np.float32(2.0**-24))
    wide = jnp.where(magnitude < np.uint32(0x400), least, normal)
    wide = jnp.where(magnitude >= np.uint32(0x7C00), normal + rebias, wide)
    return wide | (bits & np.uint32(0x8000)) << np.uint32(16)


class _Format(NamedTuple):
    """A float of at most 16 bits."""

    bits: int
    mantissa: int  # bits
    least: int  # exponent of the least normal number
    most: int  # the code of the greatest finite number
    zeros: tuple[int, int]  # codes of either sign
    infinite: tuple[int, int]  # of what is too large
    nan: tuple[int, int]


@functools.lru_cache(32)
def _format(dtype: np.dtype[Any]) -> _Format:
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call, unused-ignore]
    kind = f"u{dtype.itemsize}"
    special = np.array([0.0, np.inf, np.nan], np.float32)
    codes = rounded(np.copysign(special, [[1], [-1]]).astype(np.float32), dtype).view(kind)
    zeros, infinite, nan = ((int(plus), int(minus)) for plus, minus in codes.T)
    most = int(np.array([info.max], dtype).view(kind)[0])
    least = math.frexp(float(info.smallest_normal))[1] - 1
    return _Format(dtype.itemsize * 8, info.nmant, least, most, zeros, infinite, nan)


def narrowed(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Return float32 of these bits, rounded to the nearest of another dtype, of two the even."""
    if dtype == _F32:
        return lax.bitcast_convert_type(bits, jnp.float32)
    known = _format(dtype)
    magnitude, is_negative = bits & _MAGNITUDE, bits >= _SIGN
    code: Any = _shifted(magnitude, np.uint32(23 - known.mantissa))
    code -= np.uint32((known.least + 126) << known.mantissa)
    if known.least > -126:
        exponent = jnp.maximum(magnitude >> np.uint32(23), _UNIT)
        implicit = jnp.where(magnitude < _LEAST_NORMAL, np.uint32(0), _LEAST_NORMAL)
        significand = (magnitude & np.uint32((1 << 23) - 1)) | implicit
        shift = np.uint32(150 - known.mantissa + known.least) - exponent
        shift = jnp.clip(shift, _UNIT, np.uint32(25))
        is_small = magnitude < np.uint32((known.least + 127) << 23)
        # Where it is not small, the shift has no meaning, and what it gives is not taken.
        code = jnp.where(is_small, _shifted(significand, shift), code)

    def signed(codes: tuple[int, int]) -> jax.Array:
        return jnp.where(is_negative, np.uint32(codes[1]), np.uint32(codes[0]))

    sign = jnp.where(is_negative, np.uint32(1 << (known.bits - 1)), np.uint32(0))
    result = jnp.where(code == 0, signed(known.zeros), code | sign)
    result = jnp.where(code > np.uint32(known.most), signed(known.infinite), result)
    nan = signed(known.nan)
    if dtype == _F16:  # numpy keeps the other bits of NaN
        payload = (magnitude >> np.uint32(13)) & np.uint32(0x3FF)
        nan = sign | np.uint32(0x7C00) | jnp.maximum(payload, _UNIT)
    result = jnp.where(magnitude > _INFINITE, nan, result)
    return lax.bitcast_convert_type(result.astype(_BITS[dtype.itemsize]), dtype)


def _shifted(bits: Any, shift: Any) -> Any:
    """Return integers divided by a power of two, rounded to the nearest, of two the even."""
    return (bits + ((_UNIT << (shift - _UNIT)) - _UNIT) + ((bits >> shift) & _UNIT)) >> shift


def _times_power(bits: jax.Array, power: int, is_negative: bool) -> jax.Array:
    """Return the bits of float32 times a power of two, subnormal numbers included."""
    magnitude = bits & _MAGNITUDE
    is_small = magnitude < _LEAST_NORMAL
    normal = jnp.where(is_small, to_bits(magnitude.astype(jnp.float32)), magnitude)
    low = jnp.where(is_small, np.int32(power - 149), np.int32(power))
    exponent = (normal >> np.uint32(23)).astype(jnp.int32) + low
    fraction = normal & np.uint32((1 << 23) - 1)
    shift = jnp.clip(np.int32(1) - exponent, np.int32(1), np.int32(25)).astype(jnp.uint32)
    result = (exponent.astype(jnp.uint32) << np.uint32(23)) | fraction
    result = jnp.where(exponent < 1, _shifted(fraction | _LEAST_NORMAL, shift), result)
    result = jnp.where(exponent > 254, _INFINITE, result)
    result = jnp.where(magnitude == 0, magnitude, result)
    sign = (bits ^ _SIGN if is_negative else bits) & _SIGN
    result = jnp.where(magnitude == _INFINITE, magnitude, result) | sign
    return jnp.where(magnitude > _INFINITE, bits | _QUIET, result)


def multiplied(values: jax.Array, factors: Any) -> tuple[jax.Array, jax.Array]:
    """Return the bits of float32 products, and which of them XLA does not take for zero."""
    first, other = _magnitude(values), _magnitude(factors)
    result = _kept_nan(values, values * factors)
    is_zero = (first == 0) | (other == 0)
    is_normal = (first >= _LEAST_NORMAL) & (other >= _LEAST_NORMAL)
    return result, is_zero | (is_normal & ((result & _MAGNITUDE) >= _LEAST_NORMAL))


def _added(values: jax.Array, constant: np.float32) -> tuple[jax.Array, jax.Array | None]:
    if not constant:  # only -0 changes, to 0
        bits = _kept_nan(values, values)
        return jnp.where(bits == _SIGN, np.signbit(constant) * _SIGN, bits), None
    result = _kept_nan(values, values + constant)
    is_zero = _magnitude(values) == _magnitude(constant)  # exactly, or twice the constant
    return result, is_zero | ((result & _MAGNITUDE) >= _LEAST_NORMAL)


def _magnitude(values: Any) -> jax.Array:
    return lax.bitcast_convert_type(jnp.asarray(values, _F32), jnp.uint32) & _MAGNITUDE


def _kept_nan(values: jax.Array, result: jax.Array) -> jax.Array:
    """Return the bits of a result, with the NaN of the operand.

    The choice also keeps a product and a sum from being computed as one, with one rounding.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    is_nan = (bits & _MAGNITUDE) > _INFINITE
    return jnp.where(is_nan, bits | _QUIET, lax.bitcast_convert_type(result, jnp.uint32))


def arithmetic(op: Scale | Add, values: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Return the results, and which of them are exact where that matters.

    Integers have to fit; floats must not be so near zero that XLA takes them for zero. Powers of
    two scale any of them.
    """
    dtype = np.dtype(values.dtype)
    constant = held(np.asarray(op.constant), dtype)
    assert constant is not None  # else binding refuses
    is_scale = isinstance(op, Scale)
    if is_integer(dtype):
        kept = _in_range(values, *op.operands(int(constant), *whole_range(dtype)))
        constant = np.asarray(int(constant), np.int8 if dtype.name in NARROW_INTEGERS else dtype)
        held_in = _in_bytes(values)
        return (held_in * constant if is_scale else held_in + constant).astype(dtype), kept
    bits, number = widened(values), np.float32(rounded(constant, _F32))
    mantissa, exponent = math.frexp(number)
    if is_scale and abs(mantissa) == 0.5:
        return narrowed(_times_power(bits, exponent - 1, mantissa < 0), dtype), None
    wide = of_bits(bits, _F32)
    bits, normal = multiplied(wide, number) if is_scale else _added(wide, number)
    return narrowed(bits, dtype), normal
