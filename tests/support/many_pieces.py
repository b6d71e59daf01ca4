"""Checkpoints of layout `sharded` with many tensors over many files, written without the package.

The values of a tensor are its bytes, counted on from a number of its own; they need not be stored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

ITEMSIZE = {"U8": 1, "I8": 1, "F16": 2, "F32": 4}


class Stored(NamedTuple):
    """A tensor's name, shape and dtype code."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def tensors_of_experts(layers: int, experts: int, rows: int = 128) -> list[Stored]:
    """Names as of DeepSeek-V3 with 61 layers of 256 experts: 92,000 tensors; small shapes."""
    tensors = [Stored("model.embed_tokens.weight", (4 * rows, 8), "F16")]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors.append(Stored(f"{prefix}input_layernorm.weight", (8,), "F16"))
        for expert in range(experts):
            for kind in ("gate", "up", "down"):
                name = f"{prefix}mlp.experts.{expert}.{kind}_proj.weight"
                tensors.append(Stored(name, (rows, 8), "U8"))
                tensors.append(Stored(f"{name}_scale_inv", (2, 1), "F32"))
    return tensors


def values_of(number: int, tensor: Stored) -> np.ndarray:
    """Return the bytes of a tensor: `[*shape, itemsize]`."""
    shape = (*tensor.shape, ITEMSIZE[tensor.dtype])
    count = np.arange(math.prod(shape), dtype=np.int64) + 7 * number
    return (count % 251 % 64).astype(np.uint8).reshape(shape)  # no NaN, and no negative zero


def write(folder: Path, tensors: list[Stored], files: int, *, scattered: bool = False) -> None:
    """Writes `files` files: rows are split over them where they can be, others are in one.

    With `scattered` every tensor is whole in one file.
    """
    folder.mkdir(parents=True)
    classes: dict[tuple[tuple[int, ...], int | None], int] = {}
    boxes: list[list[list[object]]] = []
    entries: dict[str, list[object]] = {}
    parts: list[list[tuple[str, int, slice]]] = [[] for _ in range(files)]
    for number, tensor in enumerate(tensors):
        shape = tensor.shape
        is_split = not scattered and shape[0] % files == 0
        owner = None if is_split else number % files
        key = shape, owner
        rows = shape[0] // files
        if key not in classes:
            classes[key] = len(boxes)
            zeros = [0] * (len(shape) - 1)
            if is_split:
                spans = [(n * rows, n * rows + rows, n) for n in range(files)]
            else:
                spans = [(0, shape[0], number % files)]
            boxes.append([[[a, *zeros], [b, *shape[1:]], n] for a, b, n in spans])
        entries[tensor.name] = [tensor.dtype, list(shape), classes[key]]
        for start, stop, file in boxes[classes[key]]:
            starts = ",".join(map(str, start))
            name = tensor.name if len(boxes[classes[key]]) == 1 else f"{tensor.name}@{starts}"
            parts[file].append((name, number, slice(start[0], stop[0])))
    names = [f"shard-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    pieces = {"files": names, "classes": boxes, "tensors": entries}
    manifest = {"orbax_safetensors_layout": 1, "layout": "sharded", "pieces": pieces}
    text = ",\n".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in manifest.items())
    (folder / "orbax_safetensors_layout.json").write_text("{\n" + text + "\n}\n")
    written = [values_of(number, tensor) for number, tensor in enumerate(tensors)]
    for name, of_file in zip(names, parts, strict=True):
        header, data, at = {"__metadata__": {"format": "pt"}}, [], 0
        for piece, number, rows in of_file:
            values = written[number][rows]
            span = [at, at + values.nbytes]
            shape = values.shape[:-1]
            header[piece] = {"dtype": tensors[number].dtype, "shape": shape, "data_offsets": span}
            data.append(values.tobytes())
            at += values.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def write_holes(file: Path, tensors: list[Stored]) -> None:
    """Writes whole tensors to a file: the header, and a hole, which takes no disk."""
    header, at = {}, 0
    for name, shape, dtype in tensors:
        stop = at + math.prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + at)


def differing(loaded: dict[str, np.ndarray], tensors: list[Stored]) -> Iterator[str]:
    """Yield the names of tensors that are not what was written, or are missing."""
    for number, tensor in enumerate(tensors):
        value = loaded.get(tensor.name)
        expected = values_of(number, tensor).tobytes()
        if value is None or value.shape != tensor.shape or value.tobytes() != expected:
            yield tensor.name
