import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(folder, layout):
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("x", "y"))
    values = np.arange(64 * 40, dtype=np.float32).reshape(64, 40)
    tree = {}
    for number in range(5):
        sharding = NamedSharding(mesh, P(None, "x") if number % 2 else P("x"))
        array = jax.make_array_from_callback(
            values.shape, sharding, lambda index, number=number: values[index] + number
        )
        tree[f"w{number}"] = array
    options = osl.WriteOptions(layout=layout, digests=True, max_file_bytes=11000)
    osl.save(folder, tree, options=options)
    return True
