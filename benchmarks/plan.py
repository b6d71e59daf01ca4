#!/usr/bin/env python3
"""Times the planning alone of a DeepSeek-V3-sized load, for one process of 128.

    python benchmarks/plan.py
    python benchmarks/plan.py --model deepseek-dequantized    through `osl.dequantized`
    python benchmarks/plan.py --model kimi-dequantized        of Kimi-K2's size, packed to 4 bits

The checkpoint is an index, real headers and holes, so it takes no disk; the mesh is abstract, so
it takes no devices: 1,024 of them, (128, 8) over "fsdp" and "tensor". Matrices are split along
their inner dimension over as many of the mesh axes as divide it. The time of a plan through
`osl.dequantized` includes that of the mapping.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pages
from deepseek import (
    DEEPSEEK,
    FILES,
    INDEX_NAME,
    KIMI,
    Tensor,
    deepseek_tensors,
    kimi_tensors,
    make_index,
    plain_tensors,
)
from harness import BENCHMARKS, environment

if TYPE_CHECKING:
    import jax

MESH = (("fsdp", 128), ("tensor", 8))
PROCESS_INDEX, PROCESS_COUNT = 5, 128
MOST_BYTES = 300_000_000


class Model(NamedTuple):
    """A checkpoint, and what is loaded of it.

    Attributes:
        stored: Its tensors.
        loaded: Those of the tree; the stored ones, unless it is dequantised.
        config: Its `quantization_config`, where it is dequantised.
        most_seconds: What a plan may take.
    """

    stored: Callable[[], Iterable[Tensor]]
    loaded: Callable[[], Iterable[Tensor]]
    config: dict[str, Any] | None
    most_seconds: float


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.[gud].*"],
}
MODELS = {
    "deepseek": Model(deepseek_tensors, deepseek_tensors, None, 3.0),
    "deepseek-dequantized": Model(
        deepseek_tensors, functools.partial(plain_tensors, DEEPSEEK, more=True), _FP8, 10.0
    ),
    "kimi-dequantized": Model(
        kimi_tensors, functools.partial(plain_tensors, KIMI, more=False), _INT4, 10.0
    ),
}


def abstract_tree(tensors: Iterable[Tensor]) -> dict[str, jax.ShapeDtypeStruct]:
    """The flat tree of the whole model; leaves of equal spec share a sharding."""
    import jax
    import ml_dtypes
    import numpy as np
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    dtypes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    mesh = AbstractMesh(tuple(size for _, size in MESH), tuple(name for name, _ in MESH))
    by_shape: dict[tuple[int, ...], NamedSharding] = {}

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        if shape not in by_shape:
            outer = (None,) * (len(shape) - 1)
            by_shape[shape] = NamedSharding(mesh, PartitionSpec(*outer, dividing_axes(shape[-1])))
        return by_shape[shape]

    return {
        tensor.name: jax.ShapeDtypeStruct(
            tensor.shape, dtypes[tensor.dtype], sharding=sharding(tensor.shape)
        )
        for tensor in tensors
    }


def dividing_axes(dim: int) -> tuple[str, ...] | None:
    """The mesh axes with the most devices that divide a dimension evenly."""
    for axes in (MESH, MESH[:1], MESH[1:]):
        devices = 1
        for _, size in axes:
            devices *= size
        if dim % devices == 0:
            return tuple(name for name, _ in axes)
    return None


def measure(folder: Path, model: Model, replicated: str) -> dict[str, Any]:
    """Plans once in this process."""
    import orbax_safetensors_layout as osl

    process = {"process_index": PROCESS_INDEX, "process_count": PROCESS_COUNT}
    options = osl.ReadOptions(replicated=replicated)  # type: ignore[arg-type]

    # The first plan's imports are not its memory: an empty one loads the modules.
    osl.plan_load(folder, {}, options=options, **process)
    imported = pages.resident_bytes()
    abstract = abstract_tree(model.loaded())
    pages.reset_peak()
    baseline = pages.resident_bytes()
    before = os.times()
    start = time.perf_counter()
    mapping = osl.dequantized(folder) if model.config else None
    mapped = time.perf_counter()
    plan = osl.plan_load(folder, abstract, mapping=mapping, options=options, **process)
    seconds = time.perf_counter() - start
    after = os.times()
    return {
        "seconds": seconds,
        "mapping_seconds": mapped - start,
        "cpu_seconds": after.user + after.system - before.user - before.system,
        "imported_bytes": imported,
        "baseline_bytes": baseline,
        "peak_bytes": pages.peak_bytes(),
        "cost": str(plan.cost()),
    }


def main() -> None:
    """Makes the checkpoint and reports the median of several processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="where the sparse checkpoint is made, and kept")
    parser.add_argument("--model", choices=MODELS, default="deepseek")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--replicated", default="auto", help="of ReadOptions; by default %(default)s"
    )
    parser.add_argument("--json", type=Path, help="save the figures here")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, MODELS[options.model], options.replicated)))
        return
    root = options.dir or Path(tempfile.gettempdir()) / "osl-benchmark"
    folder = root / options.model
    model = MODELS[options.model]
    if not (folder / INDEX_NAME).exists():  # the index is written last
        folder.mkdir(parents=True, exist_ok=True)
        if model.config:
            (folder / "config.json").write_text(json.dumps({"quantization_config": model.config}))
        make_index(folder, model.stored(), files=FILES)
    runs = [_child(folder, options.model, options.replicated) for _ in range(options.repeat)]
    if options.json:
        options.json.write_text(json.dumps(runs, indent=1))
    _report(runs, model.most_seconds)


def _child(folder: Path, model: str, replicated: str) -> dict[str, Any]:
    program = [sys.executable, str(BENCHMARKS / "plan.py")]
    command = [*program, "--child", str(folder), "--model", model, "--replicated", replicated]
    of_child = environment() | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=of_child, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _report(runs: Sequence[dict[str, Any]], most_seconds: float) -> None:
    seconds = statistics.median(run["seconds"] for run in runs)
    peak = max(run["peak_bytes"] for run in runs)
    grown = max(run["peak_bytes"] - run["baseline_bytes"] for run in runs)
    print(runs[0]["cost"])
    imported = max(run["imported_bytes"] for run in runs)
    print(
        f"\nCPU {statistics.median(run['cpu_seconds'] for run in runs):.2f} s, the mapping"
        f" {statistics.median(run['mapping_seconds'] for run in runs):.2f} s of the time;"
        f" resident with jax and the package imported {imported / 1e6:.0f} MB,"
        f" with the abstract tree too {(peak - grown) / 1e6:.0f} MB"
    )
    for what, found, limit, unit in (
        ("planning", seconds, most_seconds, "s"),
        (
            "peak RSS above what jax, the package and the abstract tree hold",
            grown / 1e6,
            MOST_BYTES / 1e6,
            "MB",
        ),
        ("peak RSS of the whole process", peak / 1e6, MOST_BYTES / 1e6, "MB"),
    ):
        verdict = "PASS" if found < limit else "FAIL"
        print(f"{verdict} {what}: {found:.3g} {unit}, limit {limit:g} {unit}")


if __name__ == "__main__":
    main()
