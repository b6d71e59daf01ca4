"""Runs a read plan: threads fill host buffers, the caller's thread takes each finished leaf.

The first failure stops everything: no further request starts, those in flight are waited for,
the buffers are dropped, and the one error names file, tensor, byte range and cause.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.geometry.box import Box
from orbax_safetensors_layout.geometry.packing import packed_box, unpack_box
from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.plan.reads import (
    SLOT_ALIGNMENT,
    Group,
    LeafRead,
    ReadPlan,
    Region,
    TileRead,
)
from orbax_safetensors_layout.storage.base import Storage
from orbax_safetensors_layout.storage.local import LocalStorage
from orbax_safetensors_layout.transfer.buffers import Bytes
from orbax_safetensors_layout.transfer.jobs import (
    Destination,
    Job,
    Scratch,
    destinations_of,
    jobs_of,
)

Deliver = Callable[[int, Sequence[np.ndarray]], Callable[[], object] | None]
"""Takes a leaf's number and its boxes' values, in the order of `LeafRead.local.boxes`. What it
returns, if anything, is called before the leaf's buffers count as free: it waits for a transfer."""

Convert = Callable[[int, np.ndarray], np.ndarray]
"""Takes a leaf's number and one box as it stands in the file; gives it in the wanted dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadStats:
    """What a load did on this process.

    Attributes:
        bytes_read: Bytes requested from storage for tensors.
        num_reads: Planned ranges: groups of neighbouring regions.
        storage_reads: Ranged reads issued.
        mapped_bytes: Bytes that arrays adopted from mapped pages instead of reading them.
    """

    bytes_read: int = 0
    num_reads: int = 0
    storage_reads: int = 0
    mapped_bytes: int = 0


def read_leaves(
    plan: ReadPlan,
    storage: Storage,
    *,
    deliver: Deliver,
    convert: Convert,
    adopt: bool,
    mmap: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> ReadStats:
    """Reads every leaf of a plan.

    Args:
        plan: What to read.
        storage: Where from.
        deliver: Called on the calling thread for each leaf, in the order in which they finish.
        convert: Called on a worker thread for leaves whose dtype is not the file's.
        adopt: Whether delivered buffers live on as arrays; if not, they count against the plan's
            memory budget until they are released.
        mmap: Take mapped pages of local files in place of reads where they are aligned.
        progress: Told after each leaf.
    """
    return _Reader(plan, storage, deliver, convert, adopt, mmap, progress).run()


class _Reader:
    """The state of one run. Only the calling thread touches it; workers see jobs and a queue."""

    def __init__(
        self,
        plan: ReadPlan,
        storage: Storage,
        deliver: Deliver,
        convert: Convert,
        adopt: bool,
        mmap: bool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._deliver = deliver
        self._convert = convert
        self._adopt = adopt
        self._map = storage.map if mmap and isinstance(storage, LocalStorage) else None
        self._progress = progress
        self._scratch = Scratch()
        self._cancelled = threading.Event()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._in_flight = 0
        self._reserved_bytes = 0
        self._held: deque[tuple[Callable[[], object], int]] = deque()
        # Work that a leaf still waits for: its regions, each of which is one until its jobs end.
        self._waiting = [0] * len(plan.leaves)
        self._members: list[list[np.ndarray | None]] = [
            [None] * len(leaf.local.boxes) for leaf in plan.leaves
        ]
        self._leaf_bytes = [0] * len(plan.leaves)
        self._total_bytes = self._done_bytes = 0
        self._bytes_read = self._num_reads = self._storage_reads = self._mapped_bytes = 0

    def run(self) -> ReadStats:
        for _, regions in self._plan.regions:
            for region in regions:
                self._waiting[region.leaf] += 1
                self._leaf_bytes[region.leaf] += region.read.memory_bytes
                self._total_bytes += region.read.memory_bytes
        self._deliver_empty()
        concurrency = self._plan.profile.concurrency
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="safetensors-read")
        try:
            for group in self._plan.groups():
                self._num_reads += 1
                if not self._adopt_mapped(group, pool):
                    self._schedule(group, pool)
            while self._in_flight:
                self._events.get()()
        finally:
            self._cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)
        while self._held:
            self._release_oldest()
        return ReadStats(self._bytes_read, self._num_reads, self._storage_reads, self._mapped_bytes)

    def _deliver_empty(self) -> None:
        """Leaves that need no byte: zero-sized, or none of whose devices are this process's."""
        for number, leaf in enumerate(self._plan.leaves):
            if not self._waiting[number]:
                empty = [np.empty(box.shape, leaf.dtype) for box in leaf.local.boxes]
                self._finish(number, empty)

    def _schedule(self, group: Group, pool: ThreadPoolExecutor) -> None:
        self._make_room(sum(region.read.memory_bytes for region in group.regions))
        destinations = destinations_of(group)
        outstanding = [1]  # the group itself, until all its jobs are submitted

        def done() -> None:
            outstanding[0] -= 1
            if not outstanding[0]:
                for destination in destinations:
                    self._region_done(destination, pool)

        for job in jobs_of(group, destinations, self._plan.profile):
            while self._in_flight >= 3 * self._plan.profile.concurrency:
                self._events.get()()
            outstanding[0] += 1
            self._submit(pool, job, done)
        done()
        while not self._events.empty():
            self._events.get()()

    def _submit(self, pool: ThreadPoolExecutor, job: Job, done: Callable[[], None]) -> None:
        def work() -> None:
            try:
                if self._cancelled.is_set():
                    return
                nbytes, requests = job.run(self._storage, self._scratch)
            except BaseException as error:
                self._cancelled.set()
                caught = self._named(error, job)

                def fail() -> None:
                    raise caught

                self._events.put(fail)
            else:

                def account() -> None:
                    self._in_flight -= 1
                    self._bytes_read += nbytes
                    self._storage_reads += requests
                    done()

                self._events.put(account)

        self._in_flight += 1
        pool.submit(work)

    def _named(self, error: BaseException, job: Job) -> BaseException:
        """The error with the tensors that it concerns."""
        if isinstance(error, SafetensorsLayoutError) and error.tensor is None:
            names = [self._plan.leaves[d.region.leaf].name for d in job.destinations]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            error.tensor = names[0] + more
        return error

    def _make_room(self, nbytes: int) -> None:
        """Waits until `nbytes` more fit the budget, or nothing is left to wait for."""
        if self._adopt:
            return
        while self._reserved_bytes + nbytes > self._plan.memory_budget_bytes:
            if self._held:
                self._release_oldest()
            elif self._in_flight:
                self._events.get()()
            else:
                break
        self._reserved_bytes += nbytes

    def _release_oldest(self) -> None:
        wait, nbytes = self._held.popleft()
        wait()
        self._reserved_bytes -= nbytes

    def _adopt_mapped(self, group: Group, pool: ThreadPoolExecutor) -> bool:
        """Takes a group's bytes from mapped pages where every shard is aligned there."""
        if self._map is None or not all(map(_adoptable, group.regions)):
            return False
        mapped = np.frombuffer(self._map(group.file), np.uint8)
        for region in group.regions:
            self._mapped_bytes += region.stop - region.start
            self._region_done(Destination(region, mapped[region.start : region.stop]), pool)
        return True

    def _region_done(self, destination: Destination, pool: ThreadPoolExecutor) -> None:
        region = destination.region
        leaf = self._plan.leaves[region.leaf]
        dtype = leaf.entry.dtype.numpy
        read = region.read
        members = self._members[region.leaf]
        stored = np.dtype(np.uint8) if leaf.entry.dtype.packed else dtype
        values = _member_views(read, destination.memory, stored)
        for box, value in zip(read.tile.members, values, strict=True):
            members[box] = value
        self._waiting[region.leaf] -= 1
        if self._waiting[region.leaf]:
            return
        values = [value for value in members if value is not None]
        self._members[region.leaf] = []
        if dtype == leaf.dtype and not leaf.entry.dtype.packed:
            self._finish(region.leaf, values)
        else:
            self._submit_conversion(pool, region.leaf, values)

    def _converted(self, number: int, values: list[np.ndarray]) -> list[np.ndarray]:
        leaf = self._plan.leaves[number]
        if leaf.entry.dtype.packed:
            values = [
                _unpacked(leaf, box, value)
                for box, value in zip(leaf.local.boxes, values, strict=True)
            ]
        if leaf.dtype != leaf.entry.dtype.numpy:
            values = [self._convert(number, value) for value in values]
        return values

    def _submit_conversion(
        self, pool: ThreadPoolExecutor, number: int, values: list[np.ndarray]
    ) -> None:
        def work() -> None:
            try:
                converted = self._converted(number, values)
            except BaseException as error:
                self._cancelled.set()
                caught = error

                def fail() -> None:
                    raise caught

                self._events.put(fail)
            else:

                def finish() -> None:
                    self._in_flight -= 1
                    self._finish(number, converted)

                self._events.put(finish)

        self._in_flight += 1
        pool.submit(work)

    def _finish(self, number: int, values: Sequence[np.ndarray]) -> None:
        wait = self._deliver(number, values)
        nbytes = self._leaf_bytes[number]
        if not self._adopt:
            self._held.append((wait or (lambda: None), nbytes))
        self._done_bytes += nbytes
        if self._progress is not None:
            name = self._plan.leaves[number].name
            self._progress(Progress(self._done_bytes, self._total_bytes, name))


def _unpacked(leaf: LeafRead, box: Box, data: np.ndarray) -> np.ndarray:
    """A box's elements, one a byte, from the packed bytes that were read for it."""
    dtype = leaf.entry.dtype
    packed = packed_box(leaf.entry.shape, dtype.bits, box)
    return unpack_box(data, dtype.bits, packed).view(dtype.numpy)


def _member_views(read: TileRead, memory: Bytes, dtype: np.dtype) -> list[np.ndarray]:
    """Each member of a tile as an array over the tile's memory."""
    count = len(read.tile.members)
    if count > 1 and read.member_shape:
        strides = (read.slot_bytes, *read.staging.within)
        return [*np.ndarray((count, *read.member_shape), dtype, memory.data, 0, strides)]
    return [
        np.ndarray(read.member_shape, dtype, memory.data, number * read.slot_bytes)
        for number in range(count)
    ]


def _adoptable(region: Region) -> bool:
    """Whether every member's bytes begin at an aligned place of the file."""
    read = region.read
    return (
        read.direct
        and not read.requests.levels
        and region.start % SLOT_ALIGNMENT == 0
        and (len(read.tile.members) == 1 or read.slot_bytes == read.member_bytes)
    )
