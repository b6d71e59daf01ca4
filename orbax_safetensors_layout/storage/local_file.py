"""An open file or folder of this machine: the same one, wherever its path leads later.

A range that the page cache holds is copied out of it. A cold range that no other process of the
host asks for is read with O_DIRECT, which on a fast disk is limited by the disk and not by the
kernel's page allocation (measured 2.4 against 1.8 GiB/s), and leaves the cache to others.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.runtime import DIRECT_CHUNK_BYTES, direct_scratch

from .base import Buffer
from .buffers import changed, scatter, skip, transfer, truncated
from .commit_note import folder_being_replaced

_PAGE = mmap.PAGESIZE
_PLACE_ATTEMPTS = 3
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
O_DIRECT = getattr(os, "O_DIRECT", 0)
DIRECT_MIN_BYTES = 1 * MIB
UNSUPPORTED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_MANY_OPEN = "Raise the limit of open files (ulimit -n); larger max_file_bytes make fewer files."
FULL = "Free space on the disk and repeat the call; what is written so far is kept."


def check_link(path: str) -> None:
    """Refuses a link that leads nowhere, as one of the hub's cache does whose blob is gone."""
    if os.path.islink(path) and not os.path.exists(path):
        raise StorageError(
            "the link leads nowhere",
            file=path,
            found=os.readlink(path),
            hint="If it is in the cache of the hub, or copied from there, download the repository"
            " again; copy such folders with `cp -rL`.",
        )


def hub_hint(path: str) -> str | None:
    """Return how the path of a repository of the hub is given, where a path looks like its name."""
    parts = os.path.relpath(path).split(os.sep)
    if len(parts) < 2 or parts[0] in ("..", ".") or os.path.lexists(parts[0]):
        return None
    return f"If a repository of the hub is meant, give 'hf://{parts[0]}/{parts[1]}'."


