"""MaxText's parameters, as maxtext 0.2.5 names and lays them out.

Sources are `checkpoint_conversion/utils/param_mapping.py` of that release, and the model code under
`models/` and `layers/` where it is named. Values that MaxText computes in another dtype are
computed in float32 here.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

from .build import EMBEDDING_TENSOR, HEAD
from .dims import Dims
from .steps import (
    EMBEDDING,
    LINEAR,
    ROUTER,
    VECTOR,
    FamilyLeaf,
    LayerGroup,
    TensorStep,
    Tree,
    fused_experts,
    head_norm,
    heads,
    heads_bias,
    interleaved_heads,
    leaves_of,
    out_of_heads,
)

_MLP = ("wi_0=gate_proj", "wi_1=up_proj", "wo=down_proj")
_MIXTRAL_MLP = ("wi_0=w1", "wi_1=w3", "wo=w2")
_GPT_OSS_MLP = (
    ("wo", "down_proj", None),
    ("wi_0", "gate_up_proj", (0, 2)),
    ("wi_1", "gate_up_proj", (1, 2)),
)
_NORMS = (
    "pre_self_attention_layer_norm=input_layernorm",
    "post_self_attention_layer_norm=post_attention_layernorm",
)
_GEMMA_NORMS = (
    "pre_self_attention_norm=input_layernorm",
    "post_self_attention_norm=post_attention_layernorm",
    "pre_ffw_norm=pre_feedforward_layernorm",
    "post_ffw_norm=post_feedforward_layernorm",
)
_HEAD_NORMS = ("query_norm=q_norm", "key_norm=k_norm")

# `scale_rmsnorm` (Gemma 2 and 3): Hugging Face's norms multiply by 1 + weight, MaxText's by scale.
_GEMMA_NORM = dataclasses.replace(VECTOR, term=1.0)

# `scale_query_layer` (Llama 3.1, Mixtral, Gemma 2) and `llama_or_mistral_ckpt.py` divide queries:
# `init_query_w` of `layers/attentions.py` folds it into the kernel where a model has neither norms
# of queries nor a `query_pre_attn_scalar`. For Gemma 2 the hook takes the head's size, which is
# wrong for 27B alone; `convert_gemma2_chkpt.py` takes 144 there, as the model's configuration says.
_QUERY_SCALED = ("llama", "mistral", "mixtral", "gemma2")

# `ROPE_INIT_FUNCTIONS` of transformers 5.23.0; which of them it is decides how heads are turned.
_ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

# `GEMMA3_ATTENTION_PATTERN` of `models/gemma3.py`, and `inhomogeneous_layer_cycle_interval` of
# `configs/models/gpt-oss-*.yml`: layers that are scanned together.
_GEMMA3_CYCLE = 6
_GPT_OSS_CYCLE = 2


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model.

    Raises:
        MappingError: MaxText has no such model.
    """
    gemma = dims.family in ("gemma2", "gemma3")
    return Tree(
        FamilyLeaf("token_embedder.embedding", EMBEDDING_TENSOR, _embedding(dims)),
        FamilyLeaf("decoder.logits_dense.kernel", HEAD, ROUTER),
        FamilyLeaf("decoder.decoder_norm.scale", "norm.weight", _GEMMA_NORM if gemma else VECTOR),
        _groups(dims),
    )


def _embedding(dims: Dims) -> TensorStep:
    """Gemma's rows are multiplied by sqrt(hidden) when they are converted, not when they are used.

    The factor of Gemma 3 is rounded to bfloat16 (`pad_and_scale_embedding`), that of Gemma 2 to
    float32 (`pad_hf_embedding_layer`).
    """
    root = math.sqrt(dims.hidden)
    if dims.family == "gemma2":
        return dataclasses.replace(EMBEDDING, factor=float(np.float32(root)))
    if dims.family == "gemma3":
        return dataclasses.replace(EMBEDDING, factor=float(ml_dtypes.bfloat16(root)))
    return EMBEDDING


def _groups(dims: Dims) -> tuple[LayerGroup, ...]:
    match dims.family:
        case "gemma2":
            return _gemma2(dims)
        case "gemma3":
            return _gemma3(dims)
        case "deepseek_v3":
            return _deepseek(dims)
        case "gpt_oss":
            return _gpt_oss(dims)
        case _:
            return _uniform(dims)


