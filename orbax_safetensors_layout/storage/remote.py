"""Files of a server that are read by ranges: what `hf://` and `https://` paths have in common.

Nothing is kept on disk, no file is fetched whole. What a kind of server is like, `_place`,
`is_file` and `list` tell.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from orbax_safetensors_layout.errors import StorageError
from orbax_safetensors_layout.options import RetryPolicy

from .base import Buffer, FileWriter, Publication, Rank
from .buffers import scatter, skip, truncated
from .http import Connections
from .remote_file import Place, RemoteFile, classify
from .retry import Retrier

T = TypeVar("T")


class RemoteStorage(abc.ABC):
    """Ranged access to files of a server, for reading alone; see `Storage`.

    Args:
        retries: How long requests are tried; None is the default.
    """

    kind: str
    lists: bool
    appends = False
    _upload_hint = "Save to a local folder, and upload that."

    def __init__(self, retries: RetryPolicy | None) -> None:
        retries = retries or RetryPolicy()
        self._connections = Connections(retries.attempt_seconds)
        self._retrier = Retrier(retries, redact=self._connections.sent.redact)
        self._lock = threading.Lock()
        self._files: dict[str, RemoteFile] = {}
        self._closed = False

    @abc.abstractmethod
    def _place(self, file: str) -> Place:
        """Where a file is asked for.

        Raises:
            CheckpointNotFoundError: It is known that there is none.
        """

    @abc.abstractmethod
    def is_file(self, path: str) -> bool: ...

    @abc.abstractmethod
    def folders(self, folder: str) -> list[str]: ...

    @abc.abstractmethod
    def list(self, folder: str) -> list[str]: ...

    def size(self, file: str) -> int:
        return self._size(self._file(file))

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        found = self._file(file)
        total, size = sum(map(len, buffers)), self._size(found)
        if offset + total > size:
            raise truncated(file, offset, total, size)
        done = self._read_head(found, offset, buffers, total)
        while done < total:
            start, rest = offset + done, skip(buffers, done)
            doing = f"reading bytes [{start}, {offset + total})"
            done += self._tried(functools.partial(found.fetch, start, rest), doing, file)

    def modified_seconds(self, file: str) -> float:
        found = self._file(file)
        if found.modified_seconds is None:
            self.check_unchanged(file)
        return found.modified_seconds or 0.0

    def check_unchanged(self, file: str) -> None:
        found = self._file(file)
        if self._size(found):
            first = memoryview(bytearray(1))
            self._tried(lambda: found.fetch(0, [first]), "looking at it again", file)

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        raise self._read_only(file)

    def make_folder(self, folder: str) -> None:
        raise self._read_only(folder)

    def flush_folder(self, folder: str) -> None:
        raise self._read_only(folder)

    def check_written(self, folder: str) -> None:
        raise self._read_only(folder)

    def publication(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> Publication:
        raise self._read_only(target)

    def remove(self, path: str) -> None:
        raise self._read_only(path)

    def interrupt(self) -> None:
        self._retrier.interrupt()
        self._connections.interrupt()

    def close(self) -> None:
        self._closed = True
        self.interrupt()
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, file: str) -> RemoteFile:
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed", file=file)
            found = self._files.get(file)
            if found is None:
                found = RemoteFile(file, self._place(file), self._connections)
                self._files[file] = found
            return found

    def _size(self, file: RemoteFile) -> int:
        with file.lock:
            if file.size is None:
                self._tried(file.open, "opening it", file.name)
            assert file.size is not None
            return file.size

    def _read_head(
        self, file: RemoteFile, offset: int, buffers: Sequence[Buffer], total: int
    ) -> int:
        """Takes the first bytes, once, from what came with the size; returns how many."""
        if offset or not total:
            return 0
        with file.lock:
            head, file.head = file.head[:total], memoryview(b"")
        scatter(head, buffers)
        return len(head)

    def _tried(self, call: Callable[[], T], doing: str, file: str) -> T:
        return self._retrier.run(call, classify, doing=doing, url=file)

    def _read_only(self, path: str) -> StorageError:
        return StorageError(
            f"{self.kind}:// paths can not be written to", file=path, hint=self._upload_hint
        )