class PinnedFolder:
    """A folder that stays the same one, with what is in it, wherever it is moved.

    A checkpoint is replaced by another folder. A reader of the old one reads on in it, or fails
    when it is gone. Where two folders cannot be exchanged, it is found, for an instant or after a
    crash, at `folder_being_replaced`.
    """

    def __init__(self, path: str) -> None:
        for _ in range(_PLACE_ATTEMPTS):  # it may come back to its place between the two looks
            with contextlib.suppress(FileNotFoundError):
                self._open(path)
                with closed_on_error(self.fd):
                    if os.listdir(self.fd):
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

    def files(self, path: str) -> list[str]:
        """Return its files, or those of a folder in it, and broken links, to fail when opened."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                return sorted(e.name for e in entries if _is_file_or_broken_link(e))
        finally:
            os.close(fd)

    def is_moved(self) -> bool:
        """Whether it is no longer where it was found, and perhaps is being removed."""
        try:
            return not os.path.samestat(os.stat(self._place), os.fstat(self.fd))
        except OSError:
            return True

    def close(self) -> None:
        os.close(self.fd)


class Identity(NamedTuple):
    """Changes whenever a file is replaced or written to."""

    device: int
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Identity:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class PinnedFile:
    """A file as it was when it was opened; the storage's `lock` guards its `users`."""

    def __init__(
        self, name: str, place: str, folder: PinnedFolder | None, lock: threading.Lock
    ) -> None:
        self.name = name
        self._place = place
        self._folder_fd = None if folder is None else folder.fd
        try:
            self.fd = self._open(0)
        except FileNotFoundError as error:
            if folder is not None and folder.is_moved():
                raise replaced(name) from error
            check_link(name)
            above = os.path.dirname(name)
            also = None if os.path.isdir(above) else f"there is no folder {above!r} either"
            raise CheckpointNotFoundError(
                "no such file", file=name, found=also, hint=hub_hint(name)
            ) from error
        except OSError as error:
            raise StorageError("cannot open the file", file=name, found=error.strerror) from error
        with closed_on_error(self.fd), storage_errors("cannot open the file", name):
            status = os.fstat(self.fd)
            if not (S_ISREG(status.st_mode) or S_ISDIR(status.st_mode)):
                kind = "a pipe, a socket or a device"
                raise StorageError("cannot open the file", file=name, expected="a file", found=kind)
        self.identity = Identity.of(status)
        self.users = 0
        self._lock = lock
        self._reopened: dict[int, int] = {}  # more descriptors, by their flags
        self._can_probe = bool(_NOWAIT and O_DIRECT)
        self._mapped: mmap.mmap | None = None

    def __enter__(self) -> PinnedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.users -= 1

    def close(self) -> None:
        for fd in (self.fd, *self._reopened.values()):
            if fd >= 0:
                os.close(fd)

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, shared: bool) -> None:
        total = sum(map(len, buffers))
        if offset + total > self.identity.size:
            raise truncated(self.name, offset, total, self.identity.size)
        try:
            is_direct = not shared and total >= DIRECT_MIN_BYTES
            is_direct = is_direct and self.is_cold(offset + total // 2)
            if not (is_direct and self._read_direct(offset, buffers, total)):
                done = transfer(os.preadv, self.fd, offset, buffers)
                if done < total:
                    raise truncated(self.name, offset, total, offset + done)
        except OSError as error:
            raise StorageError(
                f"reading bytes [{offset}, {offset + total}) failed",
                file=self.name,
                found=error.strerror or error,
            ) from error
        self.check_unchanged(offset, total)

    def map(self) -> memoryview:
        if self._mapped is None:
            try:
                self._mapped = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
            except (OSError, ValueError) as error:
                raise StorageError("cannot map the file", file=self.name, found=error) from error
            self.check_unchanged(0, self.identity.size)
        return memoryview(self._mapped)

    def check_unchanged(self, offset: int, total: int) -> None:
        """Raises if the file was written to, or no longer has a range."""
        with storage_errors("cannot look at the file again", self.name):
            now = Identity.of(os.fstat(self.fd))
        if now == self.identity:
            return
        if now.size < offset + total:
            raise truncated(self.name, offset, total, now.size)
        check_same(self.name, self.identity, now, f"bytes [{offset}, {offset + total}) were read")

    def is_cold(self, offset: int) -> bool:
        """Whether the page at `offset` is not in the page cache.

        Asked without read-ahead, which on a cold page even a read that may not wait starts (seen
        with Linux 6.18), so that the disk reads everything twice.
        """
        if not self._can_probe:
            return False
        fd = self._reopen(0)
        if fd < 0:
            return False
        try:
            os.preadv(fd, [bytearray(1)], offset, _NOWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._can_probe = False
        return False

    def _read_direct(self, offset: int, buffers: Sequence[Buffer], total: int) -> bool:
        """Reads past the page cache through an aligned chunk; False where that is unsupported."""
        fd = self._reopen(O_DIRECT)
        if fd < 0:
            return False
        scratch = direct_scratch()
        position, stop = offset, offset + total
        while position < stop:
            first = position - position % _PAGE
            length = min(DIRECT_CHUNK_BYTES, -(-(stop - first) // _PAGE) * _PAGE)
            rest = skip(buffers, position - offset)
            whole_pages = min(len(rest[0]), DIRECT_CHUNK_BYTES) // _PAGE * _PAGE
            in_place = whole_pages and first == position and is_on_page(rest[0])
            try:
                into = rest[0][:whole_pages] if in_place else scratch[:length]
                got = os.preadv(fd, [into], first)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                return False
            usable = min(first + got, stop) - position
            if usable <= 0:
                raise truncated(self.name, offset, total, first + got)
            if not in_place:
                scatter(scratch[position - first :][:usable], rest)
            position += usable
        return True

    def _open(self, flags: int) -> int:
        # Without waiting for a writer of a pipe, which is then refused.
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(self._place, flags, dir_fd=self._folder_fd)

    def _reopen(self, flags: int) -> int:
        """Return a descriptor without read-ahead; -1 where the flags are not supported."""
        with self._lock:
            if flags not in self._reopened:
                self._reopened[flags] = -1
                with contextlib.suppress(OSError):
                    fd = self._open(flags)
                    with closed_on_error(fd):
                        is_same = os.path.samestat(os.fstat(fd), os.fstat(self.fd))
                    if is_same:
                        self._reopened[flags] = fd
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                    else:
                        os.close(fd)
            return self._reopened[flags]


def is_on_page(buffer: Buffer) -> bool:
    """Whether a buffer begins with a page of memory."""
    return np.frombuffer(buffer, np.uint8).ctypes.data % _PAGE == 0


def check_same(file: str, seen: Identity, now: Identity, during: str = "it was read") -> None:
    """Raises if a file is no longer the one that was seen."""
    if now != seen:
        expected = f"{seen.size} bytes, unchanged since its header was read"
        other = f"{now.size} bytes, another inode or modification time"
        raise changed(file, expected, other, during)


def replaced(file: str) -> StorageError:
    """Return the error for a checkpoint that no longer is the same."""
    return StorageError(
        "the checkpoint was replaced, or removed, while it was read", file=file, hint="Load again."
    )


def _is_file_or_broken_link(entry: os.DirEntry[str]) -> bool:
    try:
        return S_ISREG(entry.stat().st_mode) if entry.is_symlink() else entry.is_file()
    except OSError:  # a link that leads nowhere, or to itself
        return True


@contextlib.contextmanager
def closed_on_error(fd: int) -> Iterator[None]:
    """Closes a descriptor where what is done with it fails."""
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


@contextlib.contextmanager
def storage_errors(
    doing: str,
    file: str,
    *,
    full: str = "Free space on the disk, or save elsewhere; nothing of this save is kept.",
) -> Iterator[None]:
    """Turns an `OSError` into a `StorageError`; `full` says what to do about a full disk."""
    hints = {errno.ENOSPC: full, errno.EDQUOT: full, errno.EMFILE: _MANY_OPEN}
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        hint = hints.get(error.errno or 0)
        raise StorageError(doing, file=file, found=error.strerror or error, hint=hint) from error
