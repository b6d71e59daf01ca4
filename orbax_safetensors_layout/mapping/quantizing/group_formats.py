"""Numbers of a few bits and their scales: how groups of values are rounded to them.

All compute in float32 of the values as they are in the leaves, and divide by the scale as it is
stored, so that a reader multiplies by the number that was divided by. Rules and their sources:

- scales are the group's largest magnitude by the largest number that is stored: 448 for FP8,
  7.5 for int4, which has -8 to 7, and 6 for four-bit floats (`calculate_qparams` of
  compressed-tensors 0.20.0);
- exponents of MXFP4 are rounded up where the largest magnitude would be stored as 7 or more
  (`round_to_power_2` of compressed-tensors 0.20.0);
- scales of NVFP4 are FP8, and themselves scaled by one factor of the weight, so that the largest
  of them is 448 (`generate_gparam` of compressed-tensors 0.20.0).
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from ..casting import rounded
from ..expr.quantized import E2M1

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT32 = np.dtype(np.float32)
_UINT8 = np.dtype(np.uint8)
_MOST_FP8 = 448.0
_MOST_FP4 = 6.0
_MOST_PRODUCT = _MOST_FP8 * _MOST_FP4
_MOST_ROUNDED = 464 * _MOST_FP4  # below, the largest of FP8 is the nearest scale
_LEAST_FP8 = 2.0**-9  # above zero
_TINY = float(np.finfo(np.float32).tiny)
_EXPONENT_BIAS = 127
_MOST_EXPONENT = 252  # 6 times its power of two is a float32


def _codes_of_bfloat16(dtype: Any, most: float) -> np.ndarray:
    """Return the nearest number of a dtype to each of the bfloat16, as a byte."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(all="ignore"):
        codes: np.ndarray = rounded(values.clip(-most, most), np.dtype(dtype)).view(np.uint8)
    return codes


_FLOAT8_OF = _codes_of_bfloat16(FLOAT8, _MOST_FP8)
_FLOAT4_OF = _codes_of_bfloat16(ml_dtypes.float4_e2m1fn, _MOST_FP4) & 15


