"""The NNX models of google-tunix 0.1.7: `model.py` and `params*.py` of `tunix/models/*`."""

from __future__ import annotations

from .dims import Dims, LayerKind
from .steps import VECTOR, FamilyLeaf, LayerGroup, Tree, renamed
from .tensors import heads, layer_tensors

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")

_NAMES = (
    (r"experts\.\{e\}\.(\w+)\.weight", r"\1"),
    (r"mlp\.gate\b", "mlp.router"),
    (r"(mlp\..*)\.weight", r"\1.kernel"),
    ("self_attn", "attn"),
)
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


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model; refuses one that Tunix does not have."""
    dims.check_uniform("Tunix")
    if dims.family == "gemma3":  # `GEMMA3_ATTENTION_PATTERN`; of Gemma 2 `ModelConfig` says it
        dims.check_cycle("Tunix", 6, rest=True)
    gemma = dims.family in ("gemma2", "gemma3")
    leaves = _gemma(dims) if gemma else _qwen(dims)
    layers = LayerGroup("layers.", "layers.{n}.", tuple(range(dims.layers)), leaves)
    norm = "final_norm.scale" if gemma else "final_norm.w"
    return Tree("embedder.input_embedding", "lm_head.w", norm, (layers,))


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
    after = "post_attn_norm" if dims.family == "gemma2" else "post_attention_norm"
    q, k, v = (f"self_attn.{x}_proj.weight" for x in "qkv")
    steps = {
        tensor: step
        for tensor, step in layer_tensors(dims, LayerKind()).items()
        if tensor not in (q, k, v) and not tensor.endswith(".bias")
    }
    leaves = renamed(steps, (*_GEMMA_NAMES, ("post_attention_layernorm", after), *_NAMES))
    step = heads(dims.kv_heads, dims.head_dim, "(h d) e -> 1 h e d")
    if dims.heads == dims.kv_heads:  # `use_qkv_einsum`
        return (*leaves, FamilyLeaf("attn.qkv_einsum.w", (q, k, v), step))
    queries = FamilyLeaf("attn.q_einsum.w", q, heads(dims.heads, dims.head_dim, "(h d) e -> h e d"))
    return (*leaves, queries, FamilyLeaf("attn.kv_einsum.w", (k, v), step))
