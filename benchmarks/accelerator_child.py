"""One timed load or save on any devices, in a process of its own.

`python accelerator_child.py '<Job as JSON>'`; the last line on stdout is the result, a JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pages
from cases import stored_tensors
from child import nbytes, save_ocdbt, set_pages, set_up, timed

BUDGET_BYTES = 256 << 20
"""The memory budget of this package's loads and saves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child has to do.

    Attributes:
        platform: The devices, as JAX names them; empty for what it finds.
        task: "load", "save", or "save-ocdbt" to write what the load of `ocdbt` restores.
        contender: Who loads or saves.
        way: A key of `accelerator_contenders.WAYS`.
        split: A key of `contenders.SPLITS` or, through a mapping, of `mapping_contenders.SPLITS`.
        page_state: "warm" or "cold".
        folder: The safetensors checkpoint.
        ocdbt: The Orbax checkpoint of the same tensors.
        warmup: A small safetensors checkpoint, loaded first so that no import is timed.
        warmup_ocdbt: The Orbax checkpoint of it.
        target: Where it is saved to.
        touch_bytes: Memory to touch and free just before.
        verify: Compare all leaves, not some.
    """

    platform: str
    task: str
    contender: str
    way: str
    split: str
    page_state: str
    folder: str
    ocdbt: str
    warmup: str
    warmup_ocdbt: str
    target: str
    touch_bytes: int
    verify: bool


def main() -> None:
    """Does the job of the first argument."""
    job = Job(**json.loads(sys.argv[1]))
    set_up(job.platform)
    do = {"load": _load, "save": _save, "save-ocdbt": save_ocdbt}[job.task]
    print(json.dumps(do(job)), flush=True)
    os._exit(0)


def _load(job: Job) -> dict[str, Any]:
    import accelerator_contenders as ways
    import jax

    prepare = ways.LOADS[job.contender]
    is_ocdbt = job.contender == "ocdbt"
    warmup, small = Path(job.warmup), ways.abstract_tree(job.way, Path(job.warmup), job.split)
    given = Path(job.warmup_ocdbt) if is_ocdbt else warmup
    jax.block_until_ready(prepare(given, job.way, small)())
    folder = Path(job.folder)
    abstract = ways.abstract_tree(job.way, folder, job.split)
    source = Path(job.ocdbt) if is_ocdbt else folder
    load = prepare(source, job.way, abstract)
    files = [path for path in source.rglob("*") if path.is_file()]
    result: dict[str, Any] = {"page_state": set_pages(job.page_state, files)}
    gc.collect()
    pages.touch_and_free(job.touch_bytes)
    result["resident_fraction"] = pages.resident_fraction(files)
    tree, took = timed(lambda: jax.block_until_ready(load()))
    result |= took | ways.device_figures(tree)
    if job.contender != "device_put":
        ways.verify(job.way, folder, tree, abstract, all_leaves=job.verify)
    return result


def _save(job: Job) -> dict[str, Any]:
    import accelerator_contenders as ways
    import jax

    save, target = ways.SAVES[job.contender](), Path(job.target)
    result: dict[str, Any] = {}
    for folder in (Path(job.warmup), Path(job.folder)):
        abstract = ways.abstract_tree(job.way, folder, job.split)
        tree = jax.block_until_ready(ways.LOADS["ours"](folder, job.way, abstract)())
        shutil.rmtree(target, ignore_errors=True)
        gc.collect()
        os.sync()
        pages.touch_and_free(job.touch_bytes)
        _, result = timed(functools.partial(save, target, job.way, tree))
        result |= ways.device_figures(tree)
    if job.contender == "ours":
        _verify_files(Path(job.folder), target)
    shutil.rmtree(target, ignore_errors=True)
    return result


def _verify_files(source: Path, target: Path) -> None:
    """Compares what was saved with what the arrays were loaded from.

    Raises:
        AssertionError: A tensor is missing, or of another shape or value.
    """
    stored, saved = stored_tensors(source), stored_tensors(target)
    assert set(stored) == set(saved), f"{len(saved)} tensors were saved of {len(stored)}"
    for name, before in stored.items():
        after = saved[name]
        assert (before.shape, before.dtype) == (after.shape, after.dtype), name
        old, new = (np.memmap(t.file, "u1", "r", t.start, nbytes(t)) for t in (before, after))
        assert np.array_equal(old, new), name


if __name__ == "__main__":
    main()
