"""Host memory, aligned: for shards, so that JAX's CPU backend adopts it, and for direct I/O.

Beside it, what is held at once: budgets, and batches of bounded bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.options import MIB

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

Register: TypeAlias = Callable[[int, int], Callable[[], None] | None]
"""Registers memory, by address and bytes, so that devices transfer from it at full speed. Returns
what ends that, for before it is freed; None where memory cannot be registered."""

DIRECT_CHUNK_BYTES = 2 * MIB
"""One direct read or write."""

HUGE_PAGE_BYTES = 2 * MIB
"""A huge page of x86-64 and of most arm64 systems; elsewhere a boundary like others."""

SLOT_ALIGNMENT = 64
"""Shards begin at multiples of it: JAX's CPU backend adopts such buffers without a copy (seen with
jax 0.10 and 0.12; `tests/reading/test_adoption.py` checks it)."""

# Processor time of the first write to a huge page, above which small pages cost less. Seen on a
# virtual machine (Linux 6.18, EPYC) for 2 MiB: 0.2 ms in a huge page that the machine holds, 4.7 in
# one that the hypervisor has taken back, 1.1 in small pages, of which the kernel keeps some.
_SLOW_TOUCH_SECONDS = 1e-3
_STRETCH_BYTES = 32 * MIB  # for so many bytes the time of one page decides
_MOST_SMALL_BYTES = 4 * _STRETCH_BYTES  # in small pages, before a huge one is tried again
_PAGED_BYTES = 1 * MIB  # such memory begins as far from a page as its bytes do in their file
_REGISTERED_BYTES = 8 * MIB  # below, to register memory takes as long as one transfer gains
_SPARE = 4  # memory is reused for requests that are smaller by up to this part of it


def allocate(nbytes: int, *, file_offset: int = 0) -> Bytes:
    """Return uninitialised bytes at a 64-byte boundary, at that of a huge page where it pays.

    Where `file_offset` allows it, the address is congruent to it modulo the page size, so that a
    range that begins there in the file can be read past the page cache straight into its place.
    """
    phase = _phase(nbytes, file_offset)
    step = mmap.PAGESIZE if nbytes >= _PAGED_BYTES else SLOT_ALIGNMENT
    if _fits_huge_pages(phase + nbytes):
        step = HUGE_PAGE_BYTES
    large = nbytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
    raw = _pages.map(nbytes + step) if large else np.empty(nbytes + step, np.uint8)
    shift = (phase - raw.ctypes.data) % step
    return raw[shift : shift + nbytes]


class Staging:
    """Memory for values that are computed on, or copied to devices; reused once nothing views it.

    Fresh memory costs more than the computation: the kernel clears each page. Idle memory is freed
    before more is allocated than was in use at one time. JAX views it until a transfer has ended.
    """

    def __init__(self, register: Register | None = None) -> None:
        self._idle: deque[_Memory] = deque()  # any thread adds to it, the calling one takes from it
        self._total_bytes = self._most_used_bytes = 0
        self._register = register
        self._unregistered: weakref.WeakSet[_Memory] = weakref.WeakSet()

    def take(self, nbytes: int, *, file_offset: int = 0) -> Bytes:
        phase = _phase(nbytes, file_offset)
        memory = self._find(phase + nbytes)
        # A view of an array keeps the array's base, not the array; all views keep this object.
        owner = (ctypes.c_uint8 * nbytes).from_buffer(memory.content.data, phase)
        weakref.finalize(owner, _reuse, weakref.ref(self._idle), memory).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def register(self, values: np.ndarray) -> None:
        """Registers the memory of values that are about to be transferred, if it is not yet.

        Pages that were never written to take 14 times as long (256 MiB: 83 ms in place of 6), so
        this comes after the reads.
        """
        if self._register is None or not self._unregistered:
            return
        address = values.__array_interface__["data"][0]
        for memory in [*self._unregistered]:
            if memory.address <= address < memory.address + memory.size:
                self._unregistered.discard(memory)
                _registered[memory.address] = memory.content
                memory.end_registration = self._register(memory.address, memory.size)
                if memory.end_registration is None:  # nor can others
                    self._register = None
                    del _registered[memory.address]
                return

    def _find(self, nbytes: int) -> _Memory:
        # Others add to it meanwhile, at any moment: to iterate over it would fail.
        idle = [self._idle.popleft() for _ in range(len(self._idle))]
        used_bytes = self._total_bytes - sum(memory.size for memory in idle) + nbytes
        self._most_used_bytes = max(self._most_used_bytes, used_bytes)
        most = nbytes + nbytes // _SPARE
        index = next((i for i, memory in enumerate(idle) if nbytes <= memory.size <= most), None)
        memory = idle.pop(index) if index is not None else None
        if memory is None:
            self._total_bytes += nbytes
            while idle and self._total_bytes > self._most_used_bytes:
                self._total_bytes -= idle.pop(0).size
        self._idle.extend(idle)
        if memory is None:
            memory = _Memory(allocate(nbytes))
            if self._register is not None and nbytes >= _REGISTERED_BYTES:
                self._unregistered.add(memory)
        return memory


class _Memory:
    """Memory that is used again; registered with devices, until just before it is freed."""

    def __init__(self, content: Bytes) -> None:
        self.content = content
        self.address: int = content.ctypes.data
        self.size = content.size
        self.end_registration: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.end_registration is not None:
            try:
                self.end_registration()
            except Exception:
                return  # it stays in `_registered`
            _registered.pop(self.address, None)


# Devices would go on to transfer from pages that were freed while registered. So these stay here
# until it is certain that they are not: also where a signal interrupts the registration or its end.
_registered: dict[int, Bytes] = {}


def _reuse(idle: weakref.ref[deque[_Memory]], memory: _Memory) -> None:
    """Gives memory back, unless its `Staging` is gone."""
    if (memories := idle()) is not None:
        memories.append(memory)


def _phase(nbytes: int, file_offset: int) -> int:
    """Return where in a page of memory the bytes of a file's offset begin."""
    phase = file_offset % mmap.PAGESIZE
    return phase if nbytes >= _PAGED_BYTES and not phase % SLOT_ALIGNMENT else 0


