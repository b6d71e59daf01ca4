"""Indexes and headers of the sizes of DeepSeek-V3 and Kimi-K2, without their 690 and 590 GB.

This module imports the standard library alone, so that tests can load it from its path.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

INDEX_NAME = "model.safetensors.index.json"
FILES = 163

_HIDDEN = 7168
_DENSE_INTER = 18_432
_EXPERT_INTER = 2048
_QUERY_RANK, _KEY_VALUE_RANK = 1536, 512
_NOPE, _ROPE, _VALUE = 128, 64, 128
_BLOCK = 128
_GROUP = 32  # elements with a scale
_ITEMSIZE = MappingProxyType({"F8_E4M3": 1, "BF16": 2, "F32": 4, "I32": 4})


class Tensor(NamedTuple):
    """A tensor's name, shape and dtype code."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its bytes in a file."""
        return math.prod(self.shape) * _ITEMSIZE[self.dtype]


def make_deepseek_index(folder: str | os.PathLike[str], *, files: int = FILES) -> list[Tensor]:
    """Writes an index and `files` sparse files with real headers and full lengths.

    Args:
        folder: Where to; it is made if it is missing.
        files: Over how many files the tensors are spread.

    Returns:
        The tensors, about 92,000, in file order.
    """
    return make_index(folder, deepseek_tensors(), files=files)


def make_index(
    folder: str | os.PathLike[str], tensors: Iterable[Tensor], *, files: int
) -> list[Tensor]:
    """Writes an index and `files` sparse files with real headers and full lengths.

    Args:
        folder: Where to; it is made if it is missing.
        tensors: The tensors.
        files: Over how many files they are spread.

    Returns:
        The tensors, in file order.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    groups: list[list[Tensor]] = [[] for _ in range(files)]
    done = 0
    for tensor in tensors:
        groups[min(files - 1, done * files // total)].append(tensor)
        done += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05}-of-{files:06}.safetensors"
        _write_sparse(folder / name, group)
        weight_map |= dict.fromkeys((tensor.name for tensor in group), name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
    return tensors


def _write_sparse(path: Path, tensors: list[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + start)


class Size(NamedTuple):
    """What differs between models of one architecture."""

    layers: int
    dense_layers: int
    experts: int
    heads: int
    vocabulary: int


DEEPSEEK = Size(61, 3, 256, 128, 129_280)
KIMI = Size(61, 1, 384, 64, 163_840)
Weight = Callable[[str, int, int], Iterator[Tensor]]


def deepseek_tensors(
    layers: int = DEEPSEEK.layers, experts: int = DEEPSEEK.experts
) -> Iterator[Tensor]:
    """Every tensor of the published checkpoint's index, or of one of fewer layers or experts."""
    yield from _tensors(DEEPSEEK._replace(layers=layers, experts=experts), _fp8, _fp8, more=True)


def kimi_tensors() -> Iterator[Tensor]:
    """Tensors of Kimi-K2's size, its experts packed to 4 bits as compressed-tensors does."""
    yield from _tensors(KIMI, _plain, _int4, more=False)


def plain_tensors(size: Size, *, more: bool) -> Iterator[Tensor]:
    """The tensors of a model that is not quantised; with `more`, its multi-token prediction."""
    yield from _tensors(size, _plain, _plain, more=more)


def _tensors(size: Size, weight: Weight, expert: Weight, *, more: bool) -> Iterator[Tensor]:
    yield Tensor("model.embed_tokens.weight", (size.vocabulary, _HIDDEN), "BF16")
    for layer in range(size.layers):
        yield from _layer(
            f"model.layers.{layer}.", size, weight, expert, dense=layer < size.dense_layers
        )
    if more:
        yield from _prediction(f"model.layers.{size.layers}.", size)
        yield from _layer(f"model.layers.{size.layers}.", size, weight, expert, dense=False)
    yield Tensor("model.norm.weight", (_HIDDEN,), "BF16")
    yield Tensor("lm_head.weight", (size.vocabulary, _HIDDEN), "BF16")


