"""One timed load in a process of its own: `python child.py '<Job as JSON>'`.

The last line on stdout is the result, a JSON object.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pages
from cases import ITEMSIZE, Stored, data_files, stored_tensors

if TYPE_CHECKING:
    import jax

_SCALARS = "/jax/orbax/read/safetensors/"
_SPOT_CHECKS = 8

_HYPERVISOR_SECONDS = 3.0
"""After this, a virtual machine's free memory has gone back to the hypervisor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child has to do.

    Attributes:
        task: "load", or "save-ocdbt" to write what the `ocdbt` contender restores.
        contender: Who loads.
        split: A key of `contenders.SPLITS`.
        page_state: "warm", "cold", or "first": warm, with untouched memory and no load before.
        folder: The safetensors checkpoint.
        ocdbt: The Orbax checkpoint of the same tensors.
        warmup: A small safetensors checkpoint, loaded first so that no import is timed.
        warmup_ocdbt: The Orbax checkpoint of it.
        touch_bytes: Memory to touch and free just before.
        verify: "some" or "all" tensors are compared with the file's bytes.
    """

    task: str = "load"
    contender: str
    split: str
    page_state: str
    folder: str
    ocdbt: str
    warmup: str
    warmup_ocdbt: str
    touch_bytes: int
    verify: str

    @property
    def sources(self) -> tuple[Path, Path]:
        """What the contender loads, and what it warms up on."""
        if self.contender == "ocdbt":
            return Path(self.ocdbt), Path(self.warmup_ocdbt)
        return Path(self.folder), Path(self.warmup)


def main() -> None:
    """Does the job of the first argument."""
    set_up()
    job = Job(**json.loads(sys.argv[1]))
    result = save_ocdbt(job) if job.task == "save-ocdbt" else _load(job)
    print(json.dumps(result), flush=True)
    # Taking down 60,000 arrays, or orbax's threads, is nobody's business here.
    os._exit(0)


def set_up(platform: str = "cpu") -> None:
    """Chooses the devices, eight if they are CPU devices, before jax is imported."""
    # On a machine that runs out of memory, this process is the one to go.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if platform:
        os.environ["JAX_PLATFORMS"] = platform
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"


def save_ocdbt(job: Any) -> dict[str, Any]:
    """Makes the Orbax checkpoints of a `Job`, here or of `accelerator_child`, that are missing."""
    import contenders

    for source, target in ((job.warmup, job.warmup_ocdbt), (job.folder, job.ocdbt)):
        if not Path(target).exists():
            contenders.save_ocdbt(Path(source), Path(target), job.split)
    return {}


def _load(job: Job) -> dict[str, Any]:
    import contenders
    import jax

    load = contenders.CONTENDERS[job.contender]
    source, warmup = job.sources
    stored = stored_tensors(Path(job.folder))
    abstract = contenders.abstract_tree(stored, job.split)
    small = contenders.abstract_tree(stored_tensors(Path(job.warmup)), job.split)
    if job.page_state != "first":
        jax.block_until_ready(load(warmup, small))
    del small
    scalars = _listen()
    files = [path for path in source.rglob("*") if path.is_file()]
    result: dict[str, Any] = {"page_state": set_pages(job.page_state, files)}
    gc.collect()
    if job.page_state == "first":
        time.sleep(_HYPERVISOR_SECONDS)
    pages.touch_and_free(job.touch_bytes)
    result["resident_fraction"] = pages.resident_fraction(files)
    tree, took = timed(lambda: jax.block_until_ready(load(source, abstract)))
    result |= took | {"scalars": scalars}
    if job.contender != "odirect":
        result["verified"] = _verify(tree, abstract, stored, job.verify)
    result["file_bytes"] = sum(path.stat().st_size for path in data_files(Path(job.folder)))
    result["tensor_bytes"] = sum(nbytes(tensor) for tensor in stored.values())
    return result


def _listen() -> dict[str, float]:
    """Sums of the scalars that safetensors readers report from now on."""
    import jax

    scalars: dict[str, float] = {}

    def record(event: str, value: float | int, **_: str | int) -> None:
        if event.startswith(_SCALARS):
            key = event.removeprefix(_SCALARS)
            scalars[key] = scalars.get(key, 0.0) + float(value)

    jax.monitoring.register_scalar_listener(record)
    return scalars


def set_pages(page_state: str, files: Iterable[Path]) -> str:
    if page_state == "cold":
        return pages.evict(files)
    pages.warm(files)
    return "read through"


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What the work returns, and what it took."""
    pages.reset_peak()
    baseline = pages.resident_bytes()
    before = pages.Usage.now()
    start = time.perf_counter()
    found = work()
    wall = time.perf_counter() - start
    peak = pages.peak_bytes()
    after = pages.Usage.now()
    return found, {
        "wall_seconds": wall,
        **{key: end - begin for key, begin, end in zip(after._fields, before, after, strict=True)},
        "baseline_bytes": baseline,
        "peak_bytes": peak,
        "after_bytes": pages.resident_bytes(),
    }


def nbytes(tensor: Stored) -> int:
    """A tensor's bytes."""
    return int(np.prod(tensor.shape)) * ITEMSIZE[tensor.dtype]


def _verify(
    tree: Mapping[str, jax.Array],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    stored: Mapping[str, Stored],
    verify: str,
) -> int:
    """Compares arrays with the file, shard by shard; returns how many.

    Raises:
        AssertionError: A tensor is missing, or of another kind, sharding or value.
    """
    if set(tree) != set(stored):
        raise AssertionError(f"{len(tree)} tensors were loaded of {len(stored)}.")
    names = list(stored) if verify == "all" else spot_checks(stored)
    for name in names:
        array, want, at = tree[name], abstract[name], stored[name]
        if array.dtype != want.dtype or array.shape != want.shape:
            raise AssertionError(f"{name} is {array.shape} {array.dtype}, wanted {want}.")
        if not array.sharding.is_equivalent_to(want.sharding, array.ndim):
            raise AssertionError(f"{name} has {array.sharding}, wanted {want.sharding}.")
        assert_same_bits(
            name, array, np.memmap(at.file, f"u{want.dtype.itemsize}", "r", at.start, at.shape)
        )
    return len(names)


def spot_checks(stored: Mapping[str, Stored]) -> list[str]:
    """Names of a few tensors, the largest among them."""
    names = list(stored)
    largest = max(names, key=lambda name: nbytes(stored[name]))
    return sorted({largest, names[-1], *names[:: -(-len(names) // _SPOT_CHECKS)]})


def assert_same_bits(name: str, array: jax.Array, expected: np.ndarray) -> None:
    """Compares an array, shard by shard, with unsigned integers of its itemsize.

    Raises:
        AssertionError: A bit differs.
    """
    for shard in array.addressable_shards:
        # As integers, since random bits are often NaN.
        found = np.asarray(shard.data).view(expected.dtype)
        if not np.array_equal(found, expected[shard.index]):
            raise AssertionError(f"{name}{shard.index} differs from the file.")


if __name__ == "__main__":
    main()
