"""The dtypes that the `safetensors` Rust library 0.8.0 accepts, in files and in numpy."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import UnsupportedDtypeError


class DType(NamedTuple):
    """A dtype of the file and of numpy."""

    code: str  # in the header, as "BF16"
    numpy: np.dtype[Any]  # little-endian, of one element in memory
    bits: int  # of one element in the file; of F4 and F6 8 where they are stored one a byte

    @property
    def packed(self) -> bool:
        """Whether the file packs elements more tightly than numpy does."""
        return self.bits < 8 * self.numpy.itemsize

    @property
    def group(self) -> int:
        """Elements that fill whole bytes: 2 of 4 bits, 4 of 6 bits; 1 of whole bytes."""
        return 8 // math.gcd(8, self.bits)

    @property
    def one_a_byte(self) -> bool:
        """Whether the file stores sub-byte elements one a byte, under the code of that byte."""
        if self.code not in ("U8", "I8") or self == DTYPES[self.code]:
            return False  # the name below takes numpy longer to make
        return ONE_A_BYTE.get(self.numpy.name) == self

    @property
    def label(self) -> str:
        """The code of the values' dtype; the file's own code may be that of a byte."""
        known = _BY_NUMPY.get(self.numpy) if self.one_a_byte else self
        if known is not None:
            return known.code
        return self.numpy.name.replace("uint", "U").replace("int", "I")


_TABLE = (
    DType("BOOL", np.dtype(np.bool_), 8),
    DType("U8", np.dtype("<u1"), 8),
    DType("U16", np.dtype("<u2"), 16),
    DType("U32", np.dtype("<u4"), 32),
    DType("U64", np.dtype("<u8"), 64),
    DType("I8", np.dtype("<i1"), 8),
    DType("I16", np.dtype("<i2"), 16),
    DType("I32", np.dtype("<i4"), 32),
    DType("I64", np.dtype("<i8"), 64),
    DType("F16", np.dtype("<f2"), 16),
    DType("BF16", np.dtype(ml_dtypes.bfloat16), 16),
    DType("F32", np.dtype("<f4"), 32),
    DType("F64", np.dtype("<f8"), 64),
    DType("C64", np.dtype("<c8"), 64),
    DType("F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn), 8),
    DType("F8_E4M3FNUZ", np.dtype(ml_dtypes.float8_e4m3fnuz), 8),
    DType("F8_E5M2", np.dtype(ml_dtypes.float8_e5m2), 8),
    DType("F8_E5M2FNUZ", np.dtype(ml_dtypes.float8_e5m2fnuz), 8),
    DType("F8_E8M0", np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    DType("F6_E2M3", np.dtype(ml_dtypes.float6_e2m3fn), 6),
    DType("F6_E3M2", np.dtype(ml_dtypes.float6_e3m2fn), 6),
    DType("F4", np.dtype(ml_dtypes.float4_e2m1fn), 4),
)

DTYPES: Mapping[str, DType] = MappingProxyType({dtype.code: dtype for dtype in _TABLE})
"""Every dtype of the format, by its code."""

_BY_NUMPY: Mapping[np.dtype[Any], DType] = {dtype.numpy: dtype for dtype in _TABLE}

NARROW_INTEGERS = frozenset({"int1", "uint1", "int2", "uint2", "int4", "uint4"})
"""Names of the integer dtypes of ml_dtypes, for which the format has no code."""

ONE_A_BYTE: Mapping[str, DType] = MappingProxyType(
    {
        **{dtype.numpy.name: DType("U8", dtype.numpy, 8) for dtype in _TABLE if dtype.packed},
        **{
            name: DType("U8" if name.startswith("u") else "I8", np.dtype(kind), 8)
            for name in sorted(NARROW_INTEGERS)
            if (kind := getattr(ml_dtypes, name, None)) is not None
        },
    }
)
"""Sub-byte dtypes by name, stored one a byte: a manifest records which tensors are."""

PACKED = frozenset(dtype.numpy for dtype in _TABLE if dtype.packed)
"""Dtypes of which files hold fewer bits an element than numpy."""

SUB_BYTE = frozenset(dtype.numpy for dtype in ONE_A_BYTE.values())
"""These, and integers narrower than a byte."""


def dtype_from_code(
    code: str, *, file: str | os.PathLike[str] | None = None, tensor: str | None = None
) -> DType:
    """Return the dtype of a header's code."""
    dtype = DTYPES.get(code)
    if dtype is None:
        raise UnsupportedDtypeError(
            "unknown dtype code",
            file=file,
            tensor=tensor,
            expected=f"one of {', '.join(DTYPES)}",
            found=repr(code),
        )
    return dtype


def dtype_from_numpy(dtype: np.dtype[Any], *, tensor: str | None = None) -> DType:
    """Return the format's dtype, which is little-endian, for a numpy dtype of any byte order."""
    known = _BY_NUMPY.get(dtype)
    if known is None and dtype.byteorder in "<>":
        known = _BY_NUMPY.get(dtype.newbyteorder("<"))
    if known is None:
        raise UnsupportedDtypeError(
            "the safetensors format has no code for this numpy dtype",
            tensor=tensor,
            expected=f"one of {', '.join(entry.numpy.name for entry in _TABLE)}",
            found=dtype,
        )
    return known


def storage_dtype(
    dtype: np.dtype[Any],
    size: int,
    *,
    pack: bool = True,
    is_recorded: bool = True,
    tensor: str | None = None,
) -> DType:
    """Return the dtype in files of `size` elements; those of 1 to 7 bits may be stored one a byte.

    Integers are; floats without `pack`, and where they would not fill whole bytes. Floats so stored
    are refused unless the manifest records their dtype.
    """
    if dtype not in SUB_BYTE:
        return dtype_from_numpy(dtype, tensor=tensor)
    if dtype in PACKED:
        packed = _BY_NUMPY[dtype]
        if pack and size * packed.bits % 8 == 0:
            return packed
        if not is_recorded:
            raise UnsupportedDtypeError(
                "the elements do not fill whole bytes, as the safetensors format asks",
                tensor=tensor,
                expected=f"a multiple of 8 bits, or another dtype than {packed.code}",
                found=f"{size} elements of {packed.bits} bits",
            )
    return DTYPES[ONE_A_BYTE[dtype.name].code]
