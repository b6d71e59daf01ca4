"""What the kernel has to be told and asked before and after a timed run. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAGE = mmap.PAGESIZE
_CHUNK_BYTES = 8 << 20
_SLICE_BYTES = 1 << 30


def anonymous(nbytes: int) -> mmap.mmap:
    """Page-aligned memory of this process, in huge pages where they fit.

    Python's default is shared memory in 4 KiB pages, into which the kernel cuts a direct read of
    4 MiB into many small ones: 1.3 GiB/s in place of 4.0.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def warm(files: Iterable[Path]) -> None:
    """Reads the files through once, so that the page cache holds them."""
    scratch = memoryview(anonymous(_CHUNK_BYTES))
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def evict(files: Iterable[Path]) -> str:
    """Removes the files from the page cache; returns how.

    Asking for the files alone leaves the rest of a shared machine's cache in peace. Where pages
    stay all the same, the whole cache is dropped, which needs root.
    """
    files = list(files)
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    if resident_fraction(files) < 0.001:
        return "fadvise"
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return "drop_caches"
    return "not evicted"


def resident_fraction(files: Iterable[Path]) -> float:
    """The part of the files' pages that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    resident = pages = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        with open(path, "rb") as file:
            # A private mapping, because ctypes takes the address of writable memory only.
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        count = -(-size // PAGE)
        flags = np.zeros(count, np.uint8)
        anchor = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.addressof(anchor), size, flags.ctypes.data)
        del anchor
        mapped.close()
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed", str(path))
        resident += int(np.count_nonzero(flags & 1))
        pages += count
    return resident / pages if pages else 0.0


def touch_and_free(nbytes: int) -> None:
    """Writes to every page of so much fresh memory and gives it back.

    A virtual machine's free memory goes back to the hypervisor after a while; without this the
    hypervisor is what a run measures. The memory is private and in huge pages, so that it comes
    back whole and is what the next allocation gets: after shared 4 KiB pages the same load took
    1.2 s in place of 0.2.
    """
    held = []
    for start in range(0, nbytes, _SLICE_BYTES):
        memory = anonymous(min(_SLICE_BYTES, nbytes - start))
        np.frombuffer(memory, np.uint8)[::PAGE] = 1
        held.append(memory)
    for memory in held:
        memory.close()


class Usage(NamedTuple):
    """What the process has used so far.

    Attributes:
        cpu_seconds: User and system time of all threads.
        passed_bytes: Bytes that read calls returned (mapped pages are not in it).
        device_bytes: Bytes that storage delivered for this process.
        written_bytes: Bytes that write calls took.
        dirtied_bytes: Bytes that have to go to storage for this process.
    """

    cpu_seconds: float
    passed_bytes: int
    device_bytes: int
    written_bytes: int
    dirtied_bytes: int

    @classmethod
    def now(cls) -> Usage:
        """The counters as they stand."""
        lines = Path("/proc/self/io").read_text().splitlines()
        counters = dict(line.split(": ") for line in lines)
        times = os.times()
        keys = ("rchar", "read_bytes", "wchar", "write_bytes")
        return cls(times.user + times.system, *(int(counters[key]) for key in keys))


def reset_peak() -> None:
    """Makes the present resident memory the peak so far."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes() -> int:
    """Resident memory now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The largest resident memory since the start or `reset_peak`."""
    return _status("VmHWM")


def available_bytes() -> int:
    """What the whole machine could still give."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


def free_bytes() -> int:
    """Memory that nothing uses, not even as page cache."""
    return _kilobytes(Path("/proc/meminfo"), "MemFree")


def total_bytes() -> int:
    """The machine's memory."""
    return _kilobytes(Path("/proc/meminfo"), "MemTotal")


def _status(key: str) -> int:
    return _kilobytes(Path("/proc/self/status"), key)


def _kilobytes(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(f"{path} has no {key}.")
