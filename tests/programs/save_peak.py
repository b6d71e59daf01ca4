import gc
import sys

import jax
import ml_dtypes
import numpy as np
import peak_memory
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl

folder, kind = sys.argv[1:]
f4, SMALL = np.float32, {"memory_budget_bytes": 32 << 20}
shape, spec, dtype, options = {
    "column": ((8192, 8192), P(None, "x"), f4, {}),
    "column of three": ((64, 1024, 1024), P(None, None, "x"), f4, {}),
    "sharded": ((8192, 8192), P(None, "x"), f4, {"layout": "sharded"}),
    "cast": ((8192, 8192), P("x"), f4, {"dtype": ml_dtypes.bfloat16}),
    "long rows": ((2, 1 << 25), P(None, "x"), f4, {}),
    "one long row": ((1, 1 << 26), P(), f4, {"dtype": ml_dtypes.bfloat16}),
    "packed": ((16384, 16384), P(None, "x"), ml_dtypes.float4_e2m1fn, SMALL),
    "four bits": ((16384, 16384), P("x"), ml_dtypes.int4, SMALL),
    "fortran": ((8192, 8192), None, f4, {}),
    "flushed": ((8192, 8192), P(None, "x"), f4, {"fsync": True, "concurrency": 4}),
    "files": ((4096, 1024), P(None, "x"), f4, {"max_file_bytes": 1 << 24}),
    "files flushed": (
        (4096, 1024),
        P(None, "x"),
        f4,
        {"max_file_bytes": 1 << 24, "fsync": True, "concurrency": 8},
    ),
}[kind]


def make(shape):
    if spec is None:
        return np.ones(shape, dtype, order="F")
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), spec)
    return jax.make_array_from_callback(
        shape, sharding, lambda index: np.ones(sharding.shard_shape(shape), dtype)
    )


tree = {str(n): make(shape) for n in range(16 if "files" in kind else 1)}
jax.block_until_ready(tree)
warm = {"a": np.ones((1000, 1000)), "b": make((8, *[64] * (len(shape) - 1)))}
osl.save(folder + "/warm", warm, options=osl.WriteOptions(memory_budget_bytes=256))
gc.collect()
peak_memory.reset()
before = peak_memory.peak_bytes()
osl.save(folder + "/x", tree, options=osl.WriteOptions(**{"fsync": False, **options}))
print(peak_memory.peak_bytes() - before - options.get("memory_budget_bytes", 0))
