"""Folders that torch's DCP writes with `HuggingFaceStorageWriter(save_distributed=True)`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

Part = tuple[np.ndarray, Sequence[int]]
"""Values, and the place of the first in the whole tensor."""


def dcp_weights() -> dict[str, np.ndarray]:
    """Return what `torch_dcp_save` saves, by name; the names say how it is sharded."""
    random = np.random.default_rng(0)
    shapes = {"row": (8, 4), "uneven": (5, 3), "few": (3, 2), "replicated": (7,), "both": (8, 6)}
    arrays = {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    arrays["column"] = random.normal(size=(6, 8)).astype(ml_dtypes.bfloat16)
    arrays["codes"] = random.integers(-128, 128, (8, 3), np.int8)
    return arrays | {"scalar": np.array(3, "f4"), "plain": np.arange(4, dtype="i8")}


def write_rank(
    folder: Path, rank: int, parts: Mapping[str, Part], *, number: str = "00001-of-00001"
) -> str:
    """Write the file of one rank, numbered from 1, as torch 2.13 does; return its name."""
    offsets = {name: {"saved_offsets": list(start)} for name, (_, start) in parts.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    values = {name: np.array(part, order="C") for name, (part, _) in parts.items()}
    file = f"shard-{rank:05}-model-{number}.safetensors"
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(values, folder / file, metadata=metadata)
    return file


def write_rows(folder: Path, arrays: Mapping[str, np.ndarray], ranks: int) -> list[str]:
    """Write arrays cut along their first dimension, as `torch.chunk` cuts; return the files."""
    files = []
    for rank in range(ranks):
        parts = {}
        for name, array in arrays.items():
            rows = -(-len(array) // ranks)
            start = min(rank * rows, len(array))
            parts[name] = (array[start : start + rows], [start] + [0] * (array.ndim - 1))
        files.append(write_rank(folder, rank + 1, parts))
    return files
