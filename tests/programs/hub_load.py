import hashlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_safetensors_layout as osl


def main(names, shape, cache=None):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
    leaf = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
    options = osl.ReadOptions(latency_seconds={"hf": 0}, cache=cache)  # reads through no gap
    tree = osl.load("hf://org/model", dict.fromkeys(names, leaf), options=options)
    return {
        name: [
            hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            for shard in array.addressable_shards
        ]
        for name, array in tree.items()
    }
