"""Local files: positioned vectored reads that go straight into their destination.

A range that the page cache holds is copied out of it. A cold range that no other process of the
host asks for is read with O_DIRECT, which on a fast disk is limited by the disk and not by the
kernel's page allocation (measured 2.4 against 1.8 GiB/s), and leaves the cache to others.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.runtime import DIRECT_CHUNK_BYTES, DirectScratch

from .base import Buffer, FileWriter, Publication, Rank
from .buffers import scatter, skip, truncated
from .local_commit import FolderExchange
from .local_write import LocalFileWriter, flush_folder, storage_errors
from .publish_note import folder_being_replaced

_PAGE = mmap.PAGESIZE
_MAX_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)
_MAX_OPEN_FILES = 128
_MAX_OPEN_FOLDERS = 32  # more, in one that is open, are found by their paths in it
_LIST_ATTEMPTS = 20
_PLACE_ATTEMPTS = 3
_DIRECT_MIN_BYTES = 1 * MIB
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class _Folder:
    """A folder as it was found: the same one, and what is in it, wherever it is moved.

    A checkpoint is replaced by another folder in its place. Who has begun to read the old one reads
    on in it, or is told when it is gone.

    Args:
        path: Where it is. Where two folders cannot be exchanged, the old one is for an instant,
            or after a crash, at `folder_being_replaced`, and is found there.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        for _ in range(_PLACE_ATTEMPTS):  # it may come back to its place between the two looks
            with contextlib.suppress(FileNotFoundError):
                self._open(path)
                if not self._is_empty():
                    return
                os.close(self.fd)
            with contextlib.suppress(FileNotFoundError):
                aside = folder_being_replaced(os.path.realpath(path))
                if aside is not None:
                    self._open(aside)
                    return
        self._open(path)

    def _open(self, place: str) -> None:
        self.fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._place = place

    def _is_empty(self) -> bool:
        with os.scandir(self.fd) as entries:
            return next(entries, None) is None

    def files(self) -> list[str]:
        """Names of its files, and of links that lead nowhere: opening one says what is wrong."""
        return _Place(".", self).files()

    def is_moved(self) -> bool:
        """Whether it is no longer where it was found, and perhaps is being removed."""
        try:
            return not os.path.samestat(os.stat(self._place), os.fstat(self.fd))
        except OSError:
            return True

    def close(self) -> None:
        os.close(self.fd)