def _uniform(dims: Dims) -> tuple[LayerGroup, ...]:
    """Llama, Mistral, Qwen and Mixtral: all layers have the same leaves."""
    if dims.dense and dims.sparse:
        raise MappingError(
            f"MaxText has no {dims.family} whose layers are partly dense",
            found=f"dense layers {list(dims.dense)} of {dims.layers}",
        )
    leaves = [*_norms(_NORMS, VECTOR), *_attention(dims, "self_attention")]
    if dims.family in ("qwen3", "qwen3_moe"):
        leaves += _head_norms(head_norm(dims.head_dim))
    if dims.family == "qwen2":
        leaves += _biases(dims, "self_attention")
    if dims.family == "mixtral":
        leaves += _experts("MoeBlock_0.", "block_sparse_moe", _MIXTRAL_MLP)
    elif dims.experts:
        leaves += _experts("moe_block.")
    else:
        leaves += _mlp("mlp")
    layers = tuple(range(dims.layers))
    return (LayerGroup("decoder.layers.", "decoder.layers_{n}.", layers, tuple(leaves)),)


def _check_cycle(dims: Dims, local: int) -> None:
    """Refuses other turns of local and global layers than MaxText takes: some local, one global."""
    turns = ("sliding_attention",) * local + ("full_attention",)
    for i, kind in enumerate(dims.layer_types):
        if kind != turns[i % len(turns)]:
            raise MappingError(
                f"MaxText's {dims.family} has another layer {i} than the layer_types say",
                expected=turns[i % len(turns)],
                found=short_repr(kind),
            )


def _gemma2(dims: Dims) -> tuple[LayerGroup, ...]:
    """A layer of MaxText is two of the checkpoint, one local and one global."""
    _check_cycle(dims, local=1)
    if dims.layers % 2:
        raise MappingError(
            "MaxText's Gemma 2 joins two layers to one", found=f"{dims.layers} layers"
        )
    return tuple(
        LayerGroup(
            "decoder.layers.",
            "decoder.layers_{n}.",
            tuple(range(start, dims.layers, 2)),
            (
                *_norms(_GEMMA_NORMS, _GEMMA_NORM, f"{{}}_{kind}.scale"),
                *_attention(dims, f"self_attention_{kind}"),
                *_mlp("mlp", f"mlp_{kind}"),
            ),
            first=0,
        )
        for start, kind in enumerate(("local", "global"))
    )


