"""Each call to the system that an operation makes fails once: it succeeds, or says what failed.

What stands then is what stood before, or what was asked for; and the same call again succeeds.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import layers_of

import orbax_safetensors_layout as osl

CALLS = (
    "open", "stat", "lstat", "fstat", "listdir", "scandir", "preadv", "pread", "pwritev", "pwrite",
    "write", "ftruncate", "fsync", "replace", "rename", "link", "mkdir", "unlink", "rmdir", "chmod",
    "close",
)  # fmt: skip
every = pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.soak)])
FEW = osl.WriteOptions(max_file_bytes=12_100)  # a file for each tensor
PIECES = osl.WriteOptions(layout="sharded")


class OneFailure:
    """Within the block one call fails, by its number; `failed` is which, once it has."""

    def __init__(self, number):
        self._left = number
        self._lock = threading.Lock()
        self.failed = None

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        for name in CALLS:
            self._patch.setattr(os, name, self._failing(name, getattr(os, name)))
        return self

    def __exit__(self, *_):
        self._patch.undo()

    def _failing(self, name, real):
        def call(*arguments, **keywords):
            if name == "close" and not has_tensors(*arguments):
                return real(*arguments)
            with self._lock:
                fails = self._left == 0
                self._left -= 1
            if fails:
                if name == "close":  # which closes even if it fails
                    real(*arguments)
                self.failed = f"{name} {arguments[:1]}"
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **keywords)

        return call


def has_tensors(fd):
    """Whether a descriptor writes tensors; that of a lock or a journal has nothing to lose."""
    is_written = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    return is_written and ".safetensors" in os.readlink(f"/proc/self/fd/{fd}")


def as_bytes(tensors):
    return {name: np.asarray(value).tobytes() for name, value in tensors.items()}


def stored(folder):
    assert osl.verify(folder).ok
    return as_bytes(osl.load(folder))


OLD, NEW = as_bytes(layers_of(0)), as_bytes(layers_of(1))
ARRAYS = {name: jnp.asarray(value) for name, value in layers_of(0).items()}


def nothing(root):
    root.mkdir()


def saved(root):
    osl.save(root / "x", layers_of(0), options=FEW)


def saved_in_pieces(root):
    osl.save(root / "x", layers_of(1), options=PIECES)


def with_source(root):
    saved(root)
    osl.save(root / "source", layers_of(1), options=FEW)


def save(options, overwrite=True):
    return lambda root: osl.save(root / "x", layers_of(1), options=options, overwrite=overwrite)


def convert(form):
    return lambda root: osl.convert(root / "source", root / "x", format=form, overwrite=True)


WRITES = {
    "save": (nothing, save(FEW, overwrite=False)),
    "save over another": (saved, save(FEW)),
    "save in pieces": (saved, save(PIECES)),
    "convert": (with_source, convert("hf")),
    "convert to pieces": (with_source, convert("sharded")),
    "consolidate": (saved_in_pieces, lambda root: osl.consolidate(root / "x", options=FEW)),
}


def ended(act, place):
    """The error of a call as text, and whether it is one of the package's; None without one."""
    try:
        act(place)
    except Exception as error:
        return repr(error), isinstance(error, osl.SafetensorsLayoutError)


def more_descriptors(before):
    """Whether more are open than before, also when what is unreachable is gone."""
    if len(os.listdir("/proc/self/fd")) > before:
        gc.collect()
    return len(os.listdir("/proc/self/fd")) > before


def each_failure(first, root, act, step):
    """Yields a place for each call that fails, how it ended, and a list for what is wrong."""
    shutil.copytree(first, root / "warm")
    act(root / "warm")
    wrong, survived = [], 0
    for number in range(0, 2000, step):
        place, said = root / str(number), []
        shutil.copytree(first, place)
        before = len(os.listdir("/proc/self/fd"))
        with OneFailure(number) as failure:
            ending = ended(act, place)
        if failure.failed is None:
            assert ending is None
            break
        survived += ending is None
        if ending is not None and not ending[1]:
            said.append("another error")
        if more_descriptors(before):
            said.append("a descriptor is left open")
        yield place, ending, said
        wrong += [f"{number} {failure.failed}: {text}; {ending}" for text in said]
        shutil.rmtree(place)
    assert not wrong, "\n".join(wrong)
    assert survived < number
    assert survived or step > 1  # of some calls perhaps none may fail


@every
@pytest.mark.parametrize("name", WRITES)
def test_one_call_of_a_write_fails(tmp_path, name, step):
    prepare, act = WRITES[name]
    prepare(tmp_path / "first")
    expected = {path.name for path in (tmp_path / "first").iterdir()} | {"x"}
    before = [OLD] if (tmp_path / "first" / "x").exists() else []
    again = save(FEW) if name == "save" else act
    for place, ending, said in each_failure(tmp_path / "first", tmp_path / "runs", act, step):
        allowed = [*before, NEW] if ending else [NEW]
        if (before or (place / "x").exists()) and stored(place / "x") not in allowed:
            said.append("other contents")
        if second := ended(again, place):
            said.append(f"the same again: {second[0]}")
        elif stored(place / "x") != NEW:
            said.append("other contents the second time")
        if left := {path.name for path in place.iterdir()} - expected:
            said.append(f"left {sorted(left)}")


READS = {
    "load": (saved, lambda root: osl.load(root / "x")),
    "load of jax arrays": (saved, lambda root: osl.load(root / "x", ARRAYS)),
    "load of pieces": (saved_in_pieces, lambda root: osl.load(root / "x")),
}


@every
@pytest.mark.parametrize("name", READS)
def test_one_call_of_a_read_fails(tmp_path, name, step):
    prepare, act = READS[name]
    prepare(tmp_path / "first")
    seen = []

    def read(root):
        seen.clear()
        seen[:] = [as_bytes(act(root))]

    read(tmp_path / "first")
    [expected] = seen
    for place, ending, said in each_failure(tmp_path / "first", tmp_path / "runs", read, step):
        if ending is None and seen != [expected]:
            said.append("other contents")
        if second := ended(read, place):
            said.append(f"the same again: {second[0]}")