class _Place(NamedTuple):
    """Where a file is: its path, in a folder if that is known."""

    name: str
    folder: _Folder | None

    def open(self, flags: int) -> int:
        flags |= os.O_CLOEXEC
        return os.open(self.name, flags, dir_fd=None if self.folder is None else self.folder.fd)

    def files(self) -> list[str]:
        """As `_Folder.files`, of a folder."""
        fd = self.open(os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                return [e.name for e in entries if _is_file_or_broken_link(e, fd)]
        finally:
            os.close(fd)


class _OpenFile:
    """A descriptor, and what the file was when it was opened."""

    __slots__ = (
        "_place",
        "direct_fd",
        "fd",
        "identity",
        "lock",
        "mapped",
        "name",
        "probe_fd",
        "users",
    )

    def __init__(self, name: str, place: _Place, lock: threading.Lock) -> None:
        try:
            self.fd = place.open(os.O_RDONLY)
        except FileNotFoundError as error:
            if place.folder is not None and place.folder.is_moved():
                raise _replaced(name) from error
            raise CheckpointNotFoundError("no such file", file=name) from error
        except OSError as error:
            raise StorageError("can not open the file", file=name, found=error.strerror) from error
        stat = os.fstat(self.fd)
        self.name = name
        self._place = place
        self.identity = _identity(stat)
        # Opened when first needed; -1 where the system has no such thing.
        self.probe_fd: int | None = None
        self.direct_fd: int | None = None
        self.mapped: mmap.mmap | None = None
        self.lock = lock  # guards `users`, and is the storage's
        self.users = 0

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1

    def close(self) -> None:
        for fd in (self.fd, self.probe_fd, self.direct_fd):
            if fd is not None and fd >= 0:
                os.close(fd)

    def reopen(self, flags: int) -> int:
        """Another descriptor of the same file; -1 where the flags are not supported."""
        try:
            fd = self._place.open(os.O_RDONLY | flags)
        except OSError:
            return -1
        stat = os.fstat(fd)
        if (stat.st_dev, stat.st_ino) != self.identity[:2]:
            os.close(fd)
            return -1
        return fd


class LocalStorage:
    """Files of this machine, and of network file systems that are mounted on it.

    Attributes:
        kind: `"local"`.
        lists: True.
        appends: False.
    """

    kind = "local"
    lists = True
    appends = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _OpenFile] = {}
        self._folders: dict[str, _Folder] = {}
        self._identities: dict[str, _Identity] = {}
        self._scratch = DirectScratch()
        self._probes = bool(_NOWAIT and _O_DIRECT)
        self._closed = False

    def size(self, file: str) -> int:
        with self._handle(file) as handle:
            return handle.identity[2]

    def modified_seconds(self, file: str) -> float:
        with self._handle(file) as handle:
            return handle.identity[3] / 1e9

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def folders(self, folder: str) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except OSError:
            return []

    def list(self, folder: str) -> list[str]:
        """Names of the files in a folder; from then on files are read from that same folder."""
        is_first = folder not in self._folders
        try:
            place = self._place(folder)
            if is_first and place.folder is not None and len(self._folders) >= _MAX_OPEN_FOLDERS:
                names = place.files()
                if place.folder.is_moved():
                    raise _replaced(folder)
                return sorted(names)
            for _ in range(_LIST_ATTEMPTS if is_first else 1):
                found = self._folder(folder)
                names = found.files()
                if not found.is_moved():
                    return sorted(names)
                if is_first:  # what is being removed may have lost files already
                    self._forget(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(
                "can not list the folder", file=folder, found=error.strerror
            ) from error
        raise _replaced(folder)

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        total = sum(len(buffer) for buffer in buffers)
        with self._handle(file) as handle:
            if offset + total > handle.identity[2]:
                raise truncated(file, offset, total, handle.identity[2])
            try:
                direct = not shared and total >= _DIRECT_MIN_BYTES
                direct = direct and self._is_cold(handle, offset + total // 2)
                if not (direct and self._read_direct(handle, offset, buffers)):
                    done = _read_fully(handle.fd, offset, buffers)
                    if done < total:
                        raise truncated(file, offset, total, offset + done)
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError(
                    f"reading bytes [{offset}, {offset + total}) failed",
                    file=file,
                    found=error.strerror or str(error),
                ) from error
            self._check_unchanged(handle, offset, total)

    def is_cached(self, file: str, offset: int) -> bool:
        """Whether the page cache holds the byte at `offset`, or nobody can tell."""
        with self._handle(file) as handle, contextlib.suppress(OSError):
            return not self._is_cold(handle, offset)
        return True

    def map(self, file: str) -> memoryview:
        """The whole file as read-only mapped pages; they stay valid after `close`.

        Raises:
            StorageError: The file cannot be mapped.
        """
        with self._handle(file) as handle:
            if handle.mapped is None:
                try:
                    handle.mapped = mmap.mmap(handle.fd, 0, prot=mmap.PROT_READ)
                except (OSError, ValueError) as error:
                    raise StorageError("can not map the file", file=file, found=error) from error
                self._check_unchanged(handle, 0, handle.identity[2])
            return memoryview(handle.mapped)

    def check_unchanged(self, file: str) -> None:
        """Checks that a file still is what it was when it was first opened.

        Raises:
            TruncatedFileError: It is shorter.
            StorageError: It was written to.
        """
        with self._handle(file) as handle:
            self._check_unchanged(handle, 0, handle.identity[2])

    def check_current(self) -> None:
        """Checks that the files that were read from a folder are those that are in it together.

        Raises:
            StorageError: One has been replaced since, or written to.
        """
        with self._lock:
            for file, seen in self._identities.items():
                name, folder = self._place(file)
                if folder is None:
                    continue
                try:
                    found = _identity(os.stat(name, dir_fd=folder.fd))
                except OSError:  # the folder has been replaced since, or removed
                    continue
                if found != seen:
                    raise _changed(file, seen, found)

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        return LocalFileWriter(file, size, durable=durable)

    def make_folder(self, folder: str) -> None:
        with storage_errors("can not make the folder", folder):
            os.makedirs(folder, exist_ok=True)

    def flush_folder(self, folder: str) -> None:
        flush_folder(folder)

    def check_written(self, folder: str) -> None:
        pass  # a claim keeps other programs away

    def publication(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> Publication:
        return FolderExchange(target, self, rank)

    def remove(self, path: str) -> None:
        self._forget(path)
        with storage_errors("can not remove", path), contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def interrupt(self) -> None:
        pass  # nothing here pauses

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for handle in self._open.values():
                handle.close()
            for folder in self._folders.values():
                folder.close()
            self._open.clear()
            self._folders.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, file: str) -> _OpenFile:
        """An open descriptor, for a `with` block; idle ones are kept, boundedly."""
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed", file=file)
            handle = self._open.get(file)
            if handle is None:
                self._close_idle(_MAX_OPEN_FILES - 1)
                try:
                    handle = self._reopen(file)
                except StorageError as error:
                    if not _no_descriptor_left(error) or not self._close_idle(0):
                        raise
                    handle = self._reopen(file)
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

    def _folder(self, path: str) -> _Folder:
        """The folder at a path, the same one for as long as this storage is open."""
        with self._lock:
            if path not in self._folders:
                self._folders[path] = _Folder(path)
            return self._folders[path]

    def _forget(self, path: str) -> None:
        with self._lock:
            for name in [n for n in self._folders if n == path or n.startswith(path + "/")]:
                self._folders.pop(name).close()

    def _place(self, file: str) -> _Place:
        """A file in the folder that was listed, if one was, or one above that was."""
        folder = os.path.dirname(file)
        while folder not in self._folders:
            if folder in ("", "/"):
                return _Place(file, None)
            folder = os.path.dirname(folder)
        return _Place(os.path.relpath(file, folder), self._folders[folder])

    def _reopen(self, file: str) -> _OpenFile:
        handle = _OpenFile(file, self._place(file), self._lock)
        seen = self._identities.setdefault(file, handle.identity)
        if seen != handle.identity:
            handle.close()
            raise _changed(file, seen, handle.identity)
        return handle

    def _check_unchanged(self, handle: _OpenFile, offset: int, total: int) -> None:
        stat = os.fstat(handle.fd)
        if (stat.st_size, stat.st_mtime_ns) == handle.identity[2:]:
            return
        if stat.st_size < offset + total:
            raise truncated(handle.name, offset, total, stat.st_size)
        raise StorageError(
            f"the file changed while bytes [{offset}, {offset + total}) were read",
            file=handle.name,
            expected=f"{handle.identity[2]} bytes, unchanged since its header was read",
            found=f"{stat.st_size} bytes, written to since",
            hint="Load again when nothing writes to the checkpoint.",
        )

    def _is_cold(self, handle: _OpenFile, offset: int) -> bool:
        """Whether the page at `offset` is not in the page cache.

        Asked through a descriptor without read-ahead: on a cold page even a read that may not wait
        starts it (seen with Linux 6.18), and the disk would read everything twice.
        """
        if not self._probes:
            return False
        with self._lock:
            if handle.probe_fd is None:
                handle.probe_fd = handle.reopen(0)
                if handle.probe_fd >= 0:
                    os.posix_fadvise(handle.probe_fd, 0, 0, os.POSIX_FADV_RANDOM)
        if handle.probe_fd < 0:
            return False
        try:
            os.preadv(handle.probe_fd, [bytearray(1)], offset, _NOWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._probes = False
        return False

    def _read_direct(self, handle: _OpenFile, offset: int, buffers: Sequence[Buffer]) -> bool:
        """Reads past the page cache through an aligned chunk; False where that is unsupported."""
        fd = self._direct_fd(handle)
        if fd < 0:
            return False
        scratch = self._scratch.take()
        total = sum(len(buffer) for buffer in buffers)
        position, stop = offset, offset + total
        while position < stop:
            first = position - position % _PAGE
            length = min(DIRECT_CHUNK_BYTES, -(-(stop - first) // _PAGE) * _PAGE)
            rest = skip(buffers, position - offset)
            whole_pages = min(len(rest[0]), DIRECT_CHUNK_BYTES) // _PAGE * _PAGE
            in_place = whole_pages and first == position and _address(rest[0]) % _PAGE == 0
            into = rest[0][:whole_pages] if in_place else scratch[:length]
            try:
                got = os.preadv(fd, [into], first)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                return False
            usable = min(first + got, stop) - position
            if usable <= 0:
                raise truncated(handle.name, offset, total, first + got)
            if not in_place:
                scatter(scratch[position - first :][:usable], rest)
            position += usable
        return True

    def _direct_fd(self, handle: _OpenFile) -> int:
        with self._lock:
            if handle.direct_fd is None:
                handle.direct_fd = handle.reopen(_O_DIRECT)
            return handle.direct_fd


_Identity = tuple[int, int, int, int]


def _identity(stat: os.stat_result) -> _Identity:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _changed(file: str, seen: _Identity, found: _Identity) -> StorageError:
    return StorageError(
        "the file was replaced while it was read",
        file=file,
        expected=f"{seen[2]} bytes, unchanged since its header was read",
        found=f"{found[2]} bytes, another inode or modification time",
        hint="Load again when nothing writes to the checkpoint.",
    )


def _replaced(file: str) -> StorageError:
    return StorageError(
        "the checkpoint was replaced, or removed, while it was read", file=file, hint="Load again."
    )


def _no_descriptor_left(error: StorageError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def _is_file_or_broken_link(entry: os.DirEntry[str], folder: int) -> bool:
    try:
        return entry.is_file() or (entry.is_symlink() and not _leads_somewhere(entry.name, folder))
    except OSError:  # a link to itself
        return True


def _leads_somewhere(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _read_fully(fd: int, offset: int, buffers: Sequence[Buffer]) -> int:
    """Reads until the buffers are full or the file ends; returns the bytes."""
    total = sum(len(buffer) for buffer in buffers)
    done = 0
    while done < total:
        got = os.preadv(fd, skip(buffers, done)[:_MAX_BUFFERS], offset + done)
        if not got:
            break
        done += got
    return done


def _address(buffer: Buffer) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data