def _fits_huge_pages(nbytes: int) -> bool:
    """Return whether memory should begin at a huge page.

    The parts beyond the boundaries of huge pages are small pages, which fill at a third of the
    speed (8 MiB: 4.7 in place of 9.2 GiB/s, Linux 6.18). But the last huge page is allocated whole,
    so it should not be much larger than its content.
    """
    return nbytes >= HUGE_PAGE_BYTES and -nbytes % HUGE_PAGE_BYTES <= nbytes // 16


def align(offset: int) -> int:
    """Return the next offset at which a shard may begin."""
    return -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class Pages:
    """Maps memory in huge pages while they are cheap, else in small ones.

    A huge page is touched, and by how long that takes the next stretch is mapped. Each time in
    succession that it takes long, the stretch of small pages doubles. Once the process has freed
    what it mapped first, the machine keeps pages for it, and all of them are huge. `clock` returns
    processor seconds of the calling thread.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._advice = 0
        self._stretch_bytes = 0
        self._left_bytes = 0  # of the stretch
        self._first: weakref.ref[mmap.mmap] | None = None

    def map(self, nbytes: int) -> Bytes:
        """Return fresh private memory, of whole pages."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = np.frombuffer(memory, np.uint8)
        start = 0
        with self._lock, contextlib.suppress(OSError):  # a kernel without huge pages
            self._first = self._first or weakref.ref(memory)
            memory.madvise(mmap.MADV_HUGEPAGE)
            if self._first() is None:
                return view
            while start < nbytes:
                if not self._left_bytes:
                    self._begin_stretch(view[start:])
                length = min(self._left_bytes, nbytes - start)
                if self._advice == mmap.MADV_NOHUGEPAGE:
                    memory.madvise(self._advice, start, length)
                self._left_bytes -= length
                start += length
        return view

    def _begin_stretch(self, memory: Bytes) -> None:
        """Choose the size of pages by touching a huge one, if the memory has any."""
        page = -memory.ctypes.data % HUGE_PAGE_BYTES
        if page + HUGE_PAGE_BYTES > memory.size:
            self._left_bytes = memory.size
            return
        before, began = self._advice, self._clock()
        ctypes.memset(memory.ctypes.data + page, 0, 1)  # while other threads run
        if self._clock() - began <= _SLOW_TOUCH_SECONDS:
            self._advice, self._stretch_bytes = mmap.MADV_HUGEPAGE, _STRETCH_BYTES
        elif before == mmap.MADV_NOHUGEPAGE:
            self._stretch_bytes = min(2 * self._stretch_bytes, _MOST_SMALL_BYTES)
        else:
            self._advice, self._stretch_bytes = mmap.MADV_NOHUGEPAGE, _STRETCH_BYTES
        self._left_bytes = self._stretch_bytes


_pages = Pages()
_thread = threading.local()


def direct_scratch() -> memoryview:
    """Return this thread's `DIRECT_CHUNK_BYTES` of aligned memory, the same each time.

    With 4 KiB pages the kernel cuts a direct read of 4 MiB into many small ones: 1.3 GiB/s in
    place of 4.0 (Linux 6.18, virtio). A page that a fork shares may miss what the disk writes to it
    (open(2), O_DIRECT).
    """
    if getattr(_thread, "pid", None) != os.getpid():  # a forked child needs its own
        nbytes = DIRECT_CHUNK_BYTES + HUGE_PAGE_BYTES
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    memory.madvise(getattr(mmap, advice))
        start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_BYTES
        _thread.chunk = memoryview(memory)[start : start + DIRECT_CHUNK_BYTES]
        _thread.pid = os.getpid()
    chunk: memoryview = _thread.chunk
    return chunk


class Budget:
    """Counts bytes that are held: one thread reserves them, any thread releases them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        self._waits: deque[tuple[Callable[[], object], int]] = deque()

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more fit; more than the budget fit while nothing is held."""
        reserved = self._reserved_bytes
        return not nbytes or not reserved or reserved + nbytes <= self.most_bytes

    def reserve(self, nbytes: int, make_progress: Callable[[], bool] | None = None) -> None:
        """Waits until `nbytes` more fit, or `make_progress` returns that nothing is in flight."""
        while not self.has_room(nbytes):
            if self._waits:
                self._release_oldest()
            elif make_progress is None or not make_progress():
                break
        with self._lock:
            self._reserved_bytes += nbytes

    def release(self, nbytes: int, wait: Callable[[], object] | None = None) -> None:
        """Releases reserved bytes; with `wait` once the reserving thread has called it."""
        if nbytes and wait is not None:
            self._waits.append((wait, nbytes))
            return
        with self._lock:
            self._reserved_bytes -= nbytes

    def release_all(self) -> None:
        while self._waits:
            self._release_oldest()

    def _release_oldest(self) -> None:
        wait, nbytes = self._waits.popleft()
        wait()
        self.release(nbytes)


def batches(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Groups consecutive items of together up to `most_bytes`, or one that is larger."""
    batch: list[T] = []
    held = 0
    for item in items:
        size = nbytes(item)
        if batch and held + size > most_bytes:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch
