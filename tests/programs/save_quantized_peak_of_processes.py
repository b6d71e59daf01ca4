import gc

import jax
import ml_dtypes
import numpy as np
import peak_memory
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl


def main(folder, kind):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    options = osl.WriteOptions(quantize=osl.Quantization(kind), memory_budget_bytes=32 << 20)

    def save(name, shape):
        weight = np.ones(shape, ml_dtypes.bfloat16)
        sharding = NamedSharding(mesh, P("x"))
        array = jax.make_array_from_callback(shape, sharding, lambda index: weight[index])
        gc.collect()
        peak_memory.reset()
        before = peak_memory.peak_bytes()
        osl.save(f"{folder}/{name}", {"a_proj.weight": array}, options=options)
        return peak_memory.peak_bytes() - before

    save("small", (128, 128))
    return save("large", (4096, 16384))  # 128 MB
