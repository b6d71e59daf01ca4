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
    VECTOR,
    FamilyLeaf,
    LayerGroup,
    Tree,
    fused_experts,
    head_norm,
    heads,
    heads_bias,
    leaves_of,
    out_of_heads,
)

_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_QK_NORMED = ("qwen3", "qwen3_moe", "gemma3")

# `MixtralBlockSparseTop2MLP` of transformers 4: w1 is the gate, w3 goes up, w2 goes down.
_MIXTRAL_MLP = ("gate_proj=w1", "up_proj=w3", "down_proj=w2")
_GPT_OSS_MLP = (
    ("gate_proj", "gate_up_proj", (0, 2)),
    ("up_proj", "gate_up_proj", (1, 2)),
    ("down_proj", "down_proj", None),
)


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model."""
    shared = (*_norms(dims), *_attention(dims))
    dense, sparse = (*shared, *_mlp(dims, "mlp")), (*shared, *_experts(dims))
    names = ("dense_layers.", "moe_layers.") if dims.dense and dims.sparse else ("layers.",) * 2
    return Tree(
        FamilyLeaf("embed_tokens.embedding", EMBEDDING_TENSOR, EMBEDDING),
        FamilyLeaf("lm_head.kernel", HEAD, ROUTER),
        FamilyLeaf("norm.scale", "norm.weight", VECTOR),
        (
            LayerGroup(names[0], "layers.{n}.", dims.dense, dense),
            LayerGroup(names[1], "layers.{n}.", dims.sparse, sparse),
        ),
    )


def _norms(dims: Dims) -> list[FamilyLeaf]:
    gemma = dims.family in ("gemma2", "gemma3")
    steps = dict.fromkeys(_GEMMA_NORMS if gemma else _NORMS, VECTOR)
    if dims.family in _QK_NORMED:
        steps |= dict.fromkeys(_HEAD_NORMS, head_norm(dims.head_dim))
    return leaves_of("{}.scale", "{}.weight", steps)


def _attention(dims: Dims) -> list[FamilyLeaf]:
    if dims.latent is not None:
        return _latent(dims)
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    biases = {"q": heads_bias(h, d), "k": heads_bias(k, d), "v": heads_bias(k, d), "o": VECTOR}
    kernels = {"q": heads(h, d), "k": heads(k, d), "v": heads(k, d), "o": out_of_heads(h, d)}
    biases = {x: step for x, step in biases.items() if f"{x}_proj" in dims.biased}
    leaves = leaves_of("self_attn.{}_proj.kernel", "self_attn.{}_proj.weight", kernels)
    leaves += leaves_of("self_attn.{}_proj.bias", "self_attn.{}_proj.bias", biases)
    if dims.family == "gpt_oss":
        leaves.append(FamilyLeaf("self_attn.sinks", "self_attn.sinks", VECTOR))
    return leaves


def _latent(dims: Dims) -> list[FamilyLeaf]:
    """`DeepseekV3Attention` of transformers 5.23.0, `modeling_deepseek_v3.py`."""
    latent = dims.latent
    assert latent is not None
    queries = heads(dims.heads, latent.query_dim)
    steps = {
        "kv_a_proj_with_mqa": LINEAR,
        "kv_b_proj": heads(dims.heads, latent.key_value_dim),
        "o_proj": out_of_heads(dims.heads, latent.value_dim),
    }
    steps |= {"q_a_proj": LINEAR, "q_b_proj": queries} if latent.query_rank else {"q_proj": queries}
    norms = ["kv_a_layernorm", *(["q_a_layernorm"] if latent.query_rank else [])]
    kernels = leaves_of("self_attn.{}.kernel", "self_attn.{}.weight", steps)
    scales = leaves_of("self_attn.{}.scale", "self_attn.{}.weight", dict.fromkeys(norms, VECTOR))
    return kernels + scales


def _mlp(dims: Dims, module: str) -> list[FamilyLeaf]:
    kernels = dict.fromkeys(_MLP, LINEAR)
    biases = {name: VECTOR for name in _MLP if name in dims.biased}
    leaves = leaves_of(f"{module}.{{}}.kernel", f"{module}.{{}}.weight", kernels)
    return leaves + leaves_of(f"{module}.{{}}.bias", f"{module}.{{}}.bias", biases)


def _experts(dims: Dims) -> list[FamilyLeaf]:
    if dims.family == "gpt_oss":
        return [
            FamilyLeaf("mlp.router.kernel", "mlp.router.weight", ROUTER),
            FamilyLeaf("mlp.router.bias", "mlp.router.bias", VECTOR),
            *fused_experts(_GPT_OSS_MLP, "mlp.experts.{}.kernel", "mlp.experts.{}.bias"),
        ]
    mixtral = dims.family == "mixtral"
    module, names = ("block_sparse_moe", _MIXTRAL_MLP) if mixtral else ("mlp", _MLP)
    steps = dict.fromkeys(names, LINEAR)
    leaves = [FamilyLeaf("mlp.router.kernel", f"{module}.gate.weight", ROUTER)]
    leaves += leaves_of("mlp.experts.{}.kernel", f"{module}.experts.{{e}}.{{}}.weight", steps)
    if dims.family == "deepseek_v3":
        bias = "e_score_correction_bias"
        leaves.append(FamilyLeaf(f"mlp.router.{bias}", f"mlp.gate.{bias}", VECTOR))
        leaves += _mlp(dims, "mlp.shared_experts") if dims.shared_experts else []
    return leaves
