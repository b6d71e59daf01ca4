from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import safetensors
from format_helpers import entry, file_bytes

from orbax_safetensors_layout.errors import UnsupportedDtypeError
from orbax_safetensors_layout.format import DTYPES, dtype_from_numpy
from orbax_safetensors_layout.format.dtypes import dtype_from_code

BITS = {
    "BOOL": 8,
    "U8": 8,
    "U16": 16,
    "U32": 32,
    "U64": 64,
    "I8": 8,
    "I16": 16,
    "I32": 32,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
NOT_CODES = ["C128", "I4", "U4", "F128", "F8_E3M4", "F8_E4M3FN", "F4_E2M1", "bool", "f32", "", "F8"]


def test_elements_of_a_group_fill_whole_bytes() -> None:
    groups = {code: dtype.group for code, dtype in DTYPES.items() if dtype.group > 1}
    assert groups == {"F6_E2M3": 4, "F6_E3M2": 4, "F4": 2}


def test_table_is_complete() -> None:
    assert {code: dtype.bits for code, dtype in DTYPES.items()} == BITS


@pytest.mark.parametrize("code", BITS)
def test_width_is_the_rust_librarys(code: str) -> None:
    size = BITS[code]  # 8 elements of `bits` bits are `bits` bytes
    ((_, tensor),) = safetensors.deserialize(
        file_bytes({"a": entry(code, [8], 0, size)}, bytes(size))
    )
    assert tensor["dtype"] == code
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(file_bytes({"a": entry(code, [8], 0, size + 1)}, bytes(size + 1)))


def test_rust_library_lists_the_same_codes() -> None:
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(file_bytes({"a": entry("?", [0], 0, 0)}))
    listed = str(caught.value).partition("expected one of ")[2]
    assert {part for part in listed.split("`") if part and part[0].isupper()} == set(DTYPES)


@pytest.mark.parametrize("code", NOT_CODES)
def test_unknown_code(code: str) -> None:
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(file_bytes({"a": entry(code, [0], 0, 0)}))
    with pytest.raises(UnsupportedDtypeError) as caught:
        dtype_from_code(code, file="x.safetensors", tensor="a.b")
    message = str(caught.value)
    assert "x.safetensors" in message
    assert "'a.b'" in message
    assert "expected: one of BOOL, U8" in message
    assert f"found: {code!r}" in message


@pytest.mark.parametrize("code", BITS)
def test_numpy_and_back(code: str) -> None:
    dtype = dtype_from_code(code)
    assert dtype.code == code
    assert dtype_from_numpy(dtype.numpy) is dtype


@pytest.mark.parametrize(
    ("code", "numpy"),
    [
        ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        ("F6_E2M3", ml_dtypes.float6_e2m3fn),
        ("F6_E3M2", ml_dtypes.float6_e3m2fn),
        ("F4", ml_dtypes.float4_e2m1fn),
        ("BOOL", np.bool_),
        ("C64", np.complex64),
        ("I64", np.int64),
        ("U16", np.uint16),
    ],
)
def test_numpy_type(code: str, numpy: type) -> None:
    assert dtype_from_code(code).numpy == np.dtype(numpy)


def test_only_f4_and_f6_are_packed() -> None:
    assert {code for code, dtype in DTYPES.items() if dtype.packed} == {"F4", "F6_E2M3", "F6_E3M2"}
    whole = [dtype for dtype in DTYPES.values() if not dtype.packed]
    assert all(dtype.bits == 8 * dtype.numpy.itemsize for dtype in whole)


@pytest.mark.parametrize("text", [">f4", ">i8", ">u2", ">c8", ">f2"])
def test_foreign_byte_order_is_normalised(text: str) -> None:
    dtype = dtype_from_numpy(np.dtype(text))
    assert dtype.numpy == np.dtype(text).newbyteorder("<")


@pytest.mark.parametrize(
    "numpy",
    [
        *(np.complex128, np.longdouble, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float8_e3m4),
        *(object, "U4", "S4", "M8[s]", [("a", "f4")], ">c16", "V4"),
    ],
)
def test_numpy_dtype_without_code(numpy: object) -> None:
    dtype = np.dtype(numpy)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedDtypeError) as caught:
        dtype_from_numpy(dtype, tensor="a.b")
    message = str(caught.value)
    assert "'a.b'" in message
    assert "expected: one of bool, uint8" in message
    assert f"found: {dtype}" in message