def _gemma3(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers are scanned by sixes; those that remain are not stacked."""
    leaves = (
        *_norms(_GEMMA_NORMS, _GEMMA_NORM),
        *_head_norms(head_norm(dims.head_dim, 1.0)),
        *_attention(dims, "self_attention"),
        *_mlp("mlp"),
    )
    _check_cycle(dims, local=_GEMMA3_CYCLE - 1)
    scanned = dims.layers - dims.layers % _GEMMA3_CYCLE
    rest = tuple(range(scanned, dims.layers))
    remainder = LayerGroup(
        "decoder.layers_remainder.layers_{n}.", "decoder.layers_{n}.", rest, leaves, scans=False
    )
    return (*_cycle(_GEMMA3_CYCLE, scanned, leaves), remainder)


def _gpt_oss(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers are scanned by twos, one local and one global."""
    _check_cycle(dims, local=_GPT_OSS_CYCLE - 1)
    if dims.layers % _GPT_OSS_CYCLE:
        raise MappingError("MaxText's GPT-OSS scans layers by twos", found=f"{dims.layers} layers")
    attention = "GptOssAttention"
    leaves = (
        *_norms(_NORMS, VECTOR),
        *_attention(dims, attention),
        *_biases(dims, attention),
        FamilyLeaf(f"{attention}.out.bias", "self_attn.o_proj.bias", VECTOR),
        FamilyLeaf(f"{attention}.sinks", "self_attn.sinks", VECTOR),
        FamilyLeaf("GptOssMlp.gate.kernel", "mlp.router.weight", ROUTER),
        FamilyLeaf("GptOssMlp.gate.bias", "mlp.router.bias", VECTOR),
        *fused_experts(_GPT_OSS_MLP, "GptOssMlp.{}", "GptOssMlp.{}_bias"),
    )
    return _cycle(_GPT_OSS_CYCLE, dims.layers, leaves)


def _cycle(length: int, layers: int, leaves: tuple[FamilyLeaf, ...]) -> tuple[LayerGroup, ...]:
    """Layers of which `length` are scanned together."""
    return tuple(
        LayerGroup(
            f"decoder.layers.layers_{i}.",
            "decoder.layers_{n}.",
            tuple(range(i, layers, length)),
            leaves,
        )
        for i in range(length)
    )


def _deepseek(dims: Dims) -> tuple[LayerGroup, ...]:
    """Dense layers first, counted by themselves, then those with experts."""
    shared = (*_norms(_NORMS, VECTOR), *_latent(dims))
    block = "DeepSeekMoeBlock_0."
    # `GateLogit` of `layers/moe.py`: the bias is a variable of its own kind. Flax keeps it beside
    # the parameters, and `param_scan_axis` is that of parameters only (`layers/nnx_decoders.py`).
    # `param_mapping.py` still looks for it among the parameters, where it is not.
    bias = "mlp.gate.e_score_correction_bias"
    gate = FamilyLeaf(f"{block}MoeBlock_0.gate.bias", bias, VECTOR, variable="MoEBiasVar")
    experts = [*_experts(f"{block}MoeBlock_0."), gate]
    if dims.shared_experts:
        experts += _mlp("mlp.shared_experts", f"{block}shared_experts")
    dense, sparse = (*shared, *_mlp("mlp")), (*shared, *experts)
    return (
        LayerGroup("decoder.dense_layers.", "decoder.dense_layers_{n}.", dims.dense, dense),
        LayerGroup("decoder.moe_layers.", "decoder.moe_layers_{n}.", dims.sparse, sparse, first=0),
    )


def _latent(dims: Dims) -> list[FamilyLeaf]:
    latent = dims.latent
    assert latent is not None
    queries = heads(dims.heads, latent.query_dim)
    steps = {
        "kv_norm.scale=kv_a_layernorm": VECTOR,
        "wkv_a.kernel=kv_a_proj_with_mqa": LINEAR,
        "wkv_b.kernel=kv_b_proj": heads(dims.heads, latent.key_value_dim),
        "out.kernel=o_proj": out_of_heads(dims.heads, latent.value_dim),
    }
    if latent.query_rank:
        steps |= {"q_norm.scale=q_a_layernorm": VECTOR, "wq_a.kernel=q_a_proj": LINEAR}
        steps["wq_b.kernel=q_b_proj"] = queries
    else:
        steps["query.kernel=q_proj"] = queries
    return leaves_of("self_attention.{}", "self_attn.{}.weight", steps)


def _attention(dims: Dims, module: str) -> list[FamilyLeaf]:
    h, k, d, factor = dims.heads, dims.kv_heads, dims.head_dim, None
    if dims.family in _QUERY_SCALED:
        factor = float(np.float32(1 / math.sqrt(dims.query_scalar)))
    # `adjust_rope` (Llama 3.1): `LLaMARotaryEmbedding` of `layers/embeddings.py` rotates pairs of
    # neighbours; `RotaryEmbedding`, which serves where `rope_type` is not "llama3.1", halves.
    if dims.family == "llama" and dims.rope not in _ROPES:
        raise MappingError(
            "MaxText's Llama has no rotary embedding of the configuration's rope_type",
            expected=f"one of {', '.join(_ROPES)}",
            found=short_repr(dims.rope),
        )
    rotated = interleaved_heads if dims.family == "llama" and dims.rope == "llama3" else heads
    steps = {
        "query=q": rotated(h, d, factor),
        "key=k": rotated(k, d),
        "value=v": heads(k, d),
        "out=o": out_of_heads(h, d),
    }
    return leaves_of(f"{module}.{{}}.kernel", "self_attn.{}_proj.weight", steps)


def _biases(dims: Dims, module: str) -> list[FamilyLeaf]:
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    steps = {"query=q": heads_bias(h, d), "key=k": heads_bias(k, d), "value=v": heads_bias(k, d)}
    return leaves_of(f"{module}.{{}}.bias", "self_attn.{}_proj.bias", steps)


def _norms(
    names: tuple[str, ...], step: TensorStep, target: str = "{}.scale", source: str = "{}.weight"
) -> list[FamilyLeaf]:
    return leaves_of(target, source, dict.fromkeys(names, step))


def _head_norms(step: TensorStep) -> list[FamilyLeaf]:
    return _norms(_HEAD_NORMS, step, "self_attention.{}.scale", "self_attn.{}.weight")


def _mlp(source: str, module: str | None = None) -> list[FamilyLeaf]:
    steps = dict.fromkeys(_MLP, LINEAR)
    return leaves_of(f"{module or source}.{{}}.kernel", f"{source}.{{}}.weight", steps)


def _experts(block: str, module: str = "mlp", names: tuple[str, ...] = _MLP) -> list[FamilyLeaf]:
    router = FamilyLeaf(f"{block}gate.kernel", f"{module}.gate.weight", ROUTER)
    source = f"{module}.experts.{{e}}.{{}}.weight"
    return [router, *leaves_of(f"{block}{{}}", source, dict.fromkeys(names, LINEAR))]
