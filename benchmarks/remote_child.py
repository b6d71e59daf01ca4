"""One timed load over HTTP in a process of its own: `python remote_child.py '<Job as JSON>'`.

The last line on stdout is the result, a JSON object.
"""

from __future__ import annotations

import dataclasses
import gc
import http.client
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pages
from cases import Stored, stored_tensors
from child import assert_same_bits, nbytes, set_up, spot_checks, timed

if TYPE_CHECKING:
    import jax

PROCESSES = 8
_PROCESS = 3
"""Which of the simulated processes is timed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a child has to do.

    Attributes:
        contender: "ours", or "builtin" for Orbax's own layout.
        split: A key of `contenders.SPLITS`, or "dim1-of-8": the columns that one of eight
            processes holds.
        folder: The checkpoint, as a local folder, to compare with.
        warmup: A small one beside it, loaded first so that no import is timed.
        port: Of the server, which serves the folder that both are in.
        latency_seconds: The server's.
        bandwidth: Bytes a second of one stream.
        streams: Requests at once.
        touch_bytes: Memory to touch and free just before.
    """

    contender: str
    split: str
    folder: str
    warmup: str
    port: int
    latency_seconds: float
    bandwidth: float
    streams: int
    touch_bytes: int


def main() -> None:
    """Does the job of the first argument."""
    set_up()
    job = Job(**json.loads(sys.argv[1]))
    import jax

    load = {"ours": _ours, "builtin": _builtin}[job.contender](job)
    jax.block_until_ready(load(Path(job.warmup)))
    stored = stored_tensors(Path(job.folder))
    _stats(job)
    gc.collect()
    pages.touch_and_free(job.touch_bytes)
    tree, result = timed(lambda: jax.block_until_ready(load(Path(job.folder))))
    result |= _stats(job)
    result["tensor_bytes"] = sum(nbytes(tensor) for tensor in stored.values())
    result["verified"] = _verify(tree, stored, job.split)
    print(json.dumps(result), flush=True)
    os._exit(0)


def _stats(job: Job) -> dict[str, int]:
    """What the server has sent since it was asked last."""
    connection = http.client.HTTPConnection("127.0.0.1", job.port)
    connection.request("GET", "/stats")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return {f"{key}_sent": found.get(key, 0) for key in ("bytes", "requests", "connections")}


def _ours(job: Job) -> Callable[[Path], dict[str, jax.Array]]:
    from contenders import abstract_tree

    import orbax_safetensors_layout as osl

    options = osl.ReadOptions(
        concurrency=job.streams,
        latency_seconds={"https": job.latency_seconds},
        bandwidth_bytes_per_second={"https": job.bandwidth},
    )

    def load(folder: Path) -> Any:
        url, stored = f"http://127.0.0.1:{job.port}/{folder.name}", stored_tensors(folder)
        if job.split == "dim1-of-8":
            abstract, mapping = _columns(stored)
            return osl.load(url, abstract, mapping=mapping, options=options)
        return osl.load(url, abstract_tree(stored, job.split), options=options)

    return load


def _columns(stored: Mapping[str, Stored]) -> tuple[Any, Any]:
    """What one process holds of tensors that eight share by columns, as a tree and a mapping."""
    import jax

    import orbax_safetensors_layout as osl

    abstract, rules = {}, []
    for name, tensor in stored.items():
        expression = osl.tensor(name)
        cut = _cut(tensor.shape)
        if cut is not None:
            expression = expression.slice(1, cut.start, cut.stop)
        shape = tuple(np.empty(tensor.shape, np.bool_)[:, cut].shape) if cut else tensor.shape
        abstract[name] = jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16)
        rules.append(osl.rule(name, expression))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {name: leaf.update(sharding=device) for name, leaf in abstract.items()}
    return abstract, osl.Mapping(rules)


def _cut(shape: tuple[int, ...]) -> slice | None:
    """The process's columns; None where it holds all."""
    if len(shape) < 2 or shape[1] % PROCESSES:
        return None
    width = shape[1] // PROCESSES
    return slice(_PROCESS * width, (_PROCESS + 1) * width)


def _builtin(job: Job) -> Callable[[Path], dict[str, jax.Array]]:
    import contenders
    import far_files
    import orbax.checkpoint.experimental.v1 as ocp

    far_files.register(Path(job.folder).parent, job.port)

    def load(folder: Path) -> Any:
        abstract = contenders.abstract_tree(stored_tensors(folder), job.split)
        with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
            return ocp.load(f"hf://{folder.name}", abstract)

    return load


def _verify(tree: Mapping[str, jax.Array], stored: Mapping[str, Stored], split: str) -> int:
    """Compares some arrays with the file; returns how many."""
    names = spot_checks(stored)
    for name in names:
        at = stored[name]
        expected = np.memmap(at.file, "u2", "r", at.start, at.shape)
        cut = _cut(at.shape) if split == "dim1-of-8" else None
        assert_same_bits(name, tree[name], expected if cut is None else expected[:, cut])
    return len(names)


if __name__ == "__main__":
    main()
