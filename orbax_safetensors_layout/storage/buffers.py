"""Sequences of buffers that stand for one range of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_safetensors_layout.storage.base import Buffer


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
    """Copies `data` into `buffers`, one after the other, as far as there is room."""
    for buffer in buffers:
        if not data:
            return
        count = min(len(data), len(buffer))
        # numpy's copy lets other threads run; a memoryview's does not.
        np.copyto(np.frombuffer(buffer[:count], np.uint8), np.frombuffer(data[:count], np.uint8))
        data = data[count:]
