"""Caller's buffers, filled one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from orbax_safetensors_layout.errors import TruncatedFileError

from .base import Buffer


def skip(buffers: Sequence[Buffer], count: int) -> Sequence[Buffer]:
    """`buffers` without their first `count` bytes."""
    if not count:
        return buffers
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []


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
    """Copies chunks, as they come, into buffers, one after the other.

    Args:
        buffers: Where to.
        chunks: Objects with the buffer protocol. What does not fit is not copied.

    Returns:
        Bytes of all chunks; another number than of the buffers is a body of the wrong length.
    """
    got = 0
    rest = buffers
    for chunk in chunks:
        data = memoryview(chunk)  # type: ignore[arg-type]  # whatever has the buffer protocol
        scatter(data, rest)
        rest = skip(rest, len(data))
        got += len(data)
    return got


def truncated(file: str, offset: int, total: int, end: int) -> TruncatedFileError:
    """The error for a range that a file does not have.

    Args:
        file: The file.
        offset: The range's first byte.
        total: Its bytes.
        end: Where the file ends.
    """
    return TruncatedFileError(
        "the file is truncated",
        file=file,
        expected=f"bytes [{offset}, {offset + total})",
        found=f"end of file at {end}",
        hint="Copy the file again; it is shorter than its header says.",
    )
