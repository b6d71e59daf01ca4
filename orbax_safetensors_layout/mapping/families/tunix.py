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
    VECTOR,
    FamilyLeaf,
    LayerGroup,
    Tree,
    head_norm,
    heads,
    leaves_of,
    out_of_heads,
)

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")

_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model.

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
        FamilyLeaf("final_norm.scale" if gemma else "final_norm.w", "norm.weight", VECTOR),
        (LayerGroup("layers.", "layers.{n}.", layers, tuple(leaves)),),
    )


def _qwen(dims: Dims) -> list[FamilyLeaf]:
    """Llama 3, Qwen 2 and Qwen 3."""
    h, k, d = dims.heads, dims.kv_heads, dims.head_dim
    steps = {"q": heads(h, d), "k": heads(k, d), "v": heads(k, d), "o": out_of_heads(h, d)}
    leaves = leaves_of("{}.w", "{}.weight", dict.fromkeys(_NORMS, VECTOR))
    leaves += leaves_of("attn.{}_proj.w", "self_attn.{}_proj.weight", steps)
    if dims.family == "qwen2":
        leaves += leaves_of("attn.{}_bias", "self_attn.{}_proj.bias", dict.fromkeys("qkv", VECTOR))
    if dims.family in ("qwen3", "qwen3_moe"):
        norms = dict.fromkeys("qk", head_norm(d))
        leaves += leaves_of("attn.{}_norm.w", "self_attn.{}_norm.weight", norms)
    if dims.dense:
        leaves += _mlp("mlp.{}.kernel", "mlp.{}.weight")
    if dims.experts:
        leaves.append(FamilyLeaf("mlp.router.kernel", "mlp.gate.weight", ROUTER))
        leaves += _mlp("mlp.{}", "mlp.experts.{e}.{}.weight")
    return leaves


def _gemma(dims: Dims) -> list[FamilyLeaf]:
    """Gemma 2 and 3.

    Queries, keys and values are one leaf where there are as many of each
    (`use_qkv_einsum`), else keys and values are.
    """
    d = dims.head_dim
    after = "post_attn_norm" if dims.family == "gemma2" else "post_attention_norm"
    norms: tuple[str, ...] = (
        "pre_attention_norm=input_layernorm",
        f"{after}=post_attention_layernorm",
        "pre_ffw_norm=pre_feedforward_layernorm",
        "post_ffw_norm=post_feedforward_layernorm",
    )
    leaves = leaves_of("{}.scale", "{}.weight", dict.fromkeys(norms, VECTOR))
    if dims.family == "gemma3":
        norms = ("_query_norm=q_norm", "_key_norm=k_norm")
        steps = dict.fromkeys(norms, head_norm(d))
        leaves += leaves_of("attn.{}.scale", "self_attn.{}.weight", steps)
    q, k, v, o = (f"self_attn.{x}_proj.weight" for x in "qkvo")
    part = "1 h e d"  # one of several along the first axis
    if dims.heads == dims.kv_heads:
        step = heads(dims.heads, d, pattern=part)
        leaves.append(FamilyLeaf("attn.qkv_einsum.w", (q, k, v), step))
    else:
        step = heads(dims.kv_heads, d, pattern=part)
        leaves.append(FamilyLeaf("attn.q_einsum.w", q, heads(dims.heads, d, pattern="h e d")))
        leaves.append(FamilyLeaf("attn.kv_einsum.w", (k, v), step))
    leaves.append(FamilyLeaf("attn.attn_vec_einsum.w", o, out_of_heads(dims.heads, d)))
    return leaves + _mlp("mlp.{}.kernel", "mlp.{}.weight")


def _mlp(target: str, source: str) -> list[FamilyLeaf]:
    return leaves_of(target, source, dict.fromkeys(_MLP, LINEAR))
