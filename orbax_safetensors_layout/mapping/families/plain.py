"""The plain tree of `docs/families.md`: Hugging Face's modules and values, JAX's axis orders."""

from __future__ import annotations

from .dims import Dims
from .steps import FamilyLeaf, LayerGroup, Tree, renamed
from .tensors import NORM_BIAS, fused_experts, fused_projections, layer_tensors

_NAMES = (
    (r"experts\.\{e\}", "experts"),
    # `MixtralBlockSparseTop2MLP`: w1 is the gate, w3 goes up, w2 goes down.
    ("block_sparse_moe", "mlp"),
    (r"\bw1\b", "gate_proj"),
    (r"\bw3\b", "up_proj"),
    (r"\bw2\b", "down_proj"),
    (r"mlp\.gate\b", "mlp.router"),
    (r"norm\.weight", "norm.scale"),
    ("weight", "kernel"),
)


def tree(dims: Dims) -> Tree:
    """Return the leaves of a model."""
    dense, sparse = ("dense_", "moe_") if dims.dense and dims.sparse else ("", "")
    return Tree(
        "embed_tokens.embedding",
        "lm_head.kernel",
        "norm.scale",
        (
            LayerGroup(f"{dense}layers.", "layers.{n}.", dims.dense, _leaves(dims, sparse=False)),
            LayerGroup(f"{sparse}layers.", "layers.{n}.", dims.sparse, _leaves(dims, sparse=True)),
        ),
        others=(NORM_BIAS,) if dims.architecture.norm_biases else (),
    )


def _leaves(dims: Dims, *, sparse: bool) -> tuple[FamilyLeaf, ...]:
    leaves = renamed(layer_tensors(dims, sparse=sparse), _NAMES)
    leaves += fused_projections(dims)
    if sparse and dims.family == "gpt_oss":
        names = ("gate_proj", "up_proj", "down_proj")
        leaves += fused_experts(names, "mlp.experts.{}.kernel", "mlp.experts.{}.bias")
    return leaves
