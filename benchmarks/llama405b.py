"""The files of Llama-3.1-405B's size, with real headers, without their 812 GB.

This module imports the standard library alone, as `deepseek` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from deepseek import Tensor, make_index

FILES = 191

_HIDDEN, _INTER, _VOCABULARY, _LAYERS = 16_384, 53_248, 128_256, 126
_HEADS, _KEY_VALUE_HEADS, _HEAD = 128, 8, 128


def make_llama_index(folder: str | os.PathLike[str], *, files: int = FILES) -> list[Tensor]:
    """Writes an index and `files` sparse files with real headers and full lengths."""
    return make_index(folder, llama_tensors(), files=files)


def llama_tensors(layers: int = _LAYERS, scale: int = 1) -> Iterator[Tensor]:
    """Every tensor of the published checkpoint's index.

    Args:
        layers: How many layers.
        scale: Divides the widths, for smaller models of the same form.
    """
    hidden, inter, vocabulary = _HIDDEN // scale, _INTER // scale, _VOCABULARY // scale
    yield Tensor("model.embed_tokens.weight", (vocabulary, hidden), "BF16")
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        queries, keys = _HEADS * _HEAD // scale, _KEY_VALUE_HEADS * _HEAD // scale
        yield Tensor(prefix + "input_layernorm.weight", (hidden,), "BF16")
        yield Tensor(prefix + "mlp.down_proj.weight", (hidden, inter), "BF16")
        yield Tensor(prefix + "mlp.gate_proj.weight", (inter, hidden), "BF16")
        yield Tensor(prefix + "mlp.up_proj.weight", (inter, hidden), "BF16")
        yield Tensor(prefix + "post_attention_layernorm.weight", (hidden,), "BF16")
        yield Tensor(prefix + "self_attn.k_proj.weight", (keys, hidden), "BF16")
        yield Tensor(prefix + "self_attn.o_proj.weight", (hidden, queries), "BF16")
        yield Tensor(prefix + "self_attn.q_proj.weight", (queries, hidden), "BF16")
        yield Tensor(prefix + "self_attn.v_proj.weight", (keys, hidden), "BF16")
    yield Tensor("model.norm.weight", (hidden,), "BF16")
    yield Tensor("lm_head.weight", (vocabulary, hidden), "BF16")
