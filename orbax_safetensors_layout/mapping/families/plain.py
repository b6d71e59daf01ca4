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
        + (f"{kind.attention}_" if kind.attention else "")
    )


def _leaves(dims: Dims, kind: LayerKind) -> tuple[FamilyLeaf, ...]:
    leaves = renamed(layer_tensors(dims, kind), _NAMES)
    leaves += fused_projections(dims)
    if kind.sparse and dims.family == "gpt_oss":
        names = ("gate_proj", "up_proj", "down_proj")
        leaves += fused_experts(names, "mlp.experts.{}.kernel", "mlp.experts.{}.bias")
    return leaves + (stacked_experts(dims) if kind.sparse else ())
