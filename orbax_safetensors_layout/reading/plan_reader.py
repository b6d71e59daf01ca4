"""Runs a read plan: threads fill host buffers, the caller's thread takes each finished tile.

The first failure stops everything: no further request starts, those in flight are waited for,
the buffers are dropped, and the one error names file, tensor, byte range and cause.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import SafetensorsLayoutError, explained
from orbax_safetensors_layout.geometry import Box, copy_elements, packed_box, unpack_box
from orbax_safetensors_layout.plan import (
    ByteRegion,
    ComposedArray,
    ReadPlan,
    RequestGroup,
    TileKey,
    read_bytes,
)
from orbax_safetensors_layout.runtime import (
    SLOT_ALIGNMENT,
    Budget,
    Bytes,
    ProgressReport,
    Register,
    Staging,
    Then,
    Workers,
    allocate,
)
from orbax_safetensors_layout.storage import LocalStorage, RangeReader

from .jobs import Job, jobs_of
from .staged_blocks import Scratch
from .stored_values import one_a_byte
from .tile_buffers import BufferSlice, TileBuffer, buffer_slices

_CACHE_PROBES = 16

Wait = Callable[[], object]
Deliver = Callable[[int, Sequence[int], Sequence[np.ndarray]], Wait | None]
"""Takes a leaf's number, some of its boxes by number, and their values. What it returns, if
anything, is called before the buffers count as free: it waits for a transfer."""

Convert = Callable[[int, np.ndarray, np.ndarray], None]
"""Takes a leaf's number, values as they are in the file, and where they go in its dtype."""


class ReadStats(NamedTuple):
    """The reads of a load on this process."""

    bytes_read: int  # bytes requested from storage for tensors
    num_reads: int  # planned ranges: groups of neighbouring regions
    storage_reads: int  # ranged reads issued


@dataclasses.dataclass(slots=True)
class _PendingGroup:
    """A group that is being read, and where its regions go."""

    group: RequestGroup
    slices: list[BufferSlice]
    jobs_left: int = 1  # the first counts until all are submitted


