"""One timed load, or save, in a process of its own: `python mapping_child.py '<Job as JSON>'`.

The last line on stdout is the result, a JSON object.
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
from cases import data_files, stored_tensors
from child import assert_same_bits, nbytes, set_up, timed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child has to do.

    Attributes:
        contender: Who loads, or saves.
        case: A key of `mapping_contenders.MODELS`.
        split: A key of `mapping_contenders.SPLITS`.
        folder: The checkpoint.
        warmup: A small one of the same names, loaded first so that no import is timed.
        target: Where it is saved to.
        touch_bytes: Memory to touch and free just before.
        verify: Compare all leaves.
    """

    contender: str
    case: str
    split: str
    folder: str
    warmup: str
    target: str
    touch_bytes: int
    verify: bool


def main() -> None:
    """Does the job of the first argument."""
    set_up()
    job = Job(**json.loads(sys.argv[1]))
    print(json.dumps(_save(job) if job.contender.endswith("-save") else _load(job)), flush=True)
    os._exit(0)


def _load(job: Job) -> dict[str, Any]:
    import jax
    import mapping_contenders as ways

    model, load = ways.MODELS[job.case], ways.CONTENDERS[job.contender]
    tree = ways.plain_tree if job.contender == "plain" else ways.model_tree
    small = ways.grids(model, stored_tensors(Path(job.warmup)))
    jax.block_until_ready(load(Path(job.warmup), model, tree(model, small, job.split)))
    stored = stored_tensors(Path(job.folder))
    found = ways.grids(model, stored)
    abstract = tree(model, found, job.split)
    files = data_files(Path(job.folder))
    pages.warm(files)
    gc.collect()
    pages.touch_and_free(job.touch_bytes)
    arrays, result = timed(lambda: jax.block_until_ready(load(Path(job.folder), model, abstract)))
    if job.contender != "plain":
        for leaf in model if job.verify else ("layers.q", "layers.down"):
            assert arrays[leaf].sharding.is_equivalent_to(
                abstract[leaf].sharding, arrays[leaf].ndim
            )
            assert_same_bits(leaf, arrays[leaf], ways.expected(model[leaf], found[leaf]))
    result["file_bytes"] = sum(path.stat().st_size for path in files)
    result["tensor_bytes"] = sum(nbytes(tensor) for tensor in stored.values())
    return result


def _save(job: Job) -> dict[str, Any]:
    import jax
    import mapping_contenders as ways

    model, save = ways.MODELS[job.case], ways.SAVES[job.contender]
    way = job.contender.removesuffix("-save")
    tree, load = (ways.plain_tree if way == "plain" else ways.model_tree), ways.CONTENDERS[way]
    target = Path(job.target)
    for folder in (Path(job.warmup), Path(job.folder)):
        stored = stored_tensors(folder)
        arrays = load(folder, model, tree(model, ways.grids(model, stored), job.split))
        jax.block_until_ready(arrays)
        shutil.rmtree(target, ignore_errors=True)
        gc.collect()
        pages.touch_and_free(job.touch_bytes)
        _, result = timed(functools.partial(save, target, model, arrays))
    saved = stored_tensors(target)
    assert set(saved) == set(stored)
    for name in stored if job.verify else sorted(stored)[:8]:
        old, new = (
            np.memmap(t.file, "u1", "r", t.start, nbytes(t)) for t in (stored[name], saved[name])
        )
        assert np.array_equal(old, new), name
    shutil.rmtree(target)
    result["tensor_bytes"] = sum(nbytes(tensor) for tensor in stored.values())
    return result


if __name__ == "__main__":
    main()
