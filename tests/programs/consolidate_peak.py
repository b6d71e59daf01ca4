import sys

import numpy as np
import peak_memory

import orbax_safetensors_layout as osl

folder = sys.argv[1]


def save(name, rows):
    options = osl.WriteOptions(layout="sharded", fsync=False)
    osl.save(f"{folder}/{name}", {"a": np.ones((rows, 8192), np.float32)}, options=options)


save("warm", 64)
osl.consolidate(folder + "/warm")
save("x", 8192)
peak_memory.reset()
before = peak_memory.peak_bytes()
osl.consolidate(folder + "/x", options=osl.WriteOptions(memory_budget_bytes=32 << 20, fsync=False))
print(peak_memory.peak_bytes() - before)