class PlanReader:
    """Reads every leaf of a plan, once. Only the calling thread touches it; workers see jobs.

    `deliver` is called on the calling thread for each tile, in the order in which they finish, and
    for boxes that need no byte; `convert` on a worker thread for leaves whose dtype is not the
    file's. `check` is called now and then, to raise where another process has failed.
    """

    def __init__(
        self,
        plan: ReadPlan,
        storage: RangeReader,
        *,
        deliver: Deliver,
        convert: Convert,
        mmap: bool = False,
        register: Register | None = None,
        report: ProgressReport | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._deliver = deliver
        self._convert = convert
        can_map = mmap and plan.adopt
        self._map = storage.map if can_map and isinstance(storage, LocalStorage) else None
        self._mapped_files: set[str] = set()
        self._report = report
        self._converted = [leaf.is_converted for leaf in plan.leaves]
        self._scratch = Scratch()
        self._staging = Staging(register)
        threads = _threads(plan, storage)
        self._workers = Workers(threads, "safetensors-read", storage.interrupt, check)
        self._budget = Budget(plan.memory_budget_bytes)
        # Tiles that several regions fill, from the first that is scheduled to the last.
        self._tiles: dict[TileKey, TileBuffer] = {}
        self._regions_done: collections.Counter[TileKey] = collections.Counter()
        # Boxes whose values are computed, by leaf and number, from their first part to the last.
        self._boxes: dict[tuple[int, int], np.ndarray] = {}
        self._parts_left: collections.Counter[tuple[int, int]] = collections.Counter()
        self._reserved: set[tuple[int, int]] = set()  # those whose memory is reserved
        self._composed = collections.Counter(leaf.into for leaf in plan.leaves)  # reads to come
        self._composing: set[ComposedArray | None] = set()  # arrays whose memory is reserved
        self._inputs = collections.Counter(leaf.block for leaf in plan.leaves)  # reads to come
        self._block_bytes: collections.Counter[int | None] = collections.Counter()
        self._bytes_read = self._num_reads = self._storage_reads = 0
        self._undelivered = [len(leaf.local.boxes) for leaf in plan.leaves]

    def run(self) -> ReadStats:
        needing: dict[int, set[int]] = {}
        converted: set[TileKey] = set()
        for batch in self._plan.batches:
            for region in batch.regions:
                members = region.layout.tile.members
                needing.setdefault(region.leaf, set()).update(members)
                if self._converted[region.leaf] and region.tile not in converted:
                    converted.add(region.tile)
                    self._parts_left.update((region.leaf, member) for member in members)
        for number, leaf in enumerate(self._plan.leaves):
            if number not in needing or leaf.fills:
                self._deliver_unread(number, needing.get(number, ()))
        try:
            with self._workers:
                for group in self._plan.groups():
                    self._num_reads += 1
                    if not self._adopt_mapped(group):
                        self._schedule(group)
                self._workers.join()
        finally:
            self._tiles.clear()  # an error's traceback holds this object
            self._boxes.clear()
            self._staging = Staging()  # without what is idle
        self._budget.release_all()
        for file in self._mapped_files:
            self._storage.check_unchanged(file)
        for leaf, missing in zip(self._plan.leaves, self._undelivered, strict=True):
            if missing:
                raise SafetensorsLayoutError(
                    "the plan does not read all that is needed",
                    file=leaf.file,
                    tensor=leaf.name,
                    expected=f"{len(leaf.local.boxes)} shards",
                    found=f"{missing} that were not complete",
                )
        return ReadStats(self._bytes_read, self._num_reads, self._storage_reads)

    def _deliver_unread(self, number: int, read: Collection[int]) -> None:
        """Delivers the boxes that are empty, or filled, so that no byte is read for them."""
        leaf = self._plan.leaves[number]
        rest = [box for box in range(len(leaf.local.boxes)) if box not in read]
        if leaf.block is not None or self._plan.adopt or not leaf.local.boxes:
            if rest or not leaf.local.boxes:
                self._hand_over(number, rest, [self._filled(number, box) for box in rest], 0)
            return
        for box in rest:
            nbytes = leaf.local.boxes[box].size * leaf.dtype.itemsize
            self._budget.reserve(nbytes)
            self._hand_over(number, [box], [self._filled(number, box)], nbytes)

    def _filled(self, number: int, member: int) -> np.ndarray:
        """Return memory for a box, with the values that are not read in their place."""
        leaf = self._plan.leaves[number]
        box = leaf.local.boxes[member]
        memory = self._allocate(box.size * leaf.dtype.itemsize)
        values = memory.view(leaf.dtype).reshape(box.shape)
        for fill in leaf.fills:
            fill.put(box, values, fill.value)
        return values

    def _allocate(self, nbytes: int, *, file_offset: int = 0) -> Bytes:
        """Return memory for values: new where arrays keep it, else reused after transfers."""
        take = allocate if self._plan.adopt else self._staging.take
        return take(nbytes, file_offset=file_offset)

    def _schedule(self, group: RequestGroup) -> None:
        pending = _PendingGroup(group, self._buffer_slices(group))
        for job in jobs_of(group, pending.slices, self._plan.profile):
            pending.jobs_left += 1
            self._workers.submit(self._run_job, job, pending)
        self._job_done(pending, 0, 0)
        self._workers.progress_finished()

    def _run_job(self, job: Job, pending: _PendingGroup) -> Then:
        with self._explained(pending.group.regions, pending.group.file):
            nbytes, requests = job.run(self._storage, self._scratch)
        return functools.partial(self._job_done, pending, nbytes, requests)

    def _job_done(self, pending: _PendingGroup, nbytes: int, requests: int) -> None:
        self._bytes_read += nbytes
        self._storage_reads += requests
        pending.jobs_left -= 1
        if not pending.jobs_left:
            for buffer_slice in pending.slices:
                self._region_done(buffer_slice)

    def _buffer_slices(self, group: RequestGroup) -> list[BufferSlice]:
        """Return the memory of a group's regions; waits until tiles that are new fit the budget."""
        self._reserve(group.regions)
        with self._explained(group.regions, group.file):
            slices = buffer_slices(group, self._tiles, self._staging.take, self._allocate)
        for region, buffer in slices:
            if region.parts > 1:
                self._tiles[region.tile] = buffer
        return slices

    def _reserve(self, regions: Sequence[ByteRegion]) -> None:
        """Waits until the budget has room for memory that arrays do not adopt."""
        fresh = {r.tile: r for r in regions if r.tile not in self._tiles}
        held = 0
        for region in fresh.values():
            held += self._read_bytes(region)
            into = self._plan.leaves[region.leaf].into
            if into not in self._composing:
                held += self._plan.composed_bytes(into)
                self._composing.add(into)
            if self._converted[region.leaf]:
                boxes = {(region.leaf, member) for member in region.layout.tile.members}
                held += sum(self._box_bytes(*box) for box in boxes - self._reserved)
                self._reserved |= boxes
        self._budget.reserve(held, self._workers.progress)

    def _read_bytes(self, region: ByteRegion) -> int:
        """Host bytes of a tile as it is read, where the budget counts them."""
        if self._plan.adopt and not region.layout.is_scratch:
            return 0
        return read_bytes(self._plan.leaves[region.leaf], region.layout)

    def _box_bytes(self, number: int, box: int) -> int:
        """Host bytes of a box whose values are computed, where the budget counts them."""
        leaf = self._plan.leaves[number]
        if self._plan.adopt and leaf.block is None:
            return 0
        return leaf.local.boxes[box].size * leaf.dtype.itemsize

    def _explained(
        self, regions: Sequence[ByteRegion], file: str | None
    ) -> contextlib.AbstractContextManager[None]:
        leaf, source, *_ = regions[0]
        name = self._plan.leaves[leaf].sources[source].entry.name
        more = f" and {len(regions) - 1} more tensors" if len(regions) > 1 else ""
        return explained(f"while loading {name!r}{more} of {file}", name)

    def _adopt_mapped(self, group: RequestGroup) -> bool:
        """Takes a group's bytes from mapped pages where every shard is aligned there."""
        if self._map is None or not all(map(_adoptable, group.regions)):
            return False
        if any(self._plan.leaves[region.leaf].fills for region in group.regions):
            return False  # it would be written into the mapped pages
        self._reserve(group.regions)
        mapped = np.frombuffer(self._map(group.file), np.uint8)
        self._mapped_files.add(group.file)
        for region in group.regions:
            self._region_done(BufferSlice(region, TileBuffer(mapped, region.start)))
        return True

    def _region_done(self, buffer_slice: BufferSlice) -> None:
        region = buffer_slice.region
        leaf = self._plan.leaves[region.leaf]
        if self._report is not None:
            self._report.add(region.read.needed_bytes, leaf.name)
        if region.parts > 1:
            self._regions_done[region.tile] += 1
            if self._regions_done[region.tile] < region.parts:
                return
            del self._tiles[region.tile]
        values = buffer_slice.members(leaf.stored)
        if not self._converted[region.leaf]:
            held = self._read_bytes(region)
            self._give(region.leaf, region.layout.tile.members, values, held)
            return
        layout = region.layout
        outs = [
            self._open(region.leaf, member, part)
            for member, part in zip(layout.tile.members, layout.regions, strict=True)
        ]
        self._workers.submit(self._compute_region, region, values, outs, wait=False)

    def _compute_region(
        self, region: ByteRegion, values: Sequence[np.ndarray], outs: Sequence[np.ndarray]
    ) -> Then:
        with self._explained([region], self._plan.leaves[region.leaf].file):
            for box, value, out in zip(region.layout.regions, values, outs, strict=True):
                self._compute(region.leaf, box, value, out)
        return functools.partial(self._complete, region)

    def _open(self, number: int, member: int, part: Box) -> np.ndarray:
        """The place of a part of a box in the memory of the array."""
        values = self._boxes.get((number, member))
        if values is None:
            values = self._boxes[number, member] = self._filled(number, member)
        return part.view_of(values, self._plan.leaves[number].local.boxes[member])

    def _compute(self, number: int, box: Box, values: np.ndarray, out: np.ndarray) -> None:
        """Puts the values of a region of a leaf in their place, from those in the file."""
        leaf = self._plan.leaves[number]
        dtype = leaf.stored
        if dtype.packed:
            at = packed_box(leaf.shape, dtype.bits, box)
            values = unpack_box(values, dtype.bits, at).view(dtype.numpy)
        for fill in leaf.fills:
            fill.put(box, values, 0)  # nothing has been read there
        if dtype.one_a_byte:
            values = one_a_byte(leaf, values)
        if leaf.is_computed or leaf.dtype != dtype.numpy:
            self._convert(number, values, out)
        else:
            copy_elements(out, values)
        for fill in leaf.fills:
            fill.put(box, out, fill.value)

    def _complete(self, region: ByteRegion) -> None:
        number = region.leaf
        self._budget.release(self._read_bytes(region))
        whole, parts = [], []
        for member in region.layout.tile.members:
            self._parts_left[number, member] -= 1
            if not self._parts_left[number, member]:
                whole.append(member)
                parts.append(self._boxes.pop((number, member)))
        if whole:
            held = sum(self._box_bytes(number, member) for member in whole)
            self._give(number, whole, parts, held)

    def _give(
        self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray], held: int
    ) -> None:
        """Delivers values that have been read, whose host memory is `held` bytes of the budget."""
        if self._plan.leaves[number].block is None:
            for part in parts:
                self._staging.register(part)
        self._hand_over(number, boxes, parts, held)

    def _hand_over(
        self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray], held: int
    ) -> None:
        self._undelivered[number] -= len(boxes)
        self._hold(number, self._deliver(number, boxes, parts), held)

    def _hold(self, number: int, wait: Wait | None, nbytes: int) -> None:
        """Releases the bytes of a read once the values of it, and its block, are on their way."""
        leaf = self._plan.leaves[number]
        if (block := leaf.block) is not None:
            self._composed[leaf.into] -= 1
            if leaf.into in self._composing and not self._composed[leaf.into]:
                nbytes += self._plan.composed_bytes(leaf.into)
            self._inputs[block] -= 1
            self._block_bytes[block] += nbytes
            if self._inputs[block]:
                return
            nbytes = self._block_bytes.pop(block)
        if nbytes:
            self._budget.release(nbytes, wait)


def _threads(plan: ReadPlan, storage: RangeReader) -> int:
    """Requests at once: fewer where the page cache holds what some regions begin with."""
    profile = plan.profile
    if profile.cached_concurrency is None or not isinstance(storage, LocalStorage):
        return profile.concurrency
    starts = [(batch.file, region.start) for batch in plan.batches for region in batch.regions]
    sample = starts[:: -(-len(starts) // _CACHE_PROBES) or 1]
    cached = all(storage.is_cached(file, offset) for file, offset in sample)
    return profile.cached_concurrency if cached else profile.concurrency


def _adoptable(region: ByteRegion) -> bool:
    """Whether every member's bytes begin at an aligned place of the file, and fill it."""
    read, layout = region.read, region.layout
    return (
        region.parts == 1
        and read.spans is not None
        and not read.spans.levels
        and not read.requests.levels
        and region.start % SLOT_ALIGNMENT == 0
        and (len(layout.tile.members) == 1 or layout.slot_bytes == layout.member_bytes)
    )
