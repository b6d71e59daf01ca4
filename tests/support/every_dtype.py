"""Random tensors of every dtype of the format, their files, and the arrays that they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from orbax_safetensors_layout.format import DTYPES

SHAPE = (8, 48)


def write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """A file by hand: `safetensors.numpy` does not write all dtypes."""
    header, data = {}, b""
    for name, (code, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def decode(code: str, shape: tuple[int, ...], raw: bytes) -> np.ndarray:
    """The oracle: one Python integer for all bits, cut from its low end."""
    dtype = DTYPES[code]
    if not dtype.packed:
        return np.frombuffer(raw, dtype.numpy).reshape(shape)
    stream = int.from_bytes(raw, "little")
    count = len(raw) * 8 // dtype.bits
    mask = (1 << dtype.bits) - 1
    elements = [(stream >> (dtype.bits * i)) & mask for i in range(count)]
    return np.array(elements, np.uint8).view(dtype.numpy).reshape(shape)


def sample(code: str, shape: tuple[int, ...] = SHAPE) -> bytes:
    rng = np.random.default_rng(0)
    if code == "BOOL":
        return rng.integers(0, 2, shape).astype(np.uint8).tobytes()
    return rng.bytes(int(np.prod(shape)) * DTYPES[code].bits // 8)
