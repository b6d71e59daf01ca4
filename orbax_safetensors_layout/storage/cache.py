"""Ranges of remote files, kept in a folder of this host for the next load of the same content.

    <folder>/orbax_safetensors_layout.cache/
        usage                                 bytes of all files, locked by who adds or evicts
        *.partial                             entries that are being written
        <key>/<stretch>/<start>-<stop>        entries

An entry is a range that was asked for, cut at multiples of 4 MiB of its file. So requests stay as
long as they were planned, and not a byte is fetched that a load without a cache would not fetch;
shards of another mesh find what they share with earlier ones by its place in the file, and only the
gaps are fetched. Whole aligned blocks would cost each request up to two blocks more, and a narrow
shard its neighbours; entries without cuts would cost a few bytes of one the checksum of a whole
request; a sparse copy of each file could neither appear at once nor be evicted in parts.

A key is the hash of a `Storage.content_key`, so an entry is of one version. It appears by a rename,
and ends with the CRC-32 of its key, its place and its bytes, checked whenever it is read: what is
damaged, cut off, misplaced or gone is fetched. Nothing is flushed to the disk; after a crash of the
machine the checksums decide. They detect damage, not forgery.

All of these count, `usage` too; files of other names are left as they are. What `usage` says is
believed where its checksum is right, and where it was written to this very file since the machine
was booted; else all files are counted anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import os
import re
import stat
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from absl import logging

from orbax_safetensors_layout.errors import StorageError, redact_urls
from orbax_safetensors_layout.options import KIB, MIB, CacheFolder

from .base import Buffer, Storage
from .buffers import cut_out, transfer
from .local_write import write_fully
from .wrapped import WrappedStorage

_CUT_BYTES = 4 * MIB
_STRETCH_BYTES = 64 * _CUT_BYTES  # of a file, in one folder: looking for entries lists few
_BLOCK_BYTES = 4 * KIB  # of most file systems
_NOTE_BYTES = 512
_END = struct.Struct("<8sI")
_MARK = b"osl-cut2"
_ENTRY = re.compile(r"(\d{1,19})-(\d{1,19})", re.A)
_USAGE = "usage"
_OWN = re.compile(
    rf"/({_USAGE}|\w+\.partial|[0-9a-f]{{64}}(/\d{{1,19}}(/{_ENTRY.pattern})?)?)", re.A
)
_USAGE_BYTES = 128  # at most
_LONGEST_LOCK_SECONDS = 5.0
_ATTEMPTS = 10
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CachedStorage(WrappedStorage):
    """A storage for reading that keeps the ranges that it fetches in a folder, and reuses them.

    The storage determines what a file is, and its version, before anything comes from the folder.
    """

    def __init__(self, storage: Storage, folder: CacheFolder) -> None:
        super().__init__(storage)
        self._ranges = RangeCache(folder)
        self._has_warned = False
        storage.remember(self._ranges)

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        total = sum(map(len, buffers))
        content = self._storage.content_key(file) if total else None
        if content is None or offset + total > self._storage.size(file):
            if total and content is None and not self._has_warned:
                self._has_warned = True
                problem = (
                    "%s is not cached: its storage tells no version of it, as by a strong ETag"
                )
                logging.warning(problem, redact_urls(file))
            self._storage.read_into(file, offset, buffers, shared=shared)
            return
        for start, stop in self._ranges.read_into(content, offset, buffers):
            missing = cut_out(buffers, start - offset, stop - offset)
            self._storage.read_into(file, start, missing, shared=shared)
            self._ranges.keep(content, start, missing)

    def forget(self, file: str) -> bool:
        content = self._storage.content_key(file)
        return content is not None and self._ranges.forget(content)


class RangeCache:
    """Ranges of contents in a folder, shared by threads and processes, which anybody may remove.

    What cannot be read is missing; after the first failure to write nothing more is kept. Contents
    that this object was asked for, and what was used since it was made, are not evicted: of a
    checkpoint larger than the cache a part stays, where else each load would evict what it, or the
    next, is to read.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self._root = os.path.join(folder.path, "orbax_safetensors_layout.cache")
        self._usage = os.path.join(self._root, _USAGE)
        self._most_bytes = max(folder.most_bytes, _BLOCK_BYTES)  # of `usage`
        self._begun_ns = time.time_ns()
        self._lock = threading.Lock()
        self._keeps = True
        self._asked: set[str] = set()  # keys
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                os.makedirs(folder.path, 0o700, exist_ok=True)
                partial = self._create(0)
                if partial is not None:
                    os.close(partial[0])
                    os.unlink(partial[1])
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._stop(error)
                    return
                # Another process may have just removed it, or remove it while it is looked at.
                if not (attempts_left and isinstance(error, FileNotFoundError | FileExistsError)):
                    raise StorageError(
                        "cannot write to the cache folder",
                        file=folder.path,
                        found=str(error),
                        hint="Give `ReadOptions(cache=...)` a folder of yours on this host's disk;"
                        f" what is in the way in {self._root} may be removed.",
                    ) from error

    def read_into(
        self, content: str, offset: int, buffers: Sequence[Buffer]
    ) -> list[tuple[int, int]]:
        """Fills the cached parts of `buffers`, from byte `offset` of a content on.

        Returns the half-open ranges that are missing.
        """
        key = _hash(content)
        self._asked.add(key)
        at, end = offset, offset + sum(map(len, buffers))
        missing = []
        for start, stop in self._find(key, offset, end):
            if stop <= at:
                continue
            parts = cut_out(buffers, max(start, at) - offset, min(stop, end) - offset)
            if self._read(key, start, stop, max(at - start, 0), parts):
                if start > at:
                    missing.append((at, start))
                at = min(stop, end)
        return missing if at == end else [*missing, (at, end)]

    def keep(self, content: str, offset: int, buffers: Sequence[Buffer]) -> None:
        """Keeps the bytes of a content from `offset` on, as far as there is space for them."""
        key, end = _hash(content), offset + sum(map(len, buffers))
        cuts = range(offset - offset % _CUT_BYTES + _CUT_BYTES, end, _CUT_BYTES)
        for start, stop in itertools.pairwise([offset, *cuts, end]):
            if not self._keeps:
                return
            try:
                self._write(key, start, stop, cut_out(buffers, start - offset, stop - offset))
            except FileNotFoundError:
                pass  # another process has just removed it
            except OSError as error:
                self._stop(error)

    def forget(self, content: str) -> bool:
        """Removes the ranges of a content; returns whether there were any."""
        key = self._folder(_hash(content))
        held = os.path.isdir(key)
        for folder, folders, names in os.walk(key):
            folders[:] = self._own(folder, folders)
            for name in self._own(folder, names):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))
        for folder, _, _ in os.walk(key, topdown=False):
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(folder)
        return held

    def get(self, name: str) -> str | None:
        """Return the note of a name, if there is one."""
        data = bytearray(_NOTE_BYTES)
        is_missing = self.read_into(f"note {name}", 0, [memoryview(data)])
        return None if is_missing else data.decode().rstrip()

    def set(self, name: str, text: str) -> None:
        """Notes a short text."""
        data = bytearray(text.encode().ljust(_NOTE_BYTES))
        if len(data) == _NOTE_BYTES and self.get(name) != text:
            with contextlib.suppress(OSError):
                os.unlink(self._path(_hash(f"note {name}"), 0, _NOTE_BYTES))
            self.keep(f"note {name}", 0, [memoryview(data)])

    def _path(self, key: str, start: int, stop: int) -> str:
        return os.path.join(self._folder(key, start // _STRETCH_BYTES), f"{start}-{stop}")

    def _folder(self, key: str, stretch: int | None = None) -> str:
        """Return the folder of a key, or of a stretch."""
        return os.path.join(self._root, key, *(() if stretch is None else (str(stretch),)))

    def _find(self, key: str, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of the entries that overlap a range, in their order."""
        names: list[str] = []
        for stretch in range(start // _STRETCH_BYTES, (stop - 1) // _STRETCH_BYTES + 1):
            with contextlib.suppress(OSError):
                names += os.listdir(self._folder(key, stretch))
        entries = ((int(m[1]), int(m[2])) for m in map(_ENTRY.fullmatch, names) if m)
        fits = (entry for entry in entries if 0 < entry[1] - entry[0] <= _CUT_BYTES)
        return sorted(entry for entry in fits if entry[0] < stop and entry[1] > start)

    def _read(self, key: str, start: int, stop: int, before: int, parts: Sequence[Buffer]) -> bool:
        """Fills `parts` from byte `before` of an entry on, and checks all of it."""
        after = stop - start - before - sum(map(len, parts))
        end = memoryview(bytearray(_END.size))
        data = [memoryview(bytearray(before)), *parts, memoryview(bytearray(after))]
        with contextlib.suppress(OSError):
            path = self._path(key, start, stop)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = stop - start + _END.size
                is_whole = os.fstat(fd).st_size == size
                is_whole = is_whole and transfer(os.preadv, fd, 0, [*data, end]) == size
                if is_whole and end == _end(key, start, stop, data):
                    with contextlib.suppress(OSError):
                        os.utime(fd)  # now is when it was used
                    return True
                os.unlink(path)
            finally:
                os.close(fd)
        return False

    def _write(self, key: str, start: int, stop: int, parts: Sequence[Buffer]) -> None:
        path = self._path(key, start, stop)
        if os.path.exists(path):
            return
        partial = self._create(stop - start + _END.size)
        if partial is None:
            return
        fd, name = partial
        try:
            try:
                write_fully(fd, 0, [*parts, memoryview(_end(key, start, stop, parts))])
            finally:
                os.close(fd)
            stretch = os.path.dirname(path)
            for folder in (os.path.dirname(stretch), stretch):
                os.makedirs(folder, 0o700, exist_ok=True)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _create(self, nbytes: int) -> tuple[int, str] | None:
        """Creates a file of a size under a temporary name; None where it would exceed the bound.

        Files get their size, are counted and are evicted under one lock, so that at no moment there
        is more than the bound. What is counted may be too much, until it is counted again. Who
        counts under another lock, as `usage` was removed, may miss a file: it is given up.
        """
        size = _on_disk(nbytes)
        os.makedirs(self._root, 0o700, exist_ok=True)
        with self._lock, self._locked_usage() as usage:
            if not self._keeps:  # what failed while this thread waited fails for it, too
                return None
            if usage is None:
                self._stop(f"another process locked it for {_LONGEST_LOCK_SECONDS:g} s")
                return None
            used = _counted(usage)
            if used is None or used + size > self._most_bytes:
                used = self._evict(size)
            fits = used + size <= self._most_bytes
            os.pwrite(usage, _count(usage, used + size if fits else used), 0)
            if not fits:
                self._stop(f"cache_bytes={self._most_bytes} are in use by this load")
                return None
            fd, path = tempfile.mkstemp(".partial", dir=self._root)
            try:
                os.ftruncate(fd, nbytes)
                if not os.path.samestat(os.fstat(usage), os.lstat(self._usage)):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._usage)
            except BaseException:
                os.close(fd)
                os.unlink(path)
                raise
            return fd, path

    @contextlib.contextmanager
    def _locked_usage(self) -> Iterator[int | None]:
        """Yields the locked count of bytes; None where another process does not give it up."""
        fd = os.open(self._usage, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LONGEST_LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        yield None
                        return
                    time.sleep(0.001)
            yield fd
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold the file open
        finally:
            os.close(fd)

    def _evict(self, size: int) -> int:
        """Removes the least recently used entries where `size` more bytes do not fit.

        Returns the bytes that are left. A tenth of the bound becomes free, so that this is rare.
        """
        files = sorted(self._files())
        used = sum(file[1] for file in files)
        if used + size <= self._most_bytes:
            return used
        for used_ns, length, path in files:
            if used + size <= self._most_bytes // 10 * 9 or used_ns >= self._begun_ns:
                break
            first = os.path.relpath(path, self._root).partition(os.sep)[0]
            if first == _USAGE or first in self._asked:
                continue
            with contextlib.suppress(OSError):
                os.unlink(path)
                used -= length
                folder = os.path.dirname(path)
                while folder != self._root:
                    os.rmdir(folder)  # raises if it is not empty
                    folder = os.path.dirname(folder)
        return used

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yields when each file was used, its bytes and its path.

        Entries are renamed meanwhile. What is being written is looked at first: if it has its place
        by then, it is found there; a listing of the root may be older than the place.
        """
        seen = set()
        begun = (self._root, list[str](), os.listdir(self._root))
        for folder, folders, names in itertools.chain([begun], os.walk(self._root)):
            folders[:] = self._own(folder, folders)
            for name in self._own(folder, names):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if not stat.S_ISDIR(status.st_mode) and status.st_ino not in seen:
                        seen.add(status.st_ino)
                        # An empty `usage` is about to be written.
                        yield status.st_mtime_ns, _on_disk(max(1, status.st_size)), path

    def _own(self, folder: str, names: list[str]) -> list[str]:
        """Return those of the names in a folder that the cache makes."""
        inside = folder.removeprefix(self._root)
        return [name for name in names if _OWN.fullmatch(f"{inside}/{name}")]

    def _stop(self, cause: object) -> None:
        if self._keeps:
            self._keeps = False
            logging.warning("Reading on without keeping more in %s: %s", self._root, cause)


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()


def _counted(usage: int) -> int | None:
    """Return the count in a file; None where it cannot be trusted."""
    text = os.pread(usage, _USAGE_BYTES, 0)
    used = text.partition(b" ")[0]
    if used.isdigit() and text.startswith(_count(usage, int(used))):
        return int(used)
    return None


def _count(usage: int, used: int) -> bytes:
    """Return what a file says of bytes in use.

    A copy of it says nothing, nor does what a crash of the machine has left.
    """
    text = f"{used:020d} {os.fstat(usage).st_ino} {_boot()}"
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()


@functools.cache
def _boot() -> str:
    """Return what differs between boots of a Linux machine."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def _end(key: str, start: int, stop: int, parts: Sequence[Buffer]) -> bytes:
    """Return the checksum that follows the bytes of an entry."""
    value = zlib.crc32(f"{key} {start} {stop}".encode())
    for part in parts:
        value = zlib.crc32(part, value)  # releases the GIL
    return _END.pack(_MARK, value)


def _on_disk(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
