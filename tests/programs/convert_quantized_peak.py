import gc
import sys

import ml_dtypes
import numpy as np
import peak_memory

import orbax_safetensors_layout as osl

folder, kind = sys.argv[1:]
options = osl.ConvertOptions(memory_budget_bytes=32 << 20)


def convert(name, shape):
    source, before = f"{folder}/{name}", f"{folder}/{name}_before"
    osl.save(source, {"a_proj.weight": np.ones(shape, ml_dtypes.bfloat16)})
    if kind == "like":
        values = np.ones(shape, ml_dtypes.float8_e4m3fn)
        osl.save(before, {"a_proj.weight": values, "a_proj.weight_scale": np.float32(2)})
        del values
        quantize = osl.Quantization.like(before)
    else:
        quantize = osl.Quantization(kind)
    gc.collect()
    peak_memory.reset()
    start = peak_memory.peak_bytes()
    osl.convert(source, f"{source}_out", format="hf", quantize=quantize, options=options)
    return peak_memory.peak_bytes() - start


convert("small", (128, 128))
print(convert("large", (4096, 16384)))  # 128 MB
