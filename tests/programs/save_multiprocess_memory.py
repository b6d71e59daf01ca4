import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from peak_memory import peak_bytes

import orbax_safetensors_layout as osl


def main(target, layout, megabytes, budget):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = megabytes * 256
    tree = {}
    for name in ("a", "b", "c", "d"):

        def part(index):
            extents = [len(range(*i.indices(n))) for i, n in zip(index, (rows, 1024), strict=True)]
            return np.full(extents, 3.0, "f")

        sharding = NamedSharding(mesh, P(None, "x"))
        tree[name] = jax.make_array_from_callback((rows, 1024), sharding, part)
    osl.save(target, {"w": tree["a"][:8]}, options=osl.WriteOptions(layout=layout))  # warms up
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = peak_bytes()
    options = osl.WriteOptions(
        layout=layout, max_file_bytes=rows * 4096, memory_budget_bytes=budget, fsync=False
    )
    osl.save(target, tree, overwrite=True, options=options)
    return peak_bytes() - before
