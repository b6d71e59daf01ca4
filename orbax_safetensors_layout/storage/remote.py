"""Files of a server that are read by ranges: what `hf://` and `https://` paths have in common.

Nothing is kept on disk, no file is fetched whole. What a kind of server is like, `_place`,
`is_file` and `list` tell.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from orbax_safetensors_layout.errors import StorageError
from orbax_safetensors_layout.options import RetryPolicy

from .base import Buffer, Storage
from .buffers import scatter, skip, truncated
from .http import Connections
from .remote_file import Place, RemoteFile, classify
from .retry import Retrier

T = TypeVar("T")


class RemoteStorage(Storage):
    """Ranged access to files of a server, for reading alone; see `Storage`."""

    def __init__(self, retries: RetryPolicy | None) -> None:
        retries = retries or RetryPolicy()
        self._connections = Connections(retries.attempt_seconds)
        self._retrier = Retrier(retries, redact=self._connections.sent.redact)
        self._lock = threading.Lock()
        self._files: dict[str, RemoteFile] = {}
        self._closed = False

    @abc.abstractmethod
    def _place(self, file: str) -> Place:
        """Returns where a file is asked for, or raises `CheckpointNotFoundError`."""

    def size(self, file: str) -> int:
        return self._size(self._file(file))

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        remote = self._file(file)
        total, size = sum(map(len, buffers)), self._size(remote)
        if offset + total > size:
            raise truncated(file, offset, total, size)
        done = 0
        if total and not offset:  # the first bytes came with the size, and are taken once
            with remote.lock:
                head, remote.head = remote.head[:total], memoryview(b"")
            scatter(head, buffers)
            done = len(head)
        while done < total:
            start, rest = offset + done, skip(buffers, done)
            doing = f"reading bytes [{start}, {offset + total})"
            done += self._tried(functools.partial(remote.fetch, start, rest), doing, file)

    def modified_seconds(self, file: str) -> float:
        remote = self._file(file)
        if remote.modified_seconds is None:
            self.check_unchanged(file)
        return remote.modified_seconds or 0.0

    def check_unchanged(self, file: str) -> None:
        remote = self._file(file)
        if self._size(remote):
            first = memoryview(bytearray(1))
            self._tried(lambda: remote.fetch(0, [first]), "looking at it again", file)

    def interrupt(self) -> None:
        self._retrier.interrupt()
        self._connections.interrupt()

    def close(self) -> None:
        self._closed = True
        self.interrupt()
        self._connections.close()

    def _file(self, file: str) -> RemoteFile:
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed", file=file)
            remote = self._files.get(file)
            if remote is None:
                remote = RemoteFile(file, self._place(file), self._connections)
                self._files[file] = remote
            return remote

    def _size(self, file: RemoteFile) -> int:
        with file.lock:
            if file.size is None:
                self._tried(file.open, "opening it", file.name)
            assert file.size is not None
            return file.size

    def _tried(self, call: Callable[[], T], doing: str, file: str) -> T:
        return self._retrier.run(call, classify, doing=doing, url=file)
