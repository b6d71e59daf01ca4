import sys

import numpy as np
import orbax.checkpoint as ocp
import peak_memory

import orbax_safetensors_layout as osl

write = osl.WriteOptions(memory_budget_bytes=32 << 20, fsync=False)
registry = osl.handler_registry("default", write=write)
with ocp.CheckpointManager(sys.argv[1], handler_registry=registry) as manager:
    manager.save(0, args=ocp.args.StandardSave({"a": np.ones(10)}))
    manager.wait_until_finished()
    tree = {str(number): np.ones((8, 1 << 20)) for number in range(4)}
    peak_memory.reset()
    before = peak_memory.peak_bytes()
    manager.save(1, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
    print(peak_memory.peak_bytes() - before)
