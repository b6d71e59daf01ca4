"""The facts that a mapping needs of a model, from its Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from orbax_safetensors_layout.errors import CheckpointNotFoundError, FormatError, MappingError
from orbax_safetensors_layout.format.catalog import Catalog
from orbax_safetensors_layout.mapping.families.quantization import (
    Quantization,
    quantization_of,
)
from orbax_safetensors_layout.storage.base import join
from orbax_safetensors_layout.storage.resolve import open_storage

Config = Mapping[str, Any] | str | os.PathLike[str]
"""A `config.json` as a dict, or the folder it is in, or its path."""

CONFIG_FILE = "config.json"

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
)

# What configs leave out because it is the default of the family's class in transformers 5.23.0
# (`configuration_<family>.py`), which files on the hub rely on: Gemma's have no
# `tie_word_embeddings`, those of Gemma 3 with vision no `head_dim`.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262208,
    },
    "gpt_oss": {"head_dim": 64, "num_local_experts": 128},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_experts": 128},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {"first_k_dense_replace": 3, "n_routed_experts": 256, "q_lora_rank": 1536},
}

# Who ties in a model with vision, by the outer `model_type` (transformers 5.23.0): the outer
# `tie_word_embeddings`, which is true by default in these classes and false in all others ...
_TIED_BY_DEFAULT = frozenset(
    [
        "gemma3",
        "got_ocr2",
        "internvl",
        "janus",
        "kimi_k25",
        "lighton_ocr",
        "mistral3",
        "ovis2",
        "paligemma",
    ]
)
# ... or, in these, either that or the text model's.
_TIED_BY_EITHER = frozenset(
    ["llava", "llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen2_vl", "video_llama_3"]
)

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclasses.dataclass(frozen=True, slots=True)
class Latent:
    """DeepSeek's multi-head latent attention.

    Attributes:
        query_rank: Whether queries have a low rank (`q_a_proj`, `q_b_proj`).
        query_dim: Elements of a query head, rotated ones included.
        key_value_dim: Elements of `kv_b_proj` for a head: keys that are not rotated, and values.
        value_dim: Elements of a value head.
    """

    query_rank: bool
    query_dim: int
    key_value_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Dims:
    """The facts of one model.

    Attributes:
        family: A key of `FAMILIES`.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Elements of a head.
        hidden: Elements of a token's state.
        vocab: Rows of the embedding.
        tied: Whether the output kernel is the embedding where the files have none.
        query_scalar: Attention logits are divided by the square root of it.
        rope: The `rope_type` of the configuration; `default` where it has none.
        experts: Routed experts of a layer; 0 in a dense model.
        dense: Layers without experts; all in a dense model.
        shared_experts: Whether layers have experts that all tokens take.
        extra: Layers after the last, for multi-token prediction.
        latent: DeepSeek's attention, else None.
        biased: The projections that have a bias.
        quantized: How weights are stored, where they are quantised.
        multimodal: Whether the checkpoint holds a vision model too.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    tied: bool
    query_scalar: float
    rope: str
    experts: int
    dense: tuple[int, ...]
    shared_experts: bool
    extra: int
    latent: Latent | None
    biased: frozenset[str]
    quantized: Quantization | None
    multimodal: bool

    @property
    def sparse(self) -> tuple[int, ...]:
        """The layers with experts."""
        return tuple(i for i in range(self.layers) if i not in self.dense)


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The `config.json` of a checkpoint's folder, or the one at a path.

    Raises:
        CheckpointNotFoundError: There is none.
        FormatError: It is no JSON object.
    """
    storage, text = open_storage(path)
    with storage:
        file = text if text.endswith(".json") else join(text, CONFIG_FILE)
        data = bytearray(storage.size(file))
        storage.read_into(file, 0, [memoryview(data)])
    try:
        config = json.loads(data)
    except ValueError as error:
        raise FormatError(f"can not read a model's configuration: {error}", file=file) from error
    if not isinstance(config, dict):
        raise FormatError("a model's configuration is no JSON object", file=file)
    return config


def find_prefix(path: str | os.PathLike[str]) -> str | None:
    """What stands before `embed_tokens.weight` in a checkpoint's names; None where it is unknown.

    So it is of a folder with a configuration alone.
    """
    if os.fspath(path).endswith(".json"):
        return None
    ending = "embed_tokens.weight"
    try:
        with Catalog.open(path) as catalog:
            found = [name for name in catalog.names if name.endswith(ending)]
    except CheckpointNotFoundError:
        return None
    return found[0].removesuffix(ending) if len(found) == 1 else None


class _Reader:
    """Integers and other facts of one configuration; an error names what is missing."""

    def __init__(self, family: str, config: Mapping[str, Any]) -> None:
        self._family = family
        self._values = {**_DEFAULTS.get(family, {}), **config}

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def need(self, *names: str) -> int:
        """An integer, under the first of several names that is there."""
        for name in names:
            if (value := self._values.get(name)) is not None:
                if not isinstance(value, int):
                    raise MappingError(f"{name!r} of the configuration is {value!r}, not a number")
                return value
        listed = " or ".join(map(repr, names))
        raise MappingError(
            f"the configuration of a {self._family} model lacks {listed}",
            hint=f"Give the whole {CONFIG_FILE}, or the folder that it is in.",
        )


def dims_of(family: str, config: Mapping[str, Any]) -> Dims:
    """The facts of a configuration.

    Args:
        family: A key of `FAMILIES`.
        config: The configuration; of one with vision, `text_config` counts.

    Raises:
        MappingError: A fact is missing, or there is no mapping for what it says.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        quantization = config.get("quantization_config") or inner.get("quantization_config")
        read = _Reader(family, {**inner, "quantization_config": quantization})
    else:
        read = _Reader(family, config)
    layers, hidden = read.need("num_hidden_layers"), read.need("hidden_size")
    heads = read.need("num_attention_heads")
    latent = _latent(read) if family == "deepseek_v3" else None
    head_dim = read.get("head_dim") or hidden // heads
    sparse = family in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
    rope = read.get("rope_parameters") or read.get("rope_scaling") or {}
    return Dims(
        family=family,
        layers=layers,
        heads=heads,
        kv_heads=read.get("num_key_value_heads", heads),
        head_dim=head_dim,
        hidden=hidden,
        vocab=read.need("vocab_size"),
        tied=_tied(family, config, read),
        query_scalar=read.get("query_pre_attn_scalar", head_dim),
        rope=str(rope.get("rope_type") or rope.get("type") or "default"),
        experts=read.need(*_EXPERTS) if sparse else 0,
        dense=_dense(family, read, layers) if sparse else tuple(range(layers)),
        shared_experts=family == "deepseek_v3" and read.get("n_shared_experts", 1) > 0,
        extra=read.get("num_nextn_predict_layers", 0) if family == "deepseek_v3" else 0,
        latent=latent,
        biased=_biased(family, read),
        quantized=quantization_of(family, read.get("quantization_config")),
        multimodal=isinstance(inner, Mapping),
    )


