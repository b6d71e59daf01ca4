"""The plain tree of `docs/families.md`: Hugging Face's modules and values, JAX's axis orders."""

from __future__ import annotations

from .dims import Dims
from .steps import FamilyLeaf, LayerGroup, Tree, renamed
from .tensors import (
    NORM_BIAS,
    fused_experts,
    fused_projections,
    layer_tensors,
    stacked_experts,
)

_NAMES = (
    (r"experts\.\{e\}", "experts"),
    # `MixtralBlockSparseTop2MLP`: w1 is the gate, w3 goes up, w2 goes down.
    ("block_sparse_moe|feed_forward", "mlp"),
    (r"\bw1\b", "gate_proj"),
    (r"\bw3\b", "up_proj"),
    (r"\bw2\b", "down_proj"),
    (r"mlp\.gate\b", "mlp.router"),
    (r"norm\.weight", "norm.scale"),
    ("weight", "kernel"),
)


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model; each kind of layers is a group."""
    groups = []
    attentions = ("linear_", "full_") if dims.linear else ("",)
    for sparse, layers in ((False, dims.dense), (True, dims.sparse)):
        before = ("moe_" if sparse else "dense_") if dims.dense and dims.sparse else ""
        for attention in attentions:
            indices = dims.of_type(layers, f"{attention}attention") if attention else layers
            leaves = _leaves(dims, sparse=sparse, linear=attention == "linear_")
            groups.append(LayerGroup(f"{before}{attention}layers.", "layers.{n}.", indices, leaves))
    return Tree(
        "embed_tokens.embedding",
        "lm_head.kernel",
        "norm.scale",
        tuple(groups),
        others=(NORM_BIAS,) if dims.architecture.norm_biases else (),
    )


def _leaves(dims: Dims, *, sparse: bool, linear: bool) -> tuple[FamilyLeaf, ...]:
    leaves = renamed(layer_tensors(dims, sparse=sparse, linear=linear), _NAMES)
    leaves += fused_projections(dims)
    if sparse and dims.family == "gpt_oss":
        names = ("gate_proj", "up_proj", "down_proj")
        leaves += fused_experts(names, "mlp.experts.{}.kernel", "mlp.experts.{}.bias")
    return leaves + (stacked_experts(dims) if sparse else ())
