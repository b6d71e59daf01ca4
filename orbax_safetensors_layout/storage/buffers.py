"""Caller's buffers, filled or emptied one after the other; arrays that are read as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from orbax_safetensors_layout.errors import StorageError, TruncatedFileError
from orbax_safetensors_layout.runtime import Bytes

from .base import Buffer, RangeReader

_MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))


class MemoryReader(RangeReader):
    """Reads arrays of bytes as if each were a file of its name."""

    kind = "local"

    def __init__(self, arrays: Mapping[str, Bytes]) -> None:
        self._arrays = arrays

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        scatter(self._arrays[file].data[offset:], buffers)

    def check_unchanged(self, file: str) -> None:
        return


def skip(buffers: Sequence[Buffer], count: int) -> Sequence[Buffer]:
    """Return `buffers` without their first `count` bytes."""
    if not count:
        return buffers
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []


def cut_out(buffers: Sequence[Buffer], start: int, stop: int) -> list[Buffer]:
    """Return the bytes `start` to `stop` of `buffers`, as parts of these."""
    parts = []
    for buffer in skip(buffers, start):
        parts.append(buffer[: stop - start])
        start += len(parts[-1])
        if start == stop:
            break
    return parts


def scatter(data: memoryview, buffers: Sequence[Buffer]) -> None:
    """Copies `data` into `buffers`, one after the other."""
    for buffer in buffers:
        if not data:
            return
        count = min(len(data), len(buffer))
        # numpy's copy lets other threads run; a memoryview's does not.
        np.copyto(np.frombuffer(buffer[:count], np.uint8), np.frombuffer(data[:count], np.uint8))
        data = data[count:]


def fill(buffers: Sequence[Buffer], chunks: Iterable[object]) -> int:
    """Copies chunks into buffers; returns the bytes of all chunks, also those that did not fit."""
    copied = 0
    for chunk in chunks:
        data = memoryview(chunk)  # type: ignore[arg-type]  # whatever has the buffer protocol
        scatter(data, buffers)
        buffers = skip(buffers, len(data))
        copied += len(data)
    return copied


def transfer(
    call: Callable[[int, Sequence[Buffer], int], int],
    fd: int,
    offset: int,
    buffers: Sequence[Buffer],
) -> int:
    """Calls `os.preadv` or `os.pwritev` until it moves nothing more; returns the bytes moved."""
    total = sum(map(len, buffers))
    done = 0
    while done < total:
        count = call(fd, skip(buffers, done)[:_MAX_BUFFERS], offset + done)
        if not count:
            break
        done += count
    return done


def truncated(file: str, offset: int, total: int, end: int) -> TruncatedFileError:
    """Return the error for a range of `total` bytes, in a file that ends at `end`."""
    return TruncatedFileError(
        "the file is truncated",
        file=file,
        expected=f"bytes [{offset}, {offset + total})",
        found=f"end of file at {end}",
        hint="Copy the file again; it is shorter than its header says.",
    )


def changed(file: str, expected: str, found: str, during: str = "it was read") -> StorageError:
    """Return the error for a file that is no longer what it was when it was first read."""
    return StorageError(
        f"the file was changed, replaced or removed while {during}",
        file=file,
        expected=expected,
        found=found,
        hint="Load again when nothing writes to the checkpoint.",
    )
