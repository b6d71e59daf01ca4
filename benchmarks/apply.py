#!/usr/bin/env python3
"""Compares mappings on arrays in memory with a plain copy of the same arrays on their devices.

    python benchmarks/apply.py                        Llama's layers of 2.3 GB, fsdp
    python benchmarks/apply.py --split tensor --scale 0.1

What is timed is a call, until all its results are ready, on eight CPU devices or the machine's
accelerators; of these also the time in which they compute or copy, by JAX's profiler. Each
direction is compared with a copy of the arrays that it gives; all take turns. The first call of
each, which compiles, is told apart. JAX refuses copies to the host meanwhile. Exits with 1 where a
direction takes more than twice as long as its copy: the devices' time, if it is known.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = flags.strip()

import jax
import jax.numpy as jnp
from cases import CASES, Stored
from mapping_contenders import MODELS, SPLITS, grids, mapping_of, model_tree, plain_tree

MOST = 2.0


def seconds(call):
    """The seconds of a call, and its results, once they are ready."""
    began = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - began, result


def device_seconds(call, rounds):
    """The seconds of a call in which an accelerator is busy; None of CPU devices."""
    if jax.default_backend() == "cpu":
        return None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                jax.block_until_ready(call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        spans = sorted(
            (event.start_ns, event.end_ns)
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            if plane.name.startswith("/device:")
            for line in plane.lines
            if line.name.startswith(("Stream", "XLA Modules"))  # of GPUs and of TPUs
            for event in line.events
        )
    busy = end = 0
    for start, stop in spans:
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e9 / rounds


def main() -> int:
    """Prints a line for each direction, and for the copy of what it gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--split", choices=SPLITS, default="fsdp")
    arguments = parser.parse_args()
    model = MODELS["llama"]
    tensors = [*CASES["llama"].tensors(arguments.scale)]
    found = grids(model, {t.name: Stored(Path(), 0, t.shape, t.dtype) for t in tensors})
    held = plain_tree(model, found, arguments.split)
    leaves = model_tree(model, found, arguments.split)
    mapping = mapping_of(model)
    make = jax.jit(
        lambda key, like: jax.random.bits(key, like.shape, jnp.uint16).view(jnp.bfloat16),
        static_argnums=1,
    )
    arrays = {
        name: jax.device_put(make(jax.random.key(number), leaf), leaf.sharding)
        for number, (name, leaf) in enumerate(held.items())
    }
    shardings = {name: leaf.sharding for name, leaf in held.items()}
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    tree = mapping.apply(arrays, leaves)
    calls = {
        "copy of the tree": lambda: copy(tree),
        "apply": lambda: mapping.apply(arrays, leaves),
        "copy of the tensors": lambda: copy(arrays),
        "unapply": lambda: mapping.unapply(tree, shardings),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    compiled = {name: seconds(call)[0] for name, call in calls.items()}
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                took, result = seconds(call)
                times[name].append(took)
                del result
    for name, array in calls["unapply"]().items():
        assert array.sharding.is_equivalent_to(shardings[name], array.ndim), name
        same = jax.jit(lambda a, b: (a.view(jnp.uint16) == b.view(jnp.uint16)).all())
        assert bool(same(array, arrays[name])), name
    on_device = {name: device_seconds(call, arguments.rounds) for name, call in calls.items()}
    nbytes = sum(array.nbytes for array in arrays.values())
    print(f"{nbytes / 1e9:.2f} GB, {len(arrays)} tensors, {jax.device_count()} devices")
    failed = False
    copied = copied_on_device = 0.0
    for name, took in times.items():
        busy = on_device[name]
        if name.startswith("copy"):
            copied, copied_on_device = min(took), busy
        ratio = min(took) / copied
        text = (
            f"{name:<20} {1e3 * statistics.median(took):.2f} ms, least {1e3 * min(took):.2f},"
            f" {ratio:.2f} of the copy; the first call {compiled[name]:.2f} s"
        )
        if busy:
            ratio = busy / copied_on_device
            text += f"; busy {1e3 * busy:.2f} ms, {ratio:.2f} of the copy"
        failed |= ratio > MOST
        print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
