"""MaxText's parameters, as maxtext 0.2.5 names and lays them out.

Facts are those of `checkpoint_conversion/utils/param_mapping.py` of that release, and of the model
code under `models/` and `layers/` where it is named. Values that MaxText computes in another dtype
are computed in float32 here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

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
    SAME,
    FamilyLeaf,
    LayerGroup,
    TensorStep,
    Tree,
    head_norm,
    heads,
    heads_bias,
    interleaved_heads,
    out_of_heads,
)

_MLP = (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj"))

_NORMS = (
    ("pre_self_attention_layer_norm", "input_layernorm"),
    ("post_self_attention_layer_norm", "post_attention_layernorm"),
)
_GEMMA_NORMS = (
    ("pre_self_attention_norm", "input_layernorm"),
    ("post_self_attention_norm", "post_attention_layernorm"),
    ("pre_ffw_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_HEAD_NORMS = (("query_norm", "q_norm"), ("key_norm", "k_norm"))
_ATTENTION = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))

# `scale_rmsnorm` (Gemma 2 and 3): Hugging Face's norms multiply by 1 + weight, MaxText's by scale.
_GEMMA_NORM = dataclasses.replace(SAME, term=1.0)

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
    """The leaves of a model.

    Raises:
        MappingError: MaxText has no such model.
    """
    gemma = dims.family in ("gemma2", "gemma3")
    return Tree(
        FamilyLeaf("token_embedder.embedding", EMBEDDING_TENSOR, _embedding(dims)),
        FamilyLeaf("decoder.logits_dense.kernel", HEAD, ROUTER),
        FamilyLeaf("decoder.decoder_norm.scale", "norm.weight", _GEMMA_NORM if gemma else SAME),
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
            return _alike(dims)


def _alike(dims: Dims) -> tuple[LayerGroup, ...]:
    """Llama, Mistral, Qwen and Mixtral: all layers are alike."""
    if dims.dense and dims.sparse:
        raise MappingError(
            f"MaxText has no {dims.family} whose layers are partly dense",
            found=f"dense layers {list(dims.dense)} of {dims.layers}",
        )
    leaves = [*_scales(_NORMS, SAME), *_attention(dims, "self_attention")]
    if dims.family in ("qwen3", "qwen3_moe"):
        leaves += _scales(_HEAD_NORMS, head_norm(dims.head_dim), "self_attention.", "self_attn.")
    if dims.family == "qwen2":
        leaves += _biases(dims, "self_attention")
    if dims.family == "mixtral":
        leaves += _mixtral_experts()
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
                *_scales([(f"{a}_{kind}", b) for a, b in _GEMMA_NORMS], _GEMMA_NORM),
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
        *_scales(_GEMMA_NORMS, _GEMMA_NORM),
        *_scales(_HEAD_NORMS, head_norm(dims.head_dim, 1.0), "self_attention.", "self_attn."),
        *_attention(dims, "self_attention"),
        *_mlp("mlp"),
    )
    _check_cycle(dims, local=_GEMMA3_CYCLE - 1)
    scanned = dims.layers - dims.layers % _GEMMA3_CYCLE
    groups = [
        LayerGroup(
            f"decoder.layers.layers_{i}.",
            "decoder.layers_{n}.",
            tuple(range(i, scanned, _GEMMA3_CYCLE)),
            leaves,
        )
        for i in range(_GEMMA3_CYCLE)
    ]
    rest = tuple(range(scanned, dims.layers))
    remainder = LayerGroup(
        "decoder.layers_remainder.layers_{n}.", "decoder.layers_{n}.", rest, leaves, scans=False
    )
    return (*groups, remainder)


def _gpt_oss(dims: Dims) -> tuple[LayerGroup, ...]:
    """Layers are scanned by twos, one local and one global."""
    _check_cycle(dims, local=_GPT_OSS_CYCLE - 1)
    if dims.layers % _GPT_OSS_CYCLE:
        raise MappingError("MaxText's GPT-OSS scans layers by twos", found=f"{dims.layers} layers")
    attention = "GptOssAttention"
    leaves = (
        *_scales(_NORMS, SAME),
        *_attention(dims, attention),
        *_biases(dims, attention),
        FamilyLeaf(f"{attention}.out.bias", "self_attn.o_proj.bias", SAME),
        FamilyLeaf(f"{attention}.sinks", "self_attn.sinks", SAME),
        FamilyLeaf("GptOssMlp.gate.kernel", "mlp.router.weight", ROUTER),
        FamilyLeaf("GptOssMlp.gate.bias", "mlp.router.bias", SAME),
        *_fused_experts("GptOssMlp"),
    )
    return tuple(
        LayerGroup(
            f"decoder.layers.layers_{i}.",
            "decoder.layers_{n}.",
            tuple(range(i, dims.layers, _GPT_OSS_CYCLE)),
            leaves,
        )
        for i in range(_GPT_OSS_CYCLE)
    )


def _fused_experts(block: str) -> list[FamilyLeaf]:
    """`interleave`: gate and up take turns along the last axis of the checkpoint's tensors."""
    kernel, bias = TensorStep("x i o -> x i o", packed=True), TensorStep("x o -> x o")
    leaves = [
        FamilyLeaf(f"{block}.wo", "mlp.experts.down_proj", kernel),
        FamilyLeaf(f"{block}.wo_bias", "mlp.experts.down_proj_bias", bias),
    ]
    for start, name in enumerate(("wi_0", "wi_1")):
        part = dataclasses.replace(kernel, every=(start, 2))
        leaves.append(FamilyLeaf(f"{block}.{name}", "mlp.experts.gate_up_proj", part))
        part = dataclasses.replace(bias, every=(start, 2))
        leaves.append(FamilyLeaf(f"{block}.{name}_bias", "mlp.experts.gate_up_proj_bias", part))
    return leaves


