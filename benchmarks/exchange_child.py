"""One process of a cluster that times loads: `python exchange_child.py '<Job as JSON>'`.

The last line on stdout is the result, a JSON list: for each load the seconds of this process and
the bytes that it read.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process has to do.

    Attributes:
        coordinator: Address of process 0.
        process: Number of this one.
        processes: How many there are.
        devices: Of each.
        loads: Path, case and value of `ReadOptions.replicated` of each load, in turn.
        options: Other fields of `ReadOptions`.
    """

    coordinator: str
    process: int
    processes: int
    devices: int
    loads: list[tuple[str, str, str]]
    options: dict[str, Any]


def specs(case: str) -> Any:
    """The partition of a tensor of a shape, for a mesh of `data` and `fsdp`."""
    both = ("data", "fsdp")

    def spec(shape: tuple[int, ...]) -> tuple[Any, ...]:
        matrix = len(shape) > 1
        return {
            "replicated": (),
            "tiny": (),
            "dim0": (both,),
            "partly": ("fsdp",),
            "columns": (None, both) if matrix else (),
            "partly-columns": (None, "fsdp") if matrix else (),
            "2d": ("data", "fsdp") if matrix else (),
            "mapped": (both,) if matrix else (),
            "mixed": (both,) if matrix and shape[0] > shape[1] else (None, both) * matrix,
        }[case]

    return spec


def main() -> None:
    """Runs the loads of the first argument."""
    job = Job(**json.loads(sys.argv[1]))
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.devices}"
    import jax

    jax.distributed.initialize(job.coordinator, job.processes, job.process)
    from jax._src import distributed

    import orbax_safetensors_layout as osl

    client: Any = distributed.global_state.client
    read: list[float] = []
    jax.monitoring.register_scalar_listener(
        lambda event, value, **_: event.endswith("safetensors/bytes_read") and read.append(value)
    )
    results = []
    for number, (path, case, replicated) in enumerate(job.loads):
        abstract, mapping = _abstract(path, case)
        options = osl.ReadOptions(replicated=replicated, **job.options)  # type: ignore[arg-type]
        jax.clear_caches()
        gc.collect()
        client.wait_at_barrier(f"load {number}", 600_000)
        if not path.startswith("http"):
            if job.process == 0:
                pages.evict(Path(path).iterdir())
            pages.touch_and_free(sum(map(_bytes_of_shards, abstract.values())))
        client.wait_at_barrier(f"touched {number}", 600_000)
        began = time.perf_counter()
        tree = jax.block_until_ready(osl.load(path, abstract, mapping=mapping, options=options))
        seconds = time.perf_counter() - began
        # Memory that is given back slows a process down of which others still want a word.
        client.wait_at_barrier(f"loaded {number}", 600_000)
        del tree
        results.append((seconds, read[-1]))
    print(json.dumps(results), flush=True)
    client.wait_at_barrier("end", 600_000)  # without process 0 the others end with an error
    time.sleep(job.process == 0)  # until they know
    os._exit(0)


def _bytes_of_shards(leaf: Any) -> int:
    """Return the bytes of what this process's devices hold of a leaf."""
    shards = len(leaf.sharding.addressable_devices)
    return shards * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _abstract(path: str, case: str) -> tuple[Any, Any]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import orbax_safetensors_layout as osl

    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, -1), ("data", "fsdp"))
    spec, tree, rules = specs(case), {}, []
    for name, tensor in osl.metadata(path).items():
        shape, expression = tensor.shape, osl.tensor(name)
        if case == "mapped" and len(shape) > 1:
            shape, expression = shape[::-1], expression.transpose()
        sharding = NamedSharding(mesh, PartitionSpec(*spec(shape)))
        tree[name] = jax.ShapeDtypeStruct(shape, tensor.dtype, sharding=sharding)
        rules.append(osl.rule(name, expression))
    return tree, osl.Mapping(rules) if case == "mapped" else None


if __name__ == "__main__":
    main()
