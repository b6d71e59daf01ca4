#!/usr/bin/env python3
"""Compares how long a training step blocks with an export beside its state, and without.

    python benchmarks/export.py               2.3 GB
    python benchmarks/export.py --scale 0.1

A `CheckpointManager` saves the state, and in half of the steps the same parameters as an item that
transformers opens; what blocks is the call of `save`. On CPU devices arrays are where files are
written from; the second pair of lines lets them stand for devices with memory of their own, from
which arrays are copied first, by JAX's transfers to pinned memory. Lower quartiles are compared: a
machine's other work, and the files on their way to its disk, only add time. Exits with 1 where the
second ratio is above 1.1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.writing import host

MOST = 1.1


def blocking(folder, params, items):
    """The seconds that the second of two saves of such items blocks."""
    write = osl.WriteOptions(fsync=False, memory_budget_bytes=1 << 32)
    handlers = {name: osl.SafetensorsCheckpointHandler(write=write) for name in ("state", "hf")}
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        for step in range(2):
            trees = {"state": {"params": params, "step": step}, "hf": params}
            saved = {name: osl.SafetensorsSave(trees[name]) for name in items}
            began = time.perf_counter()
            manager.save(step, args=ocp.args.Composite(**saved))
            seconds = time.perf_counter() - began
            manager.wait_until_finished()
    return seconds


def main() -> int:
    """Prints a line for the state alone, and for both, in either kind of memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    rows = max(1, int(4096 * arguments.scale))
    key = jax.random.key(0)
    params = {f"w{n}": jax.random.normal(key, (rows, 8192), jnp.bfloat16) for n in range(35)}
    gigabytes = sum(leaf.nbytes for leaf in params.values()) / 1e9
    print(f"{gigabytes:.2f} GB on {jax.device_count()} {jax.default_backend()} devices")
    ratio = 0.0
    on_host = host._on_host
    for label in ("as they are", "copied first"):
        if label == "copied first":
            host._on_host = lambda array: False
        seen = {("state",): [], ("state", "hf"): []}
        for turn in range(arguments.rounds):
            for items, seconds in reversed(seen.items()) if turn % 2 else seen.items():
                with tempfile.TemporaryDirectory(dir=".") as folder:
                    seconds.append(blocking(Path(folder).absolute() / "run", params, items))
        alone, both = (statistics.quantiles(times, n=4)[0] for times in seen.values())
        ratio = both / alone
        print(
            f"{label:14} state {1e3 * alone:7.1f} ms  with export {1e3 * both:7.1f} ms  {ratio:.2f}"
        )
    host._on_host = on_host
    return int(ratio > MOST)


if __name__ == "__main__":
    sys.exit(main())