def _deepseek(dims: Dims) -> tuple[LayerGroup, ...]:
    """Dense layers first, counted by themselves, then those with experts."""
    shared = (*_scales(_NORMS, SAME), *_latent(dims))
    block = "DeepSeekMoeBlock_0."
    # `GateLogit` of `layers/moe.py`: the bias is a variable of its own kind. Flax keeps it beside
    # the parameters, and `param_scan_axis` is that of parameters only (`layers/nnx_decoders.py`).
    # `param_mapping.py` still looks for it among the parameters, where it is not.
    bias = FamilyLeaf(
        f"{block}MoeBlock_0.gate.bias",
        "mlp.gate.e_score_correction_bias",
        SAME,
        variable="MoEBiasVar",
    )
    experts = [*_experts(f"{block}MoeBlock_0."), bias]
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
    rows = [
        ("kv_norm.scale", "kv_a_layernorm", SAME),
        ("wkv_a.kernel", "kv_a_proj_with_mqa", LINEAR),
        ("wkv_b.kernel", "kv_b_proj", heads(dims.heads, latent.key_value_dim)),
        ("out.kernel", "o_proj", out_of_heads(dims.heads, latent.value_dim)),
    ]
    if latent.query_rank:
        rows += [
            ("q_norm.scale", "q_a_layernorm", SAME),
            ("wq_a.kernel", "q_a_proj", LINEAR),
            ("wq_b.kernel", "q_b_proj", heads(dims.heads, latent.query_dim)),
        ]
    else:
        rows.append(("query.kernel", "q_proj", heads(dims.heads, latent.query_dim)))
    return [FamilyLeaf(f"self_attention.{a}", f"self_attn.{b}.weight", step) for a, b, step in rows]


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
    steps = {"query": rotated(h, d, factor), "key": rotated(k, d), "value": heads(k, d)}
    leaves = [
        FamilyLeaf(f"{module}.{name}.kernel", f"self_attn.{source}.weight", steps[name])
        for name, source in _ATTENTION
    ]
    return [
        *leaves,
        FamilyLeaf(f"{module}.out.kernel", "self_attn.o_proj.weight", out_of_heads(h, d)),
    ]


def _biases(dims: Dims, module: str) -> list[FamilyLeaf]:
    counts = {"query": dims.heads, "key": dims.kv_heads, "value": dims.kv_heads}
    return [
        FamilyLeaf(
            f"{module}.{a}.bias", f"self_attn.{b}.bias", heads_bias(counts[a], dims.head_dim)
        )
        for a, b in _ATTENTION
    ]


def _scales(
    names: Iterable[tuple[str, str]], step: TensorStep, before: str = "", source: str = ""
) -> list[FamilyLeaf]:
    return [FamilyLeaf(f"{before}{a}.scale", f"{source}{b}.weight", step) for a, b in names]


def _mlp(source: str, module: str | None = None) -> list[FamilyLeaf]:
    module = source if module is None else module
    return [FamilyLeaf(f"{module}.{a}.kernel", f"{source}.{b}.weight", LINEAR) for a, b in _MLP]


def _experts(block: str) -> list[FamilyLeaf]:
    kernels = [FamilyLeaf(f"{block}{a}", f"mlp.experts.{{e}}.{b}.weight", LINEAR) for a, b in _MLP]
    return [FamilyLeaf(f"{block}gate.kernel", "mlp.gate.weight", ROUTER), *kernels]


def _mixtral_experts() -> list[FamilyLeaf]:
    block, source = "MoeBlock_0.", "block_sparse_moe."
    names = (("wi_0", "w1"), ("wi_1", "w3"), ("wo", "w2"))
    kernels = [
        FamilyLeaf(f"{block}{a}", f"{source}experts.{{e}}.{b}.weight", LINEAR) for a, b in names
    ]
    return [FamilyLeaf(f"{block}gate.kernel", f"{source}gate.weight", ROUTER), *kernels]
