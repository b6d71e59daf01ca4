"""One timed load in a process of its own: `python mapping_child.py '<Job as JSON>'`.

The last line on stdout is the result, a JSON object.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import pages
from cases import data_files, stored_tensors
from child import assert_same_bits, nbytes, set_up, timed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child has to do.

    Attributes:
        contender: Who loads.
        case: A key of `mapping_contenders.MODELS`.
        split: A key of `mapping_contenders.SPLITS`.
        folder: The checkpoint.
        warmup: A small one of the same names, loaded first so that no import is timed.
        touch_bytes: Memory to touch and free just before.
        verify: Compare all leaves.
    """

    contender: str
    case: str
    split: str
    folder: str
    warmup: str
    touch_bytes: int
    verify: bool


def main() -> None:
    """Does the job of the first argument."""
    set_up()
    print(json.dumps(_load(Job(**json.loads(sys.argv[1])))), flush=True)
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


if __name__ == "__main__":
    main()