def _prediction(prefix: str, size: Size) -> Iterator[Tensor]:
    """What the layer of multi-token prediction has beside those of every layer."""
    yield Tensor(prefix + "embed_tokens.weight", (size.vocabulary, _HIDDEN), "BF16")
    yield Tensor(prefix + "enorm.weight", (_HIDDEN,), "BF16")
    yield Tensor(prefix + "hnorm.weight", (_HIDDEN,), "BF16")
    yield Tensor(prefix + "eh_proj.weight", (_HIDDEN, 2 * _HIDDEN), "BF16")
    yield Tensor(prefix + "shared_head.norm.weight", (_HIDDEN,), "BF16")
    yield Tensor(prefix + "shared_head.head.weight", (size.vocabulary, _HIDDEN), "BF16")


def _layer(
    prefix: str, size: Size, weight: Weight, expert: Weight, *, dense: bool
) -> Iterator[Tensor]:
    yield from _attention(prefix + "self_attn.", size.heads, weight)
    if dense:
        yield from _gated(prefix + "mlp.", _DENSE_INTER, weight)
    else:
        for number in range(size.experts):
            yield from _gated(f"{prefix}mlp.experts.{number}.", _EXPERT_INTER, expert)
        yield Tensor(prefix + "mlp.gate.weight", (size.experts, _HIDDEN), "BF16")
        yield Tensor(prefix + "mlp.gate.e_score_correction_bias", (size.experts,), "F32")
        yield from _gated(prefix + "mlp.shared_experts.", _EXPERT_INTER, weight)
    yield Tensor(prefix + "input_layernorm.weight", (_HIDDEN,), "BF16")
    yield Tensor(prefix + "post_attention_layernorm.weight", (_HIDDEN,), "BF16")


def _attention(prefix: str, heads: int, weight: Weight) -> Iterator[Tensor]:
    """Multi-head latent attention."""
    yield from weight(prefix + "q_a_proj", _QUERY_RANK, _HIDDEN)
    yield Tensor(prefix + "q_a_layernorm.weight", (_QUERY_RANK,), "BF16")
    yield from weight(prefix + "q_b_proj", heads * (_NOPE + _ROPE), _QUERY_RANK)
    yield from weight(prefix + "kv_a_proj_with_mqa", _KEY_VALUE_RANK + _ROPE, _HIDDEN)
    yield Tensor(prefix + "kv_a_layernorm.weight", (_KEY_VALUE_RANK,), "BF16")
    yield from weight(prefix + "kv_b_proj", heads * (_NOPE + _VALUE), _KEY_VALUE_RANK)
    yield from weight(prefix + "o_proj", _HIDDEN, heads * _VALUE)


def _gated(prefix: str, inter: int, weight: Weight) -> Iterator[Tensor]:
    yield from weight(prefix + "gate_proj", inter, _HIDDEN)
    yield from weight(prefix + "up_proj", inter, _HIDDEN)
    yield from weight(prefix + "down_proj", _HIDDEN, inter)


def _plain(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """A weight of shape `[rows, columns]`."""
    yield Tensor(name + ".weight", (rows, columns), "BF16")


def _fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """A weight of shape `[rows, columns]` and a scale for each of its 128 x 128 blocks."""
    yield Tensor(name + ".weight", (rows, columns), "F8_E4M3")
    blocks = (-(-rows // _BLOCK), -(-columns // _BLOCK))
    yield Tensor(name + ".weight_scale_inv", blocks, "F32")


def _int4(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """A weight of shape `[rows, columns]`, eight elements in a word, a scale for 32 of a row."""
    yield Tensor(name + ".weight_packed", (rows, columns // 8), "I32")
    yield Tensor(name + ".weight_scale", (rows, columns // _GROUP), "BF16")
