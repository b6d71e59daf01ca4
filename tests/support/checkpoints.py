"""Checkpoints for tests, written by `safetensors` itself: the independent side of every oracle."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy


def random_tensor(shape: Sequence[int], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    """Every bit random (NaN payloads and -0.0 among them), but valid booleans."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    raw = rng.bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def save(
    folder: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    *,
    files: int = 1,
    index: bool = True,
    metadata: dict[str, str] | None = None,
) -> pathlib.Path:
    """Writes a Hugging Face folder: `files` files, dealt round robin, and an index for several."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = metadata or {"format": "pt"}
    if files == 1:
        safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors", metadata)
        return folder
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        weight_map.update(dict.fromkeys(part, name))
        safetensors.numpy.save_file(part, folder / name, metadata)
    if index:
        total = sum(tensor.nbytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def llama_like(layers: int = 2, hidden: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    """Names and shape ratios of a Llama checkpoint, in bfloat16."""
    shapes = {"model.embed_tokens.weight": (8 * hidden, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden),
            prefix + "self_attn.k_proj.weight": (hidden // 4, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.up_proj.weight": (4 * hidden, hidden),
            prefix + "mlp.down_proj.weight": (hidden, 4 * hidden),
            prefix + "input_layernorm.weight": (hidden,),
        }
    bf16 = np.dtype(ml_dtypes.bfloat16)
    return {
        name: random_tensor(shape, bf16, seed + number)
        for number, (name, shape) in enumerate(shapes.items())
    }


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of dicts that dotted names describe."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def layers_of(version: int, layers: int = 3, rows: int = 50) -> dict[str, np.ndarray]:
    """Layers whose every value tells the version and the layer."""
    return {
        f"layers.{n}.w": np.full((rows, 60), version * 1000 + n, np.float32) for n in range(layers)
    }


def values_of(step: int) -> dict[str, np.ndarray]:
    """Return small values of a training step, in which every bit differs from step to step."""
    shapes = {
        "rows": ((16, 24), np.float32),
        "columns": ((24, 16), ml_dtypes.bfloat16),
        "all": ((40,), np.int32),
        "scalar": ((), np.float64),
        "empty": ((0, 4), np.float32),
    }
    return {
        name: random_tensor(shape, np.dtype(dtype), 10 * step + number)
        for number, (name, (shape, dtype)) in enumerate(shapes.items())
    }


def assert_same_bits(array: np.ndarray, expected: np.ndarray) -> None:
    """Equal dtype, shape and bytes, NaN payloads included."""
    array = np.asarray(array)
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert array.tobytes() == expected.tobytes()
