import importlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl

load = importlib.import_module("orbax_safetensors_layout.load")


def main(path):
    """Whether loads that exchange, and others, would register memory with accelerators."""
    registers, reader = [], load.ArrayReader

    def recorded(**arguments):
        registers.append(arguments["register"] is not None)
        return reader(**arguments)

    load.ArrayReader = recorded
    load.registration = lambda parsed: lambda address, nbytes: None
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P())
    tree = {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)
        for name, tensor in osl.metadata(path).items()
    }
    for replicated in ("read_once", "each"):
        osl.load(path, tree, options=osl.ReadOptions(replicated=replicated))
    return registers
