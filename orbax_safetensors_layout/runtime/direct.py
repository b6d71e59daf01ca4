"""Memory for reads and writes past the page cache (O_DIRECT)."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

import numpy as np

from orbax_safetensors_layout.options import MIB

DIRECT_CHUNK_BYTES = 2 * MIB
"""One direct read or write."""

HUGE_PAGE_BYTES = 2 * MIB
"""A huge page of x86-64 and of most arm64 systems; elsewhere a boundary like others."""


class DirectScratch(threading.local):
    """An aligned chunk for each thread; a forked child makes its own."""

    def __init__(self) -> None:
        self._pid = 0
        self._chunk = memoryview(b"")

    def take(self) -> memoryview:
        """Return the thread's `DIRECT_CHUNK_BYTES` of memory, the same each time."""
        if self._pid != os.getpid():
            self._chunk = _huge_pages(DIRECT_CHUNK_BYTES)
            self._pid = os.getpid()
        return self._chunk


def _huge_pages(nbytes: int) -> memoryview:
    """Return writable memory, which a fork does not share, in huge pages where there are some.

    With 4 KiB pages the kernel cuts a direct read of 4 MiB into many small ones: 1.3 GiB/s in
    place of 4.0 (Linux 6.18, virtio). A page that a fork shares may miss what the disk writes to it
    (open(2), O_DIRECT).
    """
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(getattr(mmap, advice))
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_BYTES
    return memoryview(memory)[start : start + nbytes]
