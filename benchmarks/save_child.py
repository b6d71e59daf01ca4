"""One timed save in a process of its own: `python save_child.py '<Job as JSON>'`.

The last line on stdout is the result, a JSON object.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pages
from cases import Stored, stored_tensors
from child import nbytes, set_up, spot_checks, timed

if TYPE_CHECKING:
    from contenders import Tree
    from save_contenders import Contender, Saver


_TOUCHABLE = 0.8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child has to do.

    Attributes:
        contender: Who saves.
        split: A key of `contenders.SPLITS`.
        arrays: "loaded" or "jit"; see `results.SaveRow`.
        folder: The safetensors checkpoint that the arrays come from.
        warmup: A small one, saved first so that no import is timed.
        target: The folder to save to; removed before and after.
        touch_bytes: Memory to touch and free just before, as far as the machine has it.
        verify: "some" or "all" tensors are compared with the arrays.
    """

    contender: str
    split: str
    arrays: str
    folder: str
    warmup: str
    target: str
    touch_bytes: int
    verify: str


def main() -> None:
    """Does the job of the first argument."""
    set_up()
    result = _save(Job(**json.loads(sys.argv[1])))
    print(json.dumps(result), flush=True)
    # Taking down thousands of arrays, or orbax's threads, is nobody's business here.
    os._exit(0)


def _save(job: Job) -> dict[str, Any]:
    import save_checks
    from save_contenders import CONTENDERS

    contender = CONTENDERS[job.contender]
    saver = contender.open()
    target = Path(job.target)
    _remove(target)
    _, given = _values(contender, job, stored_tensors(Path(job.warmup)))
    _run(saver, target, given)
    _remove(target)
    stored = stored_tensors(Path(job.folder))
    # An array keeps what a save gathered on the host, so these are saved once and never again.
    arrays, given = _values(contender, job, stored)
    gc.collect()
    os.sync()
    pages.touch_and_free(min(job.touch_bytes, int(_TOUCHABLE * pages.available_bytes())))
    blocking, result = timed(lambda: _run(saver, target, given))
    result["blocking_seconds"] = blocking
    files = [path for path in target.rglob("*") if path.is_file()]
    result["files"] = len(files)
    result["file_bytes"] = sum(path.stat().st_size for path in files)
    result["tensor_bytes"] = sum(nbytes(tensor) for tensor in stored.values())
    names = list(stored) if job.verify == "all" else spot_checks(stored)
    result["verified"] = save_checks.verify(contender.result, target, arrays, names)
    _remove(target)
    return result


def _run(saver: Saver, target: Path, given: Any) -> float | None:
    """Saves; seconds until the caller may go on, of an asynchronous save."""
    start = time.perf_counter()
    wait = saver(target, given)
    if wait is None:
        return None
    blocking = time.perf_counter() - start
    wait()
    return blocking


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _values(contender: Contender, job: Job, stored: Mapping[str, Stored]) -> tuple[Tree, Any]:
    """The arrays of a checkpoint, and what the contender is given."""
    import contenders
    import jax

    abstract = contenders.abstract_tree(stored, job.split)
    if contender.torch:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = {name: leaf.update(sharding=one) for name, leaf in abstract.items()}
    folder = next(iter(stored.values())).file.parent
    arrays = contenders.ours(folder, abstract)
    if job.arrays == "jit":
        arrays = _computed(arrays)
    jax.block_until_ready(arrays)
    if not contender.torch:
        return arrays, arrays
    import torch

    return arrays, {name: torch.from_dlpack(array) for name, array in arrays.items()}


def _computed(arrays: Tree) -> Tree:
    """Arrays of other values that `jit` computed, each in place of the one it was computed from."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def inverted(array: jax.Array) -> jax.Array:
        integer = jnp.dtype(f"u{array.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(array, integer)
        return jax.lax.bitcast_convert_type(~bits, array.dtype)

    # One by one, so that the old and the new are never there together.
    return {name: inverted(arrays.pop(name)) for name in list(arrays)}


if __name__ == "__main__":
    main()
