"""The NNX models of Tunix, as google-tunix 0.1.7 names and lays out their state.

Facts are those of `tunix/models/{llama3,qwen2,qwen3,gemma,gemma3}/model.py` and the `params*.py`
beside them. Layers are never stacked. Norms and embeddings are those of the checkpoint.
"""

from __future__ import annotations

from orbax_safetensors_layout.errors import MappingError

from .build import EMBEDDING_TENSOR, HEAD
from .dims import Dims
from .steps import (
    EMBEDDING,
    LINEAR,
    ROUTER,
    SAME,
    FamilyLeaf,
    LayerGroup,
    Tree,
    head_norm,
    heads,
    heads_first,
    heads_part,
    out_of_heads,
)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")

_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def tree(dims: Dims) -> Tree:
    """The leaves of a model.

    Raises:
        MappingError: Tunix has no such model.
    """
    if dims.dense and dims.sparse:
        raise MappingError(
            f"Tunix has no {dims.family} whose layers are partly dense",
            found=f"dense layers {list(dims.dense)} of {dims.layers}",
        )
    gemma = dims.family in ("gemma2", "gemma3")
    layers = tuple(range(dims.layers))
    leaves = _gemma(dims) if gemma else _qwen(dims)
    return Tree(
        FamilyLeaf("embedder.input_embedding", EMBEDDING_TENSOR, EMBEDDING),
        FamilyLeaf("lm_head.w", HEAD, ROUTER),
        FamilyLeaf("final_norm.scale" if gemma else "final_norm.w", "norm.weight", SAME),
        (LayerGroup("layers.", "layers.{n}.", layers, tuple(leaves)),),
    )


def _qwen(dims: Dims) -> list[FamilyLeaf]:
    """Llama 3, Qwen 2 and Qwen 3."""
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    steps = {"q_proj": heads(h, d), "k_proj": heads(k, d), "v_proj": heads(k, d)}
    steps["o_proj"] = out_of_heads(h, d)
    leaves = [FamilyLeaf(f"{name}.w", f"{name}.weight", SAME) for name in _NORMS]
    leaves += [
        FamilyLeaf(f"attn.{n}.w", f"self_attn.{n}.weight", step) for n, step in steps.items()
    ]
    if dims.family == "qwen2":
        leaves += [FamilyLeaf(f"attn.{x}_bias", f"self_attn.{x}_proj.bias", SAME) for x in "qkv"]
    if dims.family in ("qwen3", "qwen3_moe"):
        norm = head_norm(d)
        leaves += [FamilyLeaf(f"attn.{x}_norm.w", f"self_attn.{x}_norm.weight", norm) for x in "qk"]
    if dims.dense:
        leaves += _mlp()
    if dims.experts:
        leaves.append(FamilyLeaf("mlp.router.kernel", "mlp.gate.weight", ROUTER))
        leaves += [FamilyLeaf(f"mlp.{n}", f"mlp.experts.{{e}}.{n}.weight", LINEAR) for n in _MLP]
    return leaves


def _gemma(dims: Dims) -> list[FamilyLeaf]:
    """Gemma 2 and 3.

    Queries, keys and values are one leaf where there are as many of each
    (`use_qkv_einsum`), else keys and values are.
    """
    d = dims.head_dim
    after = "post_attn_norm" if dims.family == "gemma2" else "post_attention_norm"
    norms = {
        "pre_attention_norm": "input_layernorm",
        after: "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    leaves = [FamilyLeaf(f"{a}.scale", f"{b}.weight", SAME) for a, b in norms.items()]
    if dims.family == "gemma3":
        own = (("_query_norm", "q_norm"), ("_key_norm", "k_norm"))
        leaves += [
            FamilyLeaf(f"attn.{a}.scale", f"self_attn.{b}.weight", head_norm(d)) for a, b in own
        ]
    q, k, v, o = (f"self_attn.{x}_proj.weight" for x in "qkvo")
    if dims.heads == dims.kv_heads:
        leaves.append(FamilyLeaf("attn.qkv_einsum.w", (q, k, v), heads_part(dims.heads, d)))
    else:
        leaves.append(FamilyLeaf("attn.q_einsum.w", q, heads_first(dims.heads, d)))
        leaves.append(FamilyLeaf("attn.kv_einsum.w", (k, v), heads_part(dims.kv_heads, d)))
    leaves.append(FamilyLeaf("attn.attn_vec_einsum.w", o, out_of_heads(dims.heads, d)))
    return leaves + _mlp()


def _mlp() -> list[FamilyLeaf]:
    return [FamilyLeaf(f"mlp.{name}.kernel", f"mlp.{name}.weight", LINEAR) for name in _MLP]
