"""A small model whose leaves are transposed, stacked, split and rearranged tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checkpoints import random_tensor, save
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import abstract_of, mesh_of

import orbax_safetensors_layout as osl

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYERS, HEADS, HEAD_DIM, WIDTH = 4, 8, 16, 32


@pytest.fixture(scope="module")
def tensors():
    weights = {"model.norm.weight": random_tensor((WIDTH,), BF16, 1)}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        weights |= {
            prefix + "q_proj.weight": random_tensor((HEADS * HEAD_DIM, WIDTH), BF16, i),
            prefix + "gate_up.weight": random_tensor((WIDTH, 2 * WIDTH), BF16, 10 + i),
            prefix + "norm.weight": np.full((WIDTH,), i + 0.5, BF16),
        }
        for expert in range(3):
            name = prefix + f"experts.{expert}.down.weight"
            weights[name] = random_tensor((WIDTH, WIDTH), BF16, 20 + i + expert)
    return weights


@pytest.fixture(scope="module")
def path(tmp_path_factory, tensors):
    return save(tmp_path_factory.mktemp("mapped"), tensors, files=3)


_LAYER = "model.layers.{i}."
_Q = osl.tensor(_LAYER + "q_proj.weight").rearrange("(h d) e -> e h d", d=HEAD_DIM)
_EXPERTS = osl.stack(osl.tensor(_LAYER + "experts.{e}.down.weight").transpose(), over="e")
_GATE_UP = osl.tensor(_LAYER + "gate_up.weight")
RULES = (
    osl.rule("layers.q", osl.stack(_Q, over="i", axis=1)),
    osl.rule("layers.experts", osl.stack(_EXPERTS, over="i")),
    osl.rule("layers.{i}.gate", _GATE_UP.slice(1, 0, None, 2)),
    osl.rule("layers.{i}.up", _GATE_UP.slice(1, 1, None, 2)),
)
SPECS = {
    "replicated": lambda rank: P(),
    "first": lambda rank: P(("x", "y")),
    "last": lambda rank: P(*[None] * (rank - 1), ("x", "y")),
    "both": lambda rank: P(*[None] * (rank - 2), "x", "y") if rank > 1 else P("x"),
}


def saved_mapping() -> osl.Mapping:
    """Return a mapping that saves, too."""
    return osl.Mapping(
        [
            *RULES,
            osl.rule("layers.{i}.norm", osl.tensor(_LAYER + "norm.weight").cast("float32")),
            osl.rule("norm", osl.tensor("model.norm.weight").scale(4.0, lossy_inverse=True)),
            osl.rule("tied", None, tied_to="norm"),
        ]
    )


def plain_mapping() -> osl.Mapping:
    """Return a mapping that changes no dtype."""
    return osl.Mapping(
        [
            *RULES,
            osl.rule("layers.{i}.norm", osl.tensor(_LAYER + "norm.weight")),
            osl.rule("norm", osl.tensor("model.norm.weight")),
        ]
    )


def abstract_llama(path, split):
    """Return abstract leaves, sharded over four devices."""
    mesh, spec = mesh_of(x=2, y=2), SPECS[split]
    leaves = osl.metadata(path, mapping=saved_mapping())
    return abstract_of(leaves, lambda leaf: NamedSharding(mesh, spec(len(leaf.shape))))
