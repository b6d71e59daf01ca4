"""Sharded trees that processes of a cluster save, and comparisons of what each of them holds."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors.numpy
from checkpoints import llama_like
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from meshes import mesh_of

import orbax_safetensors_layout as osl


def array_of(value: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def tree_of(number):
    """Return parameters and a step; the sharding of each leaf depends on the step."""
    mesh = mesh_of(x=2, y=-1)
    tree = {}
    for name, value in llama_like().items():
        spec = [P("x"), P(None, "x"), P("y"), P("y", "x"), P()][(len(tree) + number) % 5]
        tree[name] = array_of(value, mesh, spec if value.ndim >= len(spec) else P())
    return {"params": tree, "step": number}


def make_tree(path, split):
    """Return the tensors of a file under a sharding, and values of the host."""
    mesh = {"2d": {"x": -1, "y": 2}, "partial": {"x": 2, "y": -1}}.get(split, {"x": -1})
    spec = {
        "replicated": lambda s: P(),
        "dim0": lambda s: P("x"),
        "dim1": lambda s: P(None, "x") if len(s) > 1 else P(),
        "2d": lambda s: P("x", "y") if len(s) > 1 else P("y"),
        "partial": lambda s: P("y"),
    }[split]
    tensors = safetensors.numpy.load_file(path + "/model.safetensors")
    tree = {n: array_of(v, mesh_of(**mesh), spec(v.shape)) for n, v in tensors.items()}
    return {**tree, "step": 7, "host": np.arange(5.0)}


def same_shards(array, other):
    pairs = zip(array.addressable_shards, other.addressable_shards, strict=True)
    return all(np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes() for a, b in pairs)


def is_same(tree, expected):
    def same(a, b):
        if not isinstance(b, jax.Array):
            return a == b
        return a.sharding == b.sharding and same_shards(a, b)

    return all(jax.tree.leaves(jax.tree.map(same, tree, expected)))


def manager_v0(root, write=None):
    registry = osl.handler_registry("state", write=write)
    return ocp.CheckpointManager(root, handler_registry=registry)


def args_v0(tree):
    return ocp.args.Composite(state=ocp.args.StandardSave(tree))
