"""Contents of saved files, as the Rust library `safetensors` and plain JSON read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
from format_helpers import entry, file_bytes

PACKED_BITS = {
    np.dtype(ml_dtypes.float4_e2m1fn): 4,
    np.dtype(ml_dtypes.float6_e2m3fn): 6,
    np.dtype(ml_dtypes.float6_e3m2fn): 6,
}
"""Dtypes of which a file holds fewer bits an element than memory."""

CODES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "int4": "I8", "uint4": "U8",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn": "F4",
    "float6_e2m3fn": "F6_E2M3", "float6_e3m2fn": "F6_E3M2",
}  # fmt: skip
"""Names of dtypes in files."""


class Raw(NamedTuple):
    """A tensor as it stands in a file."""

    code: str
    shape: tuple[int, ...]
    data: bytes


def raw_file(file: Path) -> dict[str, Raw]:
    return {
        name: Raw(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(file.read_bytes())
    }


def raw_tensors(folder: Path) -> dict[str, Raw]:
    """All tensors of a folder, which agree with its index where it has one."""
    stored: dict[str, Raw] = {}
    file_of = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = raw_file(file)
        assert not stored.keys() & tensors.keys(), "a tensor stands in two files"
        stored |= tensors
        file_of.update(dict.fromkeys(tensors, file.name))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        document = json.loads(index.read_text())
        assert document["weight_map"] == file_of
        assert document["metadata"]["total_size"] == sum(len(raw.data) for raw in stored.values())
    else:
        assert len(set(file_of.values())) <= 1
    return stored


def header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the header's JSON."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length, json.loads(data[8 : 8 + length])


def packed(array: np.ndarray, bits: int) -> bytes:
    """Elements of a byte each as a little-endian stream of `bits` each, bit by bit."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    each = np.unpackbits(flat[:, None], axis=1, bitorder="little")[:, :bits]
    return np.packbits(each.reshape(-1), bitorder="little").tobytes()


def write_packed(folder: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes tensors of any dtype: also of those that `safetensors.numpy` cannot write."""
    entries, data = {}, b""
    for name, array in tensors.items():
        bits = PACKED_BITS.get(array.dtype)
        raw = array.tobytes() if bits is None else packed(array, bits)
        code = CODES[array.dtype.name]
        entries[name] = entry(code, array.shape, len(data), len(data) + len(raw))
        data += raw
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(file_bytes(entries, data))
    return folder


def assert_saved(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """The folder holds these tensors, every bit of them, and no others.

    Sub-byte integers stand a byte each, sub-byte floats packed where they fill whole bytes.
    """
    stored = raw_tensors(folder)
    assert stored.keys() == tensors.keys()
    for name, expected in tensors.items():
        raw = stored[name]
        bits = PACKED_BITS.get(expected.dtype)
        code = CODES[expected.dtype.name]
        if bits is None:
            plain = expected.dtype.newbyteorder("<")
            if code in ("I8", "U8"):  # int4 and uint4, too
                plain = np.dtype({"I8": np.int8, "U8": np.uint8}[code])
            assert raw == Raw(code, expected.shape, expected.astype(plain).tobytes()), name
        elif expected.size * bits % 8:
            assert raw == Raw("U8", expected.shape, expected.tobytes()), name
        else:
            assert raw == Raw(code, expected.shape, packed(expected, bits)), name
