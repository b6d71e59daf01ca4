import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import orbax_safetensors_layout as osl

_DIM = 512
_KEPT = ocp.training.preservation_policies.LatestN(2)


def main(root: str, cycles: int, every: int) -> None:
    """Save a step, an export and a version, load each again, and print what the process holds."""
    folder = Path(root)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, P("x", "y"))
    mapping = osl.Mapping(
        [osl.rule("layers", osl.stack(osl.tensor("layer.{i}.weight").transpose(), over="i"))]
    )
    params = {
        f"layer.{n}.weight": jax.device_put(jnp.full((_DIM, _DIM), n, jnp.float32), sharding)
        for n in range(8)
    }
    training = ocp.training.Checkpointer(
        folder / "run", context=osl.context("state"), preservation_policy=_KEPT
    )
    with training:
        for cycle in range(1, cycles + 1):
            name = f"layer.{cycle % 8}.weight"
            params[name] = params[name].at[cycle % _DIM, 3].set(cycle)
            training.save_async(cycle, {"params": params, "step": cycle}).result()
            state = training.load(cycle, {"params": params, "step": 0})
            osl.save(folder / "export", params, overwrite=True)
            stacked = osl.load(folder / "export", mapping=mapping)["layers"]
            for number, (key, value) in enumerate(params.items()):
                expected = np.asarray(value)
                same(state["params"][key], expected)
                same(stacked[number], expected.T)
            if cycle % every == 0:
                threads = threading.active_count()
                descriptors = len(os.listdir("/proc/self/fd"))
                print(cycle, resident_bytes(), descriptors, threads, flush=True)


def same(value, expected):
    np.testing.assert_array_equal(np.asarray(value), expected)


def resident_bytes() -> int:
    """The process's memory now, not its peak."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
