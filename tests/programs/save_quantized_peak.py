import gc
import sys

import ml_dtypes
import numpy as np
import peak_memory

import orbax_safetensors_layout as osl

folder, kind = sys.argv[1:]


def save(name, weight):
    options = osl.WriteOptions(quantize=osl.Quantization(kind), memory_budget_bytes=32 << 20)
    osl.save(f"{folder}/{name}", {"a_proj.weight": weight}, options=options)


save("small", np.ones((128, 128), np.float32))
large = np.ones((8192, 16384), ml_dtypes.bfloat16)  # 256 MB
gc.collect()
peak_memory.reset()
before = peak_memory.peak_bytes()
save("large", large)
print(peak_memory.peak_bytes() - before)
