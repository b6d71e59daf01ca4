"""The files of a save that are being written, with their checksums."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import cast

from orbax_safetensors_layout.format import join_crc32
from orbax_safetensors_layout.plan import FileWrite
from orbax_safetensors_layout.storage import ByteBuffer, FileWriter, Storage, join


class OpenFile:
    """A file that is being written; safe to write to from many threads.

    The threads that write compute the CRC-32 of its bytes, if it has a `digest`.
    """

    def __init__(self, plan: FileWrite, writer: FileWriter, *, durable: bool, digest: bool) -> None:
        self.plan = plan
        self.durable = durable
        self._writer = writer
        self._digest = digest
        self._ranges: list[tuple[int, int, int]] = []  # first byte, bytes, CRC-32
        self._lock = threading.Lock()

    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        value = length = 0
        for buffer in buffers if self._digest else ():
            value = zlib.crc32(cast(memoryview, buffer), value)  # releases the GIL
            length += buffer.nbytes
        self._writer.write_at(offset, buffers)
        if self._digest:
            with self._lock:
                self._ranges.append((offset, length, value))

    def finish(self) -> int | None:
        """Completes the file; returns its CRC-32, if that is computed."""
        try:
            self._writer.finish()
        except BaseException:
            self._writer.abort()
            raise
        return join_crc32(self._ranges, self.plan.layout.size) if self._digest else None

    def abort(self) -> None:
        self._writer.abort()


class FileSet:
    """The files of a save that this process has begun and not completed.

    Files that stay are `durable` and have a `digest`, if asked for; temporary ones do not.

    Attributes:
        digests: CRC-32 of each complete file, by name.
        bytes_written: Bytes of complete files.
        appends: Whether a file grows from its first byte to its last; see `Storage`.
    """

    def __init__(
        self, storage: Storage, folder: str, *, durable: bool, digest: bool = False
    ) -> None:
        self.digests: dict[str, int] = {}
        self.bytes_written = 0
        self.appends = storage.appends
        self._storage = storage
        self._folder = folder
        self._durable = durable
        self._digest = digest
        self._open: dict[str, OpenFile] = {}
        self._pending: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, plan: FileWrite) -> OpenFile:
        """Creates a file and writes its header."""
        stays = not plan.is_temporary
        durable = self._durable and stays
        path = join(self._folder, plan.name)
        writer = self._storage.create(path, plan.layout.size, durable=durable)
        file = OpenFile(plan, writer, durable=durable, digest=self._digest and stays)
        with self._lock:
            self._open[plan.name] = file
        file.write_at(0, [memoryview(bytearray(plan.layout.header))])
        return file

    def finish(self, name: str) -> None:
        with self._lock:
            file = self._open.pop(name)
        digest = file.finish()
        with self._lock:
            self.bytes_written += file.plan.layout.size
            if digest is not None:
                self.digests[name] = digest

    def expect(self, name: str, writes: int) -> None:
        """Sets the number of pending writes of a file; 0 completes it."""
        with self._lock:
            self._pending[name] = writes
        if not writes:
            self.finish(name)

    def written(self, name: str) -> None:
        """Counts a pending write of a file as done; the last completes it."""
        with self._lock:
            self._pending[name] -= 1
            is_last = not self._pending[name]
        if is_last:
            self.finish(name)

    def unfinished(self) -> list[OpenFile]:
        """Returns the files that wait for more."""
        with self._lock:
            return [*self._open.values()]

    def abort(self) -> None:
        """Drops incomplete files."""
        with self._lock:
            for file in self._open.values():
                file.abort()
            self._open.clear()
