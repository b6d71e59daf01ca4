"""Local files: positioned vectored reads that go straight into the caller's memory."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Sequence
from stat import S_ISREG

from orbax_safetensors_layout.errors import StorageError

from .base import Buffer, FileWriter, NewFolder, Rank, Storage
from .local_commit import FolderExchange
from .local_file import (
    Identity,
    PinnedFile,
    PinnedFolder,
    check_same,
    replaced,
    storage_errors,
)
from .local_write import LocalFileWriter, flush_folder

_MAX_OPEN_FILES = 128
_MAX_OPEN_FOLDERS = 32  # more, in one that is open, are found by their paths in it
_SAMPLE_BYTES = 4096
_LIST_ATTEMPTS = 20


class LocalStorage(Storage):
    """Files of this machine, and of network file systems that are mounted on it."""

    kind = "local"
    lists = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, PinnedFile] = {}
        self._folders: dict[str, PinnedFolder] = {}
        self._identities: dict[str, Identity] = {}
        self._closed = False

    def size(self, file: str) -> int:
        with self._handle(file) as handle:
            return handle.identity.size

    def modified_seconds(self, file: str) -> float:
        with self._handle(file) as handle:
            return handle.identity.modified_ns / 1e9

    def is_file(self, path: str) -> bool:
        with (
            storage_errors("cannot look at the path", path),
            contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError),  # of a NUL
        ):
            return S_ISREG(os.stat(path).st_mode)
        return False

    def folders(self, folder: str) -> list[str]:
        with (
            storage_errors("cannot list the folder", folder),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as entries,
        ):
            return sorted(entry.name for entry in entries if entry.is_dir())
        return []

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def list(self, folder: str) -> list[str]:
        """Names of the files in a folder; from then on files are read from that same folder."""
        is_first = folder not in self._folders
        with (
            storage_errors("cannot list the folder", folder),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            for _ in range(_LIST_ATTEMPTS if is_first else 1):
                pinned, path = self._folder(folder)
                names = pinned.files(path)
                if not pinned.is_moved():
                    return names
                if is_first:  # what is being removed may have lost files already
                    self._forget(folder)
            raise replaced(folder)
        return []

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        with self._handle(file) as handle:
            handle.read_into(offset, buffers, shared=shared)

    def sample(self, file: str, start: int, stop: int) -> bytes:
        """Return some bytes from within a range, of no use but to tell files apart."""
        data = bytearray(min(_SAMPLE_BYTES, stop - start))
        with self._handle(file) as handle:
            middle = (start + stop - len(data)) // 2
            handle.read_into(middle, [memoryview(data)], shared=True)
        return bytes(data)

    def is_cached(self, file: str, offset: int) -> bool:
        """Whether the page cache holds the byte at `offset`, or nobody can tell."""
        with self._handle(file) as handle, contextlib.suppress(OSError):
            return not handle.is_cold(offset)
        return True

    def map(self, file: str) -> memoryview:
        """Returns a file's read-only mapped pages, which stay valid after `close`."""
        with self._handle(file) as handle:
            return handle.map()

    def check_unchanged(self, file: str) -> None:
        with self._handle(file) as handle:
            handle.check_unchanged(0, handle.identity.size)

    def check_current(self) -> None:
        """Raises if a file that was read from a folder has been replaced there, or written to."""
        with self._lock:
            for file, seen in self._identities.items():
                folder, path = self._place(file)
                if folder is None:
                    continue
                try:
                    now = Identity.of(os.stat(path, dir_fd=folder.fd))
                except OSError:  # the folder has been replaced since, or removed
                    continue
                check_same(file, seen, now)

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        return LocalFileWriter(file, size, durable=durable)

    def make_folder(self, folder: str) -> None:
        with storage_errors("cannot make the folder", folder):
            os.makedirs(folder, exist_ok=True)

    def flush_folder(self, folder: str) -> None:
        flush_folder(folder)

    def new_folder(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> NewFolder:
        return FolderExchange(target, self, rank)

    def remove(self, path: str) -> None:
        self._forget(path)
        with storage_errors("cannot remove", path), contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for file in self._open.values():
                file.close()
            for folder in self._folders.values():
                folder.close()
            self._open.clear()
            self._folders.clear()

    def _handle(self, file: str) -> PinnedFile:
        """Returns an open file, for a `with` block; idle ones are kept, boundedly."""
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed", file=file)
            handle = self._open.get(file)
            if handle is None:
                self._close_idle(_MAX_OPEN_FILES - 1)
                try:
                    handle = self._pinned(file)
                except StorageError as error:
                    cause = getattr(error.__cause__, "errno", None)
                    if cause not in (errno.EMFILE, errno.ENFILE) or not self._close_idle(0):
                        raise
                    handle = self._pinned(file)
                self._open[file] = handle
            handle.users += 1
            return handle

    def _close_idle(self, most: int) -> int:
        """Closes idle files, oldest first, until `most` are open; returns how many it closed."""
        idle = [name for name, handle in self._open.items() if not handle.users]
        surplus = idle[: max(0, len(self._open) - most)]
        for name in surplus:
            self._open.pop(name).close()
        return len(surplus)

    def _pinned(self, file: str) -> PinnedFile:
        folder, path = self._place(file)
        handle = PinnedFile(file, path, folder, self._lock)
        try:
            check_same(file, self._identities.setdefault(file, handle.identity), handle.identity)
        except StorageError:
            handle.close()
            raise
        return handle

    def _folder(self, path: str) -> tuple[PinnedFolder, str]:
        """Returns a folder that stays open, at the path or above it, and the rest of the path."""
        with self._lock:
            if path not in self._folders:
                above, rest = self._place(path)
                if above is not None and len(self._folders) >= _MAX_OPEN_FOLDERS:
                    return above, rest
                self._folders[path] = PinnedFolder(path)
            return self._folders[path], "."

    def _forget(self, path: str) -> None:
        with self._lock:
            for name in [n for n in self._folders if n == path or n.startswith(path + "/")]:
                self._folders.pop(name).close()

    def _place(self, file: str) -> tuple[PinnedFolder | None, str]:
        """Returns the nearest folder above a file that was listed, and the file's path in it."""
        folder = os.path.dirname(file)
        while folder not in self._folders:
            if folder in ("", "/"):
                return None, file
            folder = os.path.dirname(folder)
        return self._folders[folder], os.path.relpath(file, folder)
