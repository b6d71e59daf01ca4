"""The plain tree of `docs/families.md`: Hugging Face's modules and values, JAX's axis orders."""

from __future__ import annotations

from .dims import Dims, LayerKind
from .steps import FamilyLeaf, LayerGroup, Tree, renamed
from .tensors import (
    fused_experts,
    fused_projections,
    layer_tensors,
    other_leaves,
    stacked_experts,
)

_NAMES = (
    (r"experts\.\{e\}", "experts"),
    # `MixtralBlockSparseTop2MLP`: w1 is the gate, w3 goes up, w2 goes down.
    ("block_sparse_moe|feed_forward", "mlp"),
    (r"\bw1\b", "gate_proj"),
    (r"\bw3\b", "up_proj"),
    (r"\bw2\b", "down_proj"),
    (r"mlp\.gate\b|mlp\.router\.layer", "mlp.router"),
    ("output_linear", "down_proj"),  # of Granite's MLP
    (r"norm(_\d)?\.weight", r"norm\1.scale"),
    (r"\bweight\b", "kernel"),
)


_DEEPSEEK_V4_NAMES = (
    ("^attn_norm", "input_layernorm"),
    ("^ffn_norm", "post_attention_layernorm"),
    ("^hc_(attn|ffn)_", r"\1_hc."),
    (r"^attn\.", "self_attn."),
    (r"^ffn\.", "mlp."),
    ("attn_sink", "sinks"),
    ("q_norm", "q_a_norm"),
    (r"indexer\.compressor", "compressor.indexer"),
    (r"attn\.indexer\.weights_proj", "attn.compressor.indexer.scorer.weights_proj"),
    (r"attn\.indexer", "attn.compressor.indexer"),
    (r"\bnorm\.weight", "kv_norm.weight"),
    (r"\bape\b", "position_bias"),
    (r"\bw(q_a|q_b|kv|o_a|o_b)\b", r"\1_proj"),
    (r"\bwgate\b", "gate_proj"),
    (r"gate\.bias", "gate.e_score_correction_bias"),
)


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model; layers of one kind are a group."""
    kinds: dict[LayerKind, list[int]] = {}
    for i, kind in enumerate(dims.kinds):
        kinds.setdefault(kind, []).append(i)
    groups = (
        LayerGroup(
            f"{_prefix(dims, kind)}layers.", "layers.{n}.", tuple(layers), _leaves(dims, kind)
        )
        for kind, layers in kinds.items()
    )
    return Tree(
        "embed_tokens.embedding",
        "lm_head.kernel",
        "norm.scale",
        tuple(groups),
        others=other_leaves(dims),
    )


def _prefix(dims: Dims, kind: LayerKind) -> str:
    mixed = dims.dense and dims.sparse
    return (
        ("kv_shared_" if kind.reuses else "")
        + (("moe_" if kind.sparse else "dense_") if mixed else "")
        + ("hash_" if kind.hashed else "")
        + (f"{kind.attention}_" if kind.attention else "")
    )


def _leaves(dims: Dims, kind: LayerKind) -> tuple[FamilyLeaf, ...]:
    names = (*(_DEEPSEEK_V4_NAMES if dims.compressed is not None else ()), *_NAMES)
    leaves = renamed(layer_tensors(dims, kind), names)
    leaves += fused_projections(dims)
    if kind.sparse and dims.family == "gpt_oss":
        names = ("gate_proj", "up_proj", "down_proj")
        leaves += fused_experts(names, "mlp.experts.{}.kernel", "mlp.experts.{}.bias")
    return leaves + (stacked_experts(dims) if kind.sparse else ())