def _tied(family: str, config: Mapping[str, Any], read: _Reader) -> bool:
    """Whether the output kernel is the embedding where the files have none."""
    inner = bool(read.get("tie_word_embeddings", False))
    if not isinstance(config.get("text_config"), Mapping):
        return inner
    kind = config.get("model_type") or family
    outer = bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT))
    return outer or (inner and kind in _TIED_BY_EITHER)


def _biased(family: str, read: _Reader) -> frozenset[str]:
    """The projections with a bias, as the families' classes in transformers 5.23.0 have them."""
    attention = {"q_proj", "k_proj", "v_proj"}
    if family == "qwen2":
        return frozenset(attention)
    found: set[str] = set()
    if family not in ("mistral", "mixtral") and read.get("attention_bias", family == "gpt_oss"):
        found |= attention | {"o_proj"}
    if family == "llama" and read.get("mlp_bias", False):
        found |= {"gate_proj", "up_proj", "down_proj"}
    return frozenset(found)


def _latent(read: _Reader) -> Latent:
    keys, rotated = read.need("qk_nope_head_dim"), read.need("qk_rope_head_dim")
    values = read.need("v_head_dim")
    # `"q_lora_rank": null` says that there is none; the default counts only where it is left out.
    return Latent(read.get("q_lora_rank") is not None, keys + rotated, keys + values, values)


def _dense(family: str, read: _Reader, layers: int) -> tuple[int, ...]:
    """The layers without experts of a model that has some."""
    if family == "deepseek_v3":
        return tuple(range(min(read.need("first_k_dense_replace"), layers)))
    # `Qwen3MoeDecoderLayer` of transformers 5.23.0.
    only, step = read.get("mlp_only_layers", ()), read.get("decoder_sparse_step", 1)
    return tuple(i for i in range(layers) if i in only or (i + 1) % step)