def _rounded_codes(values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the codes of float32: a fifth of the time of a cast by ml_dtypes.

    Values are rounded to bfloat16 towards the odd one of two neighbours first, which keeps the
    nearest number of a dtype of five bits fewer what it is.
    """
    bits = values.view(np.uint32)
    odd = (bits & 0xFFFF) != 0
    result: np.ndarray = codes.take((bits >> 16).astype(np.uint16) | odd)
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class GroupFormat(abc.ABC):
    """A format of groups of values; arrays of groups and of values are float32 unless stored."""

    block: tuple[int, int]  # rows and columns of a group; 0 for all there are
    scale_dtype: np.dtype[Any] = _FLOAT32  # as stored

    dtype: ClassVar[np.dtype[Any]]  # of the stored elements
    per_element: ClassVar[int] = 1  # values in a stored element
    has_factor: ClassVar[bool] = False  # whether there is one number for all scales
    is_whole: ClassVar[bool] = True  # whether groups at the edges are as large as others

    def factor(self, largest: np.float32) -> np.float32:
        """Return what scales are multiplied by before they are stored."""
        return np.float32(1)

    def fits(self, largest: np.float32, factor: np.float32) -> bool:
        """Return whether scales of up to this magnitude can be stored with a factor."""
        return True

    @abc.abstractmethod
    def scales(self, largest: np.ndarray, factor: np.float32) -> np.ndarray:
        """Return the stored scales of groups with these largest magnitudes."""

    def nearest_scales(self, scales: np.ndarray) -> np.ndarray:
        """Return scales as stored: one for groups of zeros, and none so small that it is coarse."""
        finfo: Any = ml_dtypes.finfo  # untyped
        least = np.float32(max(_TINY, 32 * float(finfo(self.scale_dtype).smallest_subnormal)))
        scales = np.where(scales, np.maximum(scales, least), np.float32(1))
        return rounded(scales, self.scale_dtype)

    def units(self, scales: np.ndarray, factor: np.float32) -> np.ndarray:
        """Return what the stored values of groups are multiplied by."""
        return scales.astype(np.float32)

    @abc.abstractmethod
    def codes(self, ratios: np.ndarray) -> np.ndarray:
        """Return the nearest numbers of the format to values in units of their groups."""

    @abc.abstractmethod
    def numbers(self, codes: np.ndarray) -> np.ndarray:
        """Return what codes stand for."""

    def stored(self, codes: np.ndarray) -> np.ndarray:
        """Return codes packed along the last axis."""
        return codes


class Fp8Groups(GroupFormat):
    """Floats of eight bits, `F8_E4M3`."""

    __slots__ = ()
    dtype = FLOAT8
    is_whole = False

    def scales(self, largest: np.ndarray, factor: np.float32) -> np.ndarray:
        return self.nearest_scales(largest / np.float32(_MOST_FP8))

    def codes(self, ratios: np.ndarray) -> np.ndarray:
        return _rounded_codes(ratios, _FLOAT8_OF).view(FLOAT8)

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32)


class PowersFp8Groups(Fp8Groups):
    """The same with scales that are powers of two: DeepSeek-V3.1's `ue8m0`."""

    __slots__ = ()

    def scales(self, largest: np.ndarray, factor: np.float32) -> np.ndarray:
        mantissas, exponents = np.frexp(largest / np.float32(_MOST_FP8))
        exponents -= mantissas == 0.5
        powers = np.ldexp(np.float32(1), exponents.clip(-126, 127))
        return np.where(largest, powers, np.float32(1)).astype(self.scale_dtype)


class Int4Groups(GroupFormat):
    """Integers from -8 to 7, plus 8, eight in 32 bits."""

    __slots__ = ()
    dtype = np.dtype(np.int32)
    per_element = 8

    def scales(self, largest: np.ndarray, factor: np.float32) -> np.ndarray:
        return self.nearest_scales(largest / np.float32(7.5))

    def codes(self, ratios: np.ndarray) -> np.ndarray:
        codes: np.ndarray = (np.rint(ratios).clip(-8, 7) + 8).astype(np.uint8)
        return codes

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        return codes.astype(np.float32) - 8

    def stored(self, codes: np.ndarray) -> np.ndarray:
        lacking = -codes.shape[-1] % self.per_element
        codes = np.pad(codes, [(0, 0), (0, lacking)]) if lacking else codes
        return _nibbles(codes).view("<i4")


class _Float4(GroupFormat):
    __slots__ = ()
    dtype = _UINT8
    per_element = 2

    def codes(self, ratios: np.ndarray) -> np.ndarray:
        return _rounded_codes(ratios, _FLOAT4_OF)

    def numbers(self, codes: np.ndarray) -> np.ndarray:
        return E2M1.take(codes)

    def stored(self, codes: np.ndarray) -> np.ndarray:
        return _nibbles(codes)


class Mxfp4Groups(_Float4):
    """Floats of four bits; scales are exponents."""

    __slots__ = ()

    def scales(self, largest: np.ndarray, factor: np.float32) -> np.ndarray:
        # Of 1.75 times a power of two and more, the next one.
        exponents = (largest.view(np.int32) + (1 << 21) >> 23) - 2
        biased = np.where(largest, exponents.clip(0, _MOST_EXPONENT), _EXPONENT_BIAS)
        return biased.astype(np.uint8).view(self.scale_dtype)

    def units(self, scales: np.ndarray, factor: np.float32) -> np.ndarray:
        return np.ldexp(np.float32(1), scales.view(np.uint8).astype(np.int32) - _EXPONENT_BIAS)


class Nvfp4Groups(_Float4):
    """Floats of four bits; scales are floats of eight bits, times a factor of the weight."""

    __slots__ = ()
    has_factor = True

    def factor(self, largest: np.float32) -> np.float32:
        if not largest:
            return np.float32(1)
        with np.errstate(all="ignore"):
            return min(np.float32(_MOST_PRODUCT) / largest, np.finfo(np.float32).max)

    def fits(self, largest: np.float32, factor: np.float32) -> bool:
        return bool(0 < factor < np.inf and largest * factor < _MOST_ROUNDED)

    def scales(self, largest: np.ndarray, factor: np.float32) -> np.ndarray:
        scales = largest / np.float32(_MOST_FP4) * factor
        return rounded(scales.clip(_LEAST_FP8, _MOST_FP8), FLOAT8)

    def units(self, scales: np.ndarray, factor: np.float32) -> np.ndarray:
        return scales.astype(np.float32) / factor


class ModelOptNvfp4Groups(Nvfp4Groups):
    """The same with the factor's reciprocal stored."""

    __slots__ = ()

    def factor(self, largest: np.float32) -> np.float32:
        return max(largest, np.float32(_TINY)) / np.float32(_MOST_PRODUCT)

    def fits(self, largest: np.float32, factor: np.float32) -> bool:
        return bool(0 < factor < np.inf and largest < _MOST_ROUNDED * factor)

    def scales(self, largest: np.ndarray, factor: np.float32) -> np.ndarray:
        scales = largest / np.float32(_MOST_FP4) / factor
        return rounded(scales.clip(_LEAST_FP8, _MOST_FP8), FLOAT8)

    def units(self, scales: np.ndarray, factor: np.float32) -> np.ndarray:
        return scales.astype(np.float32) * factor


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return numbers below 16 two a byte, the first in the low half."""
    return np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)
