import gc
import sys

import ml_dtypes
import numpy as np
import peak_memory

import orbax_safetensors_layout as osl

folder, kind = sys.argv[1:]


def save(name, weight):
    if kind == "like":
        values = np.ones(weight.shape, ml_dtypes.float8_e4m3fn)
        tensors = {"a_proj.weight": values, "a_proj.weight_scale": np.float32(2)}
        osl.save(f"{folder}/{name}_before", tensors)
        del values, tensors
        quantize = osl.Quantization.like(f"{folder}/{name}_before")
        peak_memory.reset()
    else:
        quantize = osl.Quantization(kind)
    options = osl.WriteOptions(quantize=quantize, memory_budget_bytes=32 << 20)
    osl.save(f"{folder}/{name}", {"a_proj.weight": weight}, options=options)


save("small", np.ones((128, 128), np.float32))
large = np.ones((8192, 16384), ml_dtypes.bfloat16)  # 256 MB
gc.collect()
peak_memory.reset()
before = peak_memory.peak_bytes()
save("large", large)
print(peak_memory.peak_bytes() - before)
