"""The NNX models of google-tunix 0.1.7: `model.py` and `params*.py` of `tunix/models/*`."""

from __future__ import annotations

import dataclasses

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

from .dims import Dims, LayerKind
from .steps import VECTOR, FamilyLeaf, LayerGroup, TensorStep, Tree, renamed
from .tensors import heads, layer_tensors, other_leaves

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma4")

_NAMES = (
    (r"experts\.\{e\}\.(\w+)\.weight", r"\1"),
    (r"mlp\.gate\b", "mlp.router"),
    (r"(mlp\..*)\.weight", r"\1.kernel"),
    ("self_attn", "attn"),
)
_QUERIES, _KEYS_AND_VALUES = "(h d) e -> h e d", "(h d) e -> 1 h e d"
_QWEN_NAMES = ((r"_proj\.bias", "_bias"), ("weight", "w"))
_GEMMA_NAMES = (
    (r"self_attn\.o_proj\.weight", "attn.attn_vec_einsum.w"),
    ("q_norm", "_query_norm"),
    ("k_norm", "_key_norm"),
    ("input_layernorm", "pre_attention_norm"),
    ("pre_feedforward_layernorm", "pre_ffw_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    (r"norm\.weight", "norm.scale"),
)


_GEMMA4_NAMES = (
    ("post_feedforward_layernorm_2", "moe_post_ffw_norm"),
    ("post_feedforward_layernorm_1", "dense_post_ffw_norm"),
    ("pre_feedforward_layernorm_2", "moe_pre_ffw_norm"),
    (r"^router\.proj\.weight", "moe.router_logits"),
    (r"^router\.scale", "moe.router_scale"),
    (r"^router\.", "moe."),
    ("layer_scalar", "skip_scale"),
    (r"^(per_layer_\w+)\.weight", r"\1.w"),
)


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model; refuses one that Tunix does not have."""
    if dims.family == "gemma4":
        return _gemma4(dims)
    dims.check_uniform("Tunix")
    if dims.family == "gemma3":  # `GEMMA3_ATTENTION_PATTERN`; of Gemma 2 `ModelConfig` says it
        dims.check_cycle("Tunix", 6, rest=True)
    _check_computed(dims)
    gemma = dims.family in ("gemma", "gemma2", "gemma3")
    leaves = _gemma(dims) if gemma else _qwen(dims)
    layers = LayerGroup("layers.", "layers.{n}.", tuple(range(dims.layers)), leaves)
    norm = "final_norm.scale" if gemma else "final_norm.w"
    return Tree("embedder.input_embedding", "lm_head.w", norm, (layers,))


def _check_computed(dims: Dims) -> None:
    """Refuses models that Tunix computes otherwise, with nothing in its configuration to say so."""
    divisors = [dims.head_dim]
    if dims.family == "gemma3":  # `QueryPreAttentionNormalisation`
        divisors.append(dims.hidden // dims.heads)
    if dims.family in ("gemma2", "gemma3") and dims.query_scalar not in divisors:
        raise MappingError(
            f"Tunix's {dims.family} divides attention logits by the square root of another number",
            expected=f"query_pre_attn_scalar {' or '.join(map(str, divisors))}",
            found=f"{dims.query_scalar:g}",
        )
    if dims.family == "qwen3_moe" and dims.sparse and not dims.top_sums_to_one:
        raise MappingError(
            "Tunix's qwen3_moe scales the weights of a token's experts to the sum 1",
            expected="norm_topk_prob true",
            found="false, or none, which is false",
        )


def _qwen(dims: Dims) -> tuple[FamilyLeaf, ...]:
    """Llama 3, Qwen 2 and Qwen 3. Only Qwen 2 has biases, which stay flat."""
    steps = {
        tensor: VECTOR if tensor.endswith(".bias") else step
        for tensor, step in layer_tensors(dims, LayerKind(bool(dims.sparse))).items()
        if dims.family == "qwen2" or not tensor.endswith(".bias")
    }
    return renamed(steps, (*_NAMES, *_QWEN_NAMES))


def _gemma(dims: Dims) -> tuple[FamilyLeaf, ...]:
    """Joins queries, keys and values where there are as many of each, else keys and values."""
    names = {"gemma": "pre_ffw_norm", "gemma2": "post_attn_norm"}
    after = names.get(dims.family, "post_attention_norm")
    q, k, v = (f"self_attn.{x}_proj.weight" for x in "qkv")
    steps = {
        tensor: step
        for tensor, step in layer_tensors(dims, LayerKind()).items()
        if tensor not in (q, k, v) and not tensor.endswith(".bias")
    }
    leaves = renamed(steps, (*_GEMMA_NAMES, ("post_attention_layernorm", after), *_NAMES))
    step = heads(dims.kv_heads, dims.head_dim, _KEYS_AND_VALUES)
    if dims.heads == dims.kv_heads:  # `use_qkv_einsum`
        return (*leaves, FamilyLeaf("attn.qkv_einsum.w", (q, k, v), step))
    queries = FamilyLeaf("attn.q_einsum.w", q, heads(dims.heads, dims.head_dim, _QUERIES))
    return (*leaves, queries, FamilyLeaf("attn.kv_einsum.w", (k, v), step))


def _gemma4(dims: Dims) -> Tree:
    """Local and global layers have heads of their own; queries are never joined to keys.

    Layers that take the keys and values of others have some nevertheless, which nothing uses.
    """
    reusing = sum(kind.reuses for kind in dims.kinds)
    if reusing and not dims.stores_reused:
        raise MappingError(
            "every layer of Tunix's gemma4 has keys and values, in these files only some",
            found=f"num_kv_shared_layers {reusing}, without tensors for their keys and values",
            hint="Published files have them, those that transformers 5 saves do not. Tunix does"
            " not use them: write an osl.Mapping that fills them.",
        )
    # `create_kv_cache_sharing_patterns`: theirs are those of the last two layers with their own.
    last = [kind.attention for kind in dims.kinds[: dims.layers - reusing]][-2:]
    if reusing and last != ["sliding", "full"]:
        raise MappingError(
            "Tunix's gemma4 takes shared keys from the last local and the last global layer before",
            expected="layer_types with one local and one global layer there",
            found=short_repr(last),
        )
    groups = [
        LayerGroup("", "layers.{n}.", (i,), _gemma4_layer(dims, kind))
        for i, kind in enumerate(dims.kinds)
    ]
    names = (("embed_tokens_per_layer.embedding", "per_layer_input_embedding"), ("kernel", "w"))
    others = []
    for leaf in other_leaves(dims):
        target = leaf.target
        for name, replacement in names:
            target = target.replace(name, replacement)
        others.append(FamilyLeaf(f"embedder.{target}", leaf.source, leaf.step))
    head, norm = "lm_head.w", "final_norm.scale"
    return Tree(
        "embedder.input_embedding",
        head,
        norm,
        tuple(groups),
        others=tuple(others),
        takes_reused=True,
    )


def _gemma4_layer(dims: Dims, kind: LayerKind) -> tuple[FamilyLeaf, ...]:
    q, k, v = (f"self_attn.{x}_proj.weight" for x in "qkv")
    steps = layer_tensors(dims, dataclasses.replace(kind, reuses=False))
    own = {tensor: step for tensor, step in steps.items() if tensor not in (q, k, v)}
    after = ("post_attention_layernorm", "post_attention_norm")
    leaves = renamed(own, (*_GEMMA4_NAMES, *_GEMMA_NAMES, after, *_NAMES))
    full = kind.attention == "full"
    n, d = (dims.full_kv_heads, dims.full_head_dim) if full else (dims.kv_heads, dims.head_dim)
    leaves += (FamilyLeaf("attn.q_einsum.w", q, heads(dims.heads, d, _QUERIES)),)
    if v in steps:
        leaves += (FamilyLeaf("attn.kv_einsum.w", (k, v), heads(n, d, _KEYS_AND_VALUES)),)
    else:
        leaves += (FamilyLeaf("attn.k_einsum.w", k, heads(n, d, _QUERIES)),)
    if kind.sparse:
        sizes = (("x", dims.experts), ("f", dims.fused_width))
        gating = TensorStep("x (n f) e -> x n f e", (*sizes, ("n", 2)), projection=True)
        down = TensorStep("x e f -> x f e", sizes, projection=True)
        leaves += (FamilyLeaf("moe.gating_einsum", "experts.gate_up_proj", gating),)
        leaves += (FamilyLeaf("moe.linear", "experts.down_proj", down),)
    return leaves
