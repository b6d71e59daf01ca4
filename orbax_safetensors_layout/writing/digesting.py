"""Checksums of files while they are written."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import cast

from orbax_safetensors_layout.format import join_crc32
from orbax_safetensors_layout.storage import ByteBuffer, FileWriter


class DigestingWriter:
    """A writer that also works out the file's CRC-32, on the threads that write.

    Args:
        writer: Where the bytes go.
        size: Size of the file in bytes.
        done: Is given the CRC-32 when the file is complete.
    """

    def __init__(self, writer: FileWriter, size: int, done: Callable[[int], None]) -> None:
        self._writer = writer
        self._size = size
        self._done = done
        self._ranges: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        value = length = 0
        for buffer in buffers:
            value = zlib.crc32(cast(memoryview, buffer), value)  # releases the GIL
            length += buffer.nbytes
        self._writer.write_at(offset, buffers)
        with self._lock:
            self._ranges.append((offset, length, value))

    def finish(self) -> None:
        self._writer.finish()
        self._done(join_crc32(self._ranges, self._size))

    def abort(self) -> None:
        self._writer.abort()
