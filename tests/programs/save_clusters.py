import gc
import os

import jax
import numpy as np
import peak_memory
from fork_server import say
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from monitoring import reported

import orbax_safetensors_layout as osl

for name in osl.__all__:
    getattr(osl, name)

SPECS = {"leading": P("x"), "inner": P(None, "x"), "both": P("x", "y"), "other": P("y", "x")}


def tree_of(split, rows, tensors):
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("x", "y"))
    if split in ("both", "other") and len(jax.devices()) > 2:
        mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("x", "y"))
    sharding = NamedSharding(mesh, SPECS[split])

    def part(number, index):
        high, low = (
            np.arange(*i.indices(n), dtype=np.int32)
            for i, n in zip(index, (rows, 1024), strict=True)
        )
        return (high[:, None] + number) * 1024 + low

    return {
        f"layers.{n}": jax.make_array_from_callback(
            (rows, 1024), sharding, lambda index, n=n: part(n, index)
        )
        for n in range(tensors)
    }


def main(target, index, count, port, devices, split, layout, rows, tensors, budget):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    say("begin")
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index, initialization_timeout=60)
    written = reported("bytes_written")
    options = osl.WriteOptions(
        layout=layout, max_file_bytes=4096 * rows, memory_budget_bytes=budget, fsync=False
    )
    osl.save(target + ".warm", tree_of(split, 16, 2), options=options)
    tree = tree_of(split, rows, tensors)
    jax.block_until_ready(tree)
    gc.collect()
    peak_memory.reset()
    before = peak_memory.peak_bytes()
    osl.save(target, tree, options=options)
    say(
        {
            "written": written[-1],
            "grown": peak_memory.peak_bytes() - before,
            "planned": osl.plan_save(tree, options=options).cost().written_bytes,
        }
    )
    if count > 1:
        jax.distributed.shutdown()  # together: who is left when process 0 has gone is ended
