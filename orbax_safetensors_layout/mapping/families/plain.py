"""The plain tree: Hugging Face's modules, with JAX's axis orders.

`docs/families.md` documents it. Values are those of the checkpoint, so that everything but
quantised weights saves back to the same bits.
"""

from __future__ import annotations

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
    out_of_heads,
)

_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_QK_NORMED = ("qwen3", "qwen3_moe", "gemma3")

_MIXTRAL_EXPERTS = (
    FamilyLeaf("mlp.router.kernel", "block_sparse_moe.gate.weight", ROUTER),
    # `MixtralBlockSparseTop2MLP` of transformers 4: w1 is the gate, w3 goes up, w2 goes down.
    FamilyLeaf("mlp.experts.gate_proj.kernel", "block_sparse_moe.experts.{e}.w1.weight", LINEAR),
    FamilyLeaf("mlp.experts.up_proj.kernel", "block_sparse_moe.experts.{e}.w3.weight", LINEAR),
    FamilyLeaf("mlp.experts.down_proj.kernel", "block_sparse_moe.experts.{e}.w2.weight", LINEAR),
)

_EXPERTS = (
    FamilyLeaf("mlp.router.kernel", "mlp.gate.weight", ROUTER),
    *(
        FamilyLeaf(f"mlp.experts.{name}.kernel", f"mlp.experts.{{e}}.{name}.weight", LINEAR)
        for name in _MLP
    ),
)

# `GptOssExperts` of transformers 5.23.0, `modeling_gpt_oss.py`: expert kernels are [in, out]
# already, and gate and up take turns along the last axis.
_GPT_OSS_EXPERTS = (
    FamilyLeaf("mlp.router.kernel", "mlp.router.weight", ROUTER),
    FamilyLeaf("mlp.router.bias", "mlp.router.bias", SAME),
    *(
        leaf
        for start, name in enumerate(("gate_proj", "up_proj"))
        for leaf in (
            FamilyLeaf(
                f"mlp.experts.{name}.kernel",
                "mlp.experts.gate_up_proj",
                TensorStep("x i o -> x i o", packed=True, every=(start, 2)),
            ),
            FamilyLeaf(
                f"mlp.experts.{name}.bias",
                "mlp.experts.gate_up_proj_bias",
                TensorStep("x o -> x o", every=(start, 2)),
            ),
        )
    ),
    FamilyLeaf(
        "mlp.experts.down_proj.kernel",
        "mlp.experts.down_proj",
        TensorStep("x i o -> x i o", packed=True),
    ),
    FamilyLeaf(
        "mlp.experts.down_proj.bias", "mlp.experts.down_proj_bias", TensorStep("x o -> x o")
    ),
)


def tree(dims: Dims) -> Tree:
    """The leaves of a model."""
    return Tree(
        FamilyLeaf("embed_tokens.embedding", EMBEDDING_TENSOR, EMBEDDING),
        FamilyLeaf("lm_head.kernel", HEAD, ROUTER),
        FamilyLeaf("norm.scale", "norm.weight", SAME),
        _groups(dims),
    )


def _groups(dims: Dims) -> tuple[LayerGroup, ...]:
    shared = (*_norms(dims), *_attention(dims))
    dense, sparse = (*shared, *_mlp(dims, "mlp")), (*shared, *_experts(dims))
    if dims.dense and dims.sparse:
        return (
            LayerGroup("dense_layers.", "layers.{n}.", dims.dense, dense),
            LayerGroup("moe_layers.", "layers.{n}.", dims.sparse, sparse),
        )
    return (
        LayerGroup("layers.", "layers.{n}.", dims.dense, dense),
        LayerGroup("layers.", "layers.{n}.", dims.sparse, sparse),
    )


def _norms(dims: Dims) -> tuple[FamilyLeaf, ...]:
    gemma = dims.family in ("gemma2", "gemma3")
    names = _GEMMA_NORMS if gemma else _NORMS
    steps = dict.fromkeys(names, SAME)
    if dims.family in _QK_NORMED:
        steps |= dict.fromkeys(_HEAD_NORMS, head_norm(dims.head_dim))
    return tuple(
        FamilyLeaf(f"{name}.scale", f"{name}.weight", step) for name, step in steps.items()
    )


def _attention(dims: Dims) -> tuple[FamilyLeaf, ...]:
    if dims.latent is not None:
        return _latent(dims)
    d = dims.head_dim
    h, k = dims.heads, dims.kv_heads
    biases = {"q": heads_bias(h, d), "k": heads_bias(k, d), "v": heads_bias(k, d), "o": SAME}
    kernels = {"q": heads(h, d), "k": heads(k, d), "v": heads(k, d), "o": out_of_heads(h, d)}
    leaves = [
        FamilyLeaf(f"self_attn.{x}_proj.kernel", f"self_attn.{x}_proj.weight", step)
        for x, step in kernels.items()
    ]
    leaves += [
        FamilyLeaf(f"self_attn.{x}_proj.bias", f"self_attn.{x}_proj.bias", step)
        for x, step in biases.items()
        if f"{x}_proj" in dims.biased
    ]
    if dims.family == "gpt_oss":
        leaves.append(FamilyLeaf("self_attn.sinks", "self_attn.sinks", SAME))
    return tuple(leaves)


def _latent(dims: Dims) -> tuple[FamilyLeaf, ...]:
    """`DeepseekV3Attention` of transformers 5.23.0, `modeling_deepseek_v3.py`."""
    latent = dims.latent
    assert latent is not None
    steps = {
        "kv_a_proj_with_mqa": LINEAR,
        "kv_b_proj": heads(dims.heads, latent.key_value_dim),
        "o_proj": out_of_heads(dims.heads, latent.value_dim),
    }
    norms = ["kv_a_layernorm"]
    if latent.query_rank:
        steps |= {"q_a_proj": LINEAR, "q_b_proj": heads(dims.heads, latent.query_dim)}
        norms.append("q_a_layernorm")
    else:
        steps["q_proj"] = heads(dims.heads, latent.query_dim)
    return (
        *(
            FamilyLeaf(f"self_attn.{name}.kernel", f"self_attn.{name}.weight", step)
            for name, step in steps.items()
        ),
        *(
            FamilyLeaf(f"self_attn.{name}.scale", f"self_attn.{name}.weight", SAME)
            for name in norms
        ),
    )


def _mlp(dims: Dims, before: str) -> tuple[FamilyLeaf, ...]:
    kernels = (
        FamilyLeaf(f"{before}.{name}.kernel", f"{before}.{name}.weight", LINEAR) for name in _MLP
    )
    biased = (name for name in _MLP if name in dims.biased)
    biases = (FamilyLeaf(f"{before}.{name}.bias", f"{before}.{name}.bias", SAME) for name in biased)
    return (*kernels, *biases)


def _experts(dims: Dims) -> tuple[FamilyLeaf, ...]:
    match dims.family:
        case "mixtral":
            return _MIXTRAL_EXPERTS
        case "gpt_oss":
            return _GPT_OSS_EXPERTS
        case "deepseek_v3":
            bias = "e_score_correction_bias"
            routed = (*_EXPERTS, FamilyLeaf(f"mlp.router.{bias}", f"mlp.gate.{bias}", SAME))
            return (*routed, *_mlp(dims, "mlp.shared_experts")) if dims.shared_experts else routed
        case _:
            return _EXPERTS
