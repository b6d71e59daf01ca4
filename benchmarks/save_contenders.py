"""The ways to save a tree that are compared.

Names that end in `-fsync` leave the data on the disk, the others in the page cache. That is not
what each does when it is only called; seen with `strace` on orbax-checkpoint 0.12.8, tensorstore
0.1.86, torch 2.13 and safetensors 0.8:

- This package flushes unless told otherwise; so `ours-fsync` and `ours-async` are its defaults.
- OCDBT flushes every data file, every manifest and their folders (`file_io_sync` of TensorStore),
  though not Orbax's own JSON files; so `ocdbt-fsync` and `ocdbt-async` are its defaults, and
  `ocdbt` has the flushing taken out.
- `ours-files` limits files to 0.3 GB, as a model of many times 5 GB has many by default: a file
  system lets one thread at a time write into a file.
- DCP flushes the tensor file, not the folder; so `dcp-fsync` is its default.
- `safetensors` flushes nothing; `flax-fsync` flushes the file and its folder afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import safetensors.flax
import safetensors.numpy
from contenders import Tree

import orbax_safetensors_layout as osl

FILE = "model.safetensors"
_FILE_BYTES = 300_000_000

Wait = Callable[[], object]
Saver = Callable[[Path, Any], Wait | None]
"""Saves to a folder that does not exist; what it returns, if anything, waits for the end."""


class Contender(NamedTuple):
    """A way to save.

    Attributes:
        open: Makes the saver, once in a process and before the clock.
        result: What it writes: "safetensors", "sharded" (ours) or "orbax".
        torch: It is given torch tensors, which are views of unsharded arrays.
    """

    open: Callable[[], Saver]
    result: str
    torch: bool = False


def _ours(**options: Any) -> Saver:
    """This package."""
    chosen = osl.WriteOptions(**options)
    return lambda target, tree: osl.save(target, tree, options=chosen)


def _ours_async() -> Saver:
    """This package's handler in Orbax v0."""
    checkpointer = ocp.AsyncCheckpointer(osl.SafetensorsCheckpointHandler())

    def save(target: Path, tree: Tree) -> Wait:
        checkpointer.save(target, args=osl.SafetensorsSave(tree))
        return checkpointer.wait_until_finished

    return save


def _flax(*, flush: bool) -> Saver:
    """`safetensors.flax.save_file`, which gathers each array itself."""

    def save(target: Path, tree: Tree) -> None:
        target.mkdir()
        safetensors.flax.save_file(dict(tree), target / FILE)  # puts numpy arrays into its dict
        if flush:
            _flush(target / FILE)
            _flush(target)

    return save


def _numpy() -> Saver:
    """`safetensors.numpy.save_file` after a gather on the host."""

    def save(target: Path, tree: Tree) -> None:
        target.mkdir()
        safetensors.numpy.save_file(jax.device_get(tree), target / FILE)

    return save


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ocdbt(*, flush: bool) -> Saver:
    """Orbax's own format through its synchronous v0 checkpointer."""
    if not flush:
        _leave_out_flushes()
    checkpointer = ocp.PyTreeCheckpointer()

    def save(target: Path, tree: Tree) -> None:
        checkpointer.save(target, tree)

    return save


def _leave_out_flushes() -> None:
    """Has Orbax tell TensorStore not to flush in this process; no public option does."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT["file_io_sync"] = False


def _ocdbt_async() -> Saver:
    """Orbax's own format through its asynchronous v0 checkpointer."""
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(target: Path, tree: Tree) -> Wait:
        checkpointer.save(target, args=ocp.args.StandardSave(tree))
        return checkpointer.wait_until_finished

    return save


def _dcp(*, flush: bool) -> Saver:
    """torch DCP's Hugging Face writer in a single process."""
    import torch.distributed.checkpoint as dcp

    def save(target: Path, tensors: Mapping[str, Any]) -> None:
        writer = dcp.HuggingFaceStorageWriter(str(target))
        writer.sync_files = flush  # its constructor does not pass on `FileSystemWriter`'s option
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)

    return save


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "ours": Contender(lambda: _ours(fsync=False), "safetensors"),
        "ours-files": Contender(
            lambda: _ours(fsync=False, max_file_bytes=_FILE_BYTES), "safetensors"
        ),
        "ours-fsync": Contender(_ours, "safetensors"),
        "ours-sharded": Contender(lambda: _ours(fsync=False, layout="sharded"), "sharded"),
        "ours-async": Contender(_ours_async, "safetensors"),
        "flax": Contender(lambda: _flax(flush=False), "safetensors"),
        "flax-fsync": Contender(lambda: _flax(flush=True), "safetensors"),
        "numpy": Contender(_numpy, "safetensors"),
        "ocdbt": Contender(lambda: _ocdbt(flush=False), "orbax"),
        "ocdbt-fsync": Contender(lambda: _ocdbt(flush=True), "orbax"),
        "ocdbt-async": Contender(_ocdbt_async, "orbax"),
        "dcp": Contender(lambda: _dcp(flush=False), "safetensors", torch=True),
        "dcp-fsync": Contender(lambda: _dcp(flush=True), "safetensors", torch=True),
    }
)
