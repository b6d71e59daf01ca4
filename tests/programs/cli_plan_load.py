import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from monitoring import reported

import orbax_safetensors_layout as osl


def main(path, mesh, specs, options, on_one_host=()):
    options = osl.ReadOptions(**options)
    names, sizes = zip(*mesh.items(), strict=False)
    devices = Mesh(np.array(jax.devices()).reshape(sizes), names)
    read = reported("safetensors/bytes_read")
    tree = {}
    for name, tensor in osl.metadata(path).items():
        spec = PartitionSpec(*(tuple(part) or None for part in specs[name]))
        sharding = NamedSharding(devices, spec)
        tree[name] = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)
    arrays = osl.load(path, tree, options=options)
    needed = 0
    for array in arrays.values():
        shards = {str(s.index): s.data.nbytes for s in array.addressable_shards}
        needed += sum(shards.values())
    planned = [
        osl.plan_load(path, tree, options=options, processes_per_host=count).cost().read_bytes
        for count in on_one_host
    ]
    return {"read": read, "needed": needed, "planned": planned}
