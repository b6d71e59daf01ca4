"""The files of a save that are being written."""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

from orbax_safetensors_layout.plan import FileWrite
from orbax_safetensors_layout.storage import FileWriter, Storage, join

from .digesting import DigestingWriter


class OpenFile(NamedTuple):
    """A file that is being written.

    Attributes:
        plan: What it will be.
        writer: Where its bytes go.
        durable: Whether it must survive a crash of the machine.
    """

    plan: FileWrite
    writer: FileWriter
    durable: bool


class FileSet:
    """The files of a save that this process has begun and not completed.

    Attributes:
        digests: CRC-32 of each file that is complete, by name; empty unless they are wanted.
        appends: Whether a file grows from its first byte to its last; see `Storage`.

    Args:
        storage: Where they are.
        folder: The checkpoint's folder.
        durable: Whether those that stay must survive a crash of the machine.
        digest: Whether digests of those that stay are wanted.
    """

    def __init__(
        self, storage: Storage, folder: str, *, durable: bool, digest: bool = False
    ) -> None:
        self.digests: dict[str, int] = {}
        self.appends = storage.appends
        self._storage = storage
        self._folder = folder
        self._durable = durable
        self._digest = digest
        self._open: dict[str, OpenFile] = {}
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()

    def begin(self, plan: FileWrite) -> OpenFile:
        """Creates a file and writes its header."""
        path = join(self._folder, plan.name)
        durable = self._durable and not plan.is_temporary
        writer = self._storage.create(path, plan.layout.size, durable=durable)
        if self._digest and not plan.is_temporary:
            keep = functools.partial(self.digests.__setitem__, plan.name)
            writer = DigestingWriter(writer, plan.layout.size, keep)
        found = OpenFile(plan, writer, durable)
        with self._lock:
            self._open[plan.name] = found
        writer.write_at(0, [memoryview(bytearray(plan.layout.header))])
        return found

    def finish(self, name: str) -> None:
        """Completes a file."""
        with self._lock:
            found = self._open.pop(name)
        try:
            found.writer.finish()
        except BaseException:
            found.writer.abort()
            raise

    def expect(self, name: str, writes: int) -> None:
        """Says how many more writes complete a file; without any it is complete."""
        with self._lock:
            self._left[name] = writes
        if not writes:
            self.finish(name)

    def written(self, name: str) -> None:
        """Says that one of the writes that a file expects is done; the last completes it."""
        with self._lock:
            self._left[name] -= 1
            is_last = not self._left[name]
        if is_last:
            self.finish(name)

    def unfinished(self) -> list[OpenFile]:
        """The files that wait for more."""
        with self._lock:
            return [*self._open.values()]

    def abort(self) -> None:
        """Drops what is not complete."""
        with self._lock:
            for found in self._open.values():
                found.writer.abort()
            self._open.clear()
