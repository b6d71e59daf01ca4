"""Runs a read plan: threads fill host buffers, the caller's thread takes each finished region.

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
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.geometry.packing import packed_box, unpack_box
from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.plan.reads import (
    Group,
    LeafRead,
    ReadPlan,
    Region,
)
from orbax_safetensors_layout.plan.tiles import SLOT_ALIGNMENT
from orbax_safetensors_layout.storage.base import Storage
from orbax_safetensors_layout.storage.local import LocalStorage
from orbax_safetensors_layout.transfer.jobs import (
    Destination,
    Job,
    Scratch,
    destinations_of,
    jobs_of,
)

Deliver = Callable[[int, Sequence[int], Sequence[np.ndarray]], Callable[[], object] | None]
"""Takes a leaf's number, some of its boxes by number, and their values. What it returns, if
anything, is called before the buffers count as free: it waits for a transfer."""

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
    mmap: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> ReadStats:
    """Reads every leaf of a plan.

    Args:
        plan: What to read.
        storage: Where from.
        deliver: Called on the calling thread for each region, in the order in which they finish;
            for a leaf that needs no byte, once.
        convert: Called on a worker thread for leaves whose dtype is not the file's.
        mmap: Take mapped pages of local files in place of reads where they are aligned and the
            arrays keep them.
        progress: Told after each region.
    """
    return _Reader(plan, storage, deliver, convert, mmap, progress).run()


class _Failure(NamedTuple):
    """What a worker thread puts into the queue in place of a finished piece of work."""

    error: BaseException


_Event = Callable[[], None] | _Failure


class _Reader:
    """The state of one run. Only the calling thread touches it; workers see jobs and a queue."""

    def __init__(
        self,
        plan: ReadPlan,
        storage: Storage,
        deliver: Deliver,
        convert: Convert,
        mmap: bool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._deliver = deliver
        self._convert = convert
        mapped = mmap and plan.adopt and isinstance(storage, LocalStorage)
        self._map = storage.map if mapped and isinstance(storage, LocalStorage) else None
        self._mapped_files: set[str] = set()
        self._progress = progress
        self._scratch = Scratch()
        self._cancelled = threading.Event()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._in_flight = 0
        self._reserved_bytes = 0
        self._held: deque[tuple[Callable[[], object], int]] = deque()
        self._total_bytes = self._done_bytes = 0
        self._bytes_read = self._num_reads = self._storage_reads = self._mapped_bytes = 0

    def run(self) -> ReadStats:
        needing: set[int] = set()
        for _, regions in self._plan.regions:
            for region in regions:
                needing.add(region.leaf)
                self._total_bytes += region.read.runs.total_bytes
        for number, leaf in enumerate(self._plan.leaves):
            if number not in needing:
                empty = [np.empty(box.shape, leaf.dtype) for box in leaf.local.boxes]
                self._deliver(number, range(len(empty)), empty)
        concurrency = self._plan.profile.concurrency
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="safetensors-read")
        try:
            for group in self._plan.groups():
                self._num_reads += 1
                if not self._adopt_mapped(group, pool):
                    self._schedule(group, pool)
            while self._in_flight:
                self._next_event()
        finally:
            self._cancelled.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._events = queue.SimpleQueue()  # what is left in it holds buffers, and this object
        while self._held:
            self._release_oldest()
        for file in self._mapped_files:
            self._storage.check_unchanged(file)
        return ReadStats(self._bytes_read, self._num_reads, self._storage_reads, self._mapped_bytes)

    def _next_event(self) -> None:
        event = self._events.get()
        if not isinstance(event, _Failure):
            event()
            return
        try:
            raise event.error
        finally:
            del event  # the error's traceback holds this frame

    def _schedule(self, group: Group, pool: ThreadPoolExecutor) -> None:
        self._make_room(sum(map(self._plan.held_bytes, group.regions)))
        try:
            destinations = destinations_of(group)
        except MemoryError as error:
            error.add_note(f"while making room for {self._names(group.regions)} of {group.file}")
            raise
        outstanding = [1]  # the group itself, until all its jobs are submitted

        def done() -> None:
            outstanding[0] -= 1
            if not outstanding[0]:
                for destination in destinations:
                    self._region_done(destination, pool)

        for job in jobs_of(group, destinations, self._plan.profile):
            while self._in_flight >= 3 * self._plan.profile.concurrency:
                self._next_event()
            outstanding[0] += 1
            self._submit_job(pool, job, done)
        done()
        while not self._events.empty():
            self._next_event()

    def _submit_job(self, pool: ThreadPoolExecutor, job: Job, done: Callable[[], None]) -> None:
        def work() -> Callable[[], None]:
            nbytes, requests = job.run(self._storage, self._scratch)

            def account() -> None:
                self._bytes_read += nbytes
                self._storage_reads += requests
                done()

            return account

        self._submit(pool, work, job.file, [d.region for d in job.destinations])

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[], Callable[[], None]],
        file: str,
        regions: Sequence[Region],
    ) -> None:
        """Runs `work` on the pool, and what it returns on the calling thread."""

        def run() -> None:
            if self._cancelled.is_set():
                return
            try:
                then = work()
            except BaseException as error:
                self._cancelled.set()
                if not isinstance(error, SafetensorsLayoutError):
                    error.add_note(f"while loading {self._names(regions)} of {file}")
                elif error.tensor is None:
                    error.tensor = self._plan.leaves[regions[0].leaf].name
                self._events.put(_Failure(error))
            else:

                def finish() -> None:
                    self._in_flight -= 1
                    then()

                self._events.put(finish)

        self._in_flight += 1
        pool.submit(run)

    def _names(self, regions: Sequence[Region]) -> str:
        more = f" and {len(regions) - 1} more tensors" if len(regions) > 1 else ""
        return repr(self._plan.leaves[regions[0].leaf].name) + more

    def _make_room(self, nbytes: int) -> None:
        """Waits until `nbytes` more fit the budget, or nothing is left to wait for."""
        while nbytes and self._reserved_bytes + nbytes > self._plan.memory_budget_bytes:
            if self._held:
                self._release_oldest()
            elif self._in_flight:
                self._next_event()
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
        self._mapped_files.add(group.file)
        for region in group.regions:
            self._mapped_bytes += region.stop - region.start
            self._region_done(Destination(region, mapped[region.start : region.stop]), pool)
        return True

    def _region_done(self, destination: Destination, pool: ThreadPoolExecutor) -> None:
        region = destination.region
        leaf = self._plan.leaves[region.leaf]
        values = destination.members(leaf.entry.dtype)
        if leaf.dtype == leaf.entry.dtype.numpy and not leaf.entry.dtype.packed:
            self._finish(region, values)
            return

        def work() -> Callable[[], None]:
            converted = self._converted(region, leaf, values)
            return lambda: self._finish(region, converted)

        self._submit(pool, work, leaf.entry.file, [region])

    def _converted(
        self, region: Region, leaf: LeafRead, values: list[np.ndarray]
    ) -> list[np.ndarray]:
        dtype = leaf.entry.dtype
        if dtype.packed:
            boxes = [leaf.local.boxes[number] for number in region.read.tile.members]
            packed = [packed_box(leaf.entry.shape, dtype.bits, box) for box in boxes]
            values = [
                unpack_box(value, dtype.bits, at).view(dtype.numpy)
                for value, at in zip(values, packed, strict=True)
            ]
        if leaf.dtype != dtype.numpy:
            values = [self._convert(region.leaf, value) for value in values]
        return values

    def _finish(self, region: Region, values: Sequence[np.ndarray]) -> None:
        wait = self._deliver(region.leaf, region.read.tile.members, values)
        held = self._plan.held_bytes(region)
        if held:
            self._held.append((wait or (lambda: None), held))
        self._done_bytes += region.read.runs.total_bytes
        if self._progress is not None:
            name = self._plan.leaves[region.leaf].name
            self._progress(Progress(self._done_bytes, self._total_bytes, name))


def _adoptable(region: Region) -> bool:
    """Whether every member's bytes begin at an aligned place of the file."""
    read = region.read
    return (
        read.direct
        and not read.requests.levels
        and region.start % SLOT_ALIGNMENT == 0
        and (len(read.tile.members) == 1 or read.slot_bytes == read.member_bytes)
    )
