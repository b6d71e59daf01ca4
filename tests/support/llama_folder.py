"""The tensors of a small Llama, a sharding of them, and checks of what was restored of them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from checkpoints import assert_same_bits, llama_like
from jax.sharding import NamedSharding, PartitionSpec
from meshes import mesh_of

TENSORS = llama_like()
NORM = "model.norm.weight"
NORM_LEAF = jax.ShapeDtypeStruct(TENSORS[NORM].shape, TENSORS[NORM].dtype)


def sharding_of(name: str) -> NamedSharding:
    mesh = mesh_of(fsdp=4, tensor=2)
    spec = PartitionSpec("fsdp", "tensor") if TENSORS[name].ndim == 2 else PartitionSpec("fsdp")
    return NamedSharding(mesh, spec)


def sharded_abstract() -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding_of(name))
        for name, tensor in TENSORS.items()
    }


def check_sharded(restored: Mapping[str, jax.Array]) -> None:
    assert restored.keys() == TENSORS.keys()
    for name, array in restored.items():
        assert array.sharding == sharding_of(name)
        for shard in array.addressable_shards:
            assert_same_bits(shard.data, TENSORS[name][shard.index])


def check_host(restored: Mapping[str, np.ndarray]) -> None:
    assert restored.keys() == TENSORS.keys()
    for name, array in restored.items():
        assert isinstance(array, np.ndarray)
        assert_same_bits(array, TENSORS[name])
