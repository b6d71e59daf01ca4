"""Runs a read plan: threads fill host buffers, the caller's thread takes each finished tile.

The first failure stops everything: no further request starts, those in flight are waited for,
the buffers are dropped, and the one error names file, tensor, byte range and cause.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.geometry import Box, packed_box, unpack_box
from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.plan import ByteRegion, ReadPlan, RequestGroup, TileKey, read_bytes
from orbax_safetensors_layout.runtime import (
    SLOT_ALIGNMENT,
    Budget,
    Staging,
    Then,
    Workers,
    allocate,
)
from orbax_safetensors_layout.storage import LocalStorage, RangeReader

from .decoding import one_a_byte
from .jobs import Job, jobs_of
from .staged_blocks import Scratch
from .tile_buffers import BufferSlice, TileBuffer, buffer_slices

_CACHE_PROBES = 16

Deliver = Callable[[int, Sequence[int], Sequence[np.ndarray]], Callable[[], object] | None]
"""Takes a leaf's number, some of its boxes by number, and their values. What it returns, if
anything, is called before the buffers count as free: it waits for a transfer."""

Convert = Callable[[int, np.ndarray, np.ndarray], None]
"""Takes a leaf's number, values as they are in the file, and where they go in its dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadStats:
    """What a load did on this process."""

    bytes_read: int = 0  # bytes requested from storage for tensors
    num_reads: int = 0  # planned ranges: groups of neighbouring regions
    storage_reads: int = 0  # ranged reads issued

    def __add__(self, other: ReadStats) -> ReadStats:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return ReadStats(*(a + b for a, b in pairs))


def read_leaves(
    plan: ReadPlan,
    storage: RangeReader,
    *,
    deliver: Deliver,
    convert: Convert,
    mmap: bool = False,
    progress: Callable[[Progress], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> ReadStats:
    """Reads every leaf of a plan.

    Args:
        plan: The requests.
        storage: Reads byte ranges.
        deliver: Called on the calling thread for each tile, in the order in which they finish;
            for a leaf that needs no byte, once.
        convert: Called on a worker thread for leaves whose dtype is not the file's.
        mmap: As of `ArrayReader`.
        progress: Told after each tile.
        check: Called now and then; raises where another process has failed.
    """
    return _Reader(plan, storage, deliver, convert, mmap, progress, check).run()


@dataclasses.dataclass(slots=True)
class _OpenTile:
    """A tile that several regions fill, from the first that is scheduled to the last."""

    room: TileBuffer
    left: int
    bytes_read: int = 0


@dataclasses.dataclass(slots=True)
class _OpenBox:
    """A box whose values are computed, from the first part of it to the last."""

    values: np.ndarray
    left: int


class _Reader:
    """The state of one run. Only the calling thread touches it; workers see jobs and a queue."""

    def __init__(
        self,
        plan: ReadPlan,
        storage: RangeReader,
        deliver: Deliver,
        convert: Convert,
        mmap: bool,
        progress: Callable[[Progress], None] | None,
        check: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._deliver = deliver
        self._convert = convert
        can_map = mmap and plan.adopt
        self._map = storage.map if can_map and isinstance(storage, LocalStorage) else None
        self._mapped_files: set[str] = set()
        self._progress = progress
        self._scratch = Scratch()
        self._staging = Staging()
        threads = _threads(plan, storage)
        self._workers = Workers(threads, "safetensors-read", storage.interrupt, check)
        self._budget = Budget(plan.memory_budget_bytes)
        self._tiles: dict[TileKey, _OpenTile] = {}
        self._boxes: dict[tuple[int, int], _OpenBox] = {}  # by leaf and number
        self._parts: collections.Counter[tuple[int, int]] = collections.Counter()  # of each
        self._reserved: set[tuple[int, int]] = set()  # those whose memory has room in the budget
        self._units = collections.Counter(leaf.unit for leaf in plan.leaves)  # reads to come
        self._unit_bytes: collections.Counter[int | None] = collections.Counter()
        self._total_bytes = self._done_bytes = 0
        self._bytes_read = self._num_reads = self._storage_reads = 0

    def run(self) -> ReadStats:
        needing: dict[int, set[int]] = {}
        computed: set[TileKey] = set()
        for _, regions in self._plan.batches:
            for region in regions:
                members = region.layout.tile.members
                needing.setdefault(region.leaf, set()).update(members)
                self._total_bytes += region.read.runs.total_bytes
                if self._plan.leaves[region.leaf].is_converted and region.tile not in computed:
                    computed.add(region.tile)
                    self._parts.update((region.leaf, member) for member in members)
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
        return ReadStats(self._bytes_read, self._num_reads, self._storage_reads)

    def _deliver_unread(self, number: int, read: Collection[int]) -> None:
        """Delivers the boxes that are empty, or filled, so that no byte is read for them."""
        leaf = self._plan.leaves[number]
        rest = [box for box in range(len(leaf.local.boxes)) if box not in read]
        if rest or not leaf.local.boxes:
            parts = [self._filled(number, box) for box in rest]
            self._hold(number, self._deliver(number, rest, parts), 0)

    def _filled(self, number: int, box: int) -> np.ndarray:
        """Memory for a box in which is put what is not read."""
        leaf = self._plan.leaves[number]
        region = leaf.local.boxes[box]
        values = allocate(region.size * leaf.dtype.itemsize).view(leaf.dtype).reshape(region.shape)
        for fill in leaf.fills:
            fill.put(region, values, fill.value)
        return values

    def _schedule(self, group: RequestGroup) -> None:
        destinations = self._destinations(group)
        outstanding = 1  # the group itself, until all its jobs are submitted

        def done(nbytes: int, requests: int) -> None:
            nonlocal outstanding
            self._bytes_read += nbytes
            self._storage_reads += requests
            outstanding -= 1
            if not outstanding:
                for destination in destinations:
                    self._region_done(destination)

        def run(job: Job) -> Callable[[], None]:
            return functools.partial(done, *job.run(self._storage, self._scratch))

        for job in jobs_of(group, destinations, self._plan.profile):
            outstanding += 1
            regions = [d.region for d in job.destinations]
            self._submit(functools.partial(run, job), job.file, regions, wait=True)
        done(0, 0)
        self._workers.progress_finished()

    def _destinations(self, group: RequestGroup) -> list[BufferSlice]:
        """The memory of a group's regions; waits until there is room for tiles that are new."""
        self._reserve(group.regions)
        open_tiles = {r.tile for r in group.regions if r.parts > 1} & self._tiles.keys()
        opened = {tile: self._tiles[tile].room for tile in open_tiles}
        try:
            destinations = buffer_slices(group, opened, self._staging)
        except MemoryError as error:
            error.add_note(f"while making room for {self._names(group.regions)} of {group.file}")
            raise
        for region, room in destinations:
            if region.parts > 1 and region.tile not in self._tiles:
                self._tiles[region.tile] = _OpenTile(room, region.parts)
        return destinations

    def _reserve(self, regions: Sequence[ByteRegion]) -> None:
        """Waits until there is room for what is not in the memory of arrays that adopt it."""
        fresh = {r.tile: r for r in regions if r.tile not in self._tiles}
        held = 0
        for region in fresh.values():
            held += self._read_bytes(region)
            if self._plan.leaves[region.leaf].is_converted:
                boxes = {(region.leaf, member) for member in region.layout.tile.members}
                held += sum(self._box_bytes(*box) for box in boxes - self._reserved)
                self._reserved |= boxes
        self._budget.reserve(held, self._workers.progress)

    def _read_bytes(self, region: ByteRegion) -> int:
        """Host bytes of a tile as it is read, where the budget counts them."""
        if self._plan.adopt and not region.layout.staged:
            return 0
        return read_bytes(self._plan.leaves[region.leaf], region.layout)

    def _box_bytes(self, number: int, box: int) -> int:
        """Host bytes of a box whose values are computed, where the budget counts them."""
        leaf = self._plan.leaves[number]
        if self._plan.adopt and leaf.unit is None:
            return 0
        return leaf.local.boxes[box].size * leaf.dtype.itemsize

    def _submit(
        self, work: Callable[[], Then], file: str | None, regions: Sequence[ByteRegion], wait: bool
    ) -> None:
        def explain(error: BaseException) -> None:
            if not isinstance(error, SafetensorsLayoutError):
                error.add_note(f"while loading {self._names(regions)} of {file}")
            elif error.tensor is None:
                error.tensor = self._tensor(regions[0])

        self._workers.submit(work, explain, wait=wait)

    def _names(self, regions: Sequence[ByteRegion]) -> str:
        more = f" and {len(regions) - 1} more tensors" if len(regions) > 1 else ""
        return repr(self._tensor(regions[0])) + more

    def _tensor(self, region: ByteRegion) -> str:
        return self._plan.leaves[region.leaf].sources[region.source].entry.name

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

    def _region_done(self, destination: BufferSlice) -> None:
        region = destination.region
        nbytes = region.read.runs.total_bytes
        if region.parts > 1:
            tile = self._tiles[region.tile]
            tile.left -= 1
            tile.bytes_read += nbytes
            if tile.left:
                return
            nbytes = self._tiles.pop(region.tile).bytes_read
        leaf = self._plan.leaves[region.leaf]
        values = destination.members(leaf.stored)
        if not leaf.is_converted:
            wait = self._deliver(region.leaf, region.layout.tile.members, values)
            self._hold(region.leaf, wait, self._read_bytes(region))
            self._report(region, nbytes)
            return
        layout = region.layout
        outs = [
            self._open(region.leaf, member, part)
            for member, part in zip(layout.tile.members, layout.regions, strict=True)
        ]

        def work() -> Callable[[], None]:
            for box, value, out in zip(layout.regions, values, outs, strict=True):
                self._compute(region.leaf, box, value, out)
            return lambda: self._computed(region, nbytes)

        self._submit(work, leaf.file, [region], wait=False)

    def _open(self, number: int, member: int, part: Box) -> np.ndarray:
        """Where a part of a box goes, in the memory of the array."""
        box = self._boxes.get((number, member))
        if box is None:
            parts = self._parts[number, member]
            box = self._boxes[number, member] = _OpenBox(self._filled(number, member), parts)
        whole = self._plan.leaves[number].local.boxes[member]
        at: tuple[Any, ...] = (*part.within(whole).slices, ...)
        place: np.ndarray = box.values[at]
        return place

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
            out[...] = values
        for fill in leaf.fills:
            fill.put(box, out, fill.value)

    def _computed(self, region: ByteRegion, nbytes: int) -> None:
        number = region.leaf
        self._budget.hold(None, self._read_bytes(region))
        whole, parts = [], []
        for member in region.layout.tile.members:
            box = self._boxes[number, member]
            box.left -= 1
            if not box.left:
                whole.append(member)
                parts.append(self._boxes.pop((number, member)).values)
        if whole:
            held = sum(self._box_bytes(number, member) for member in whole)
            self._hold(number, self._deliver(number, whole, parts), held)
        self._report(region, nbytes)

    def _hold(self, number: int, wait: Callable[[], object] | None, nbytes: int) -> None:
        """Frees the room of a read once its values are on their way, and those of its unit."""
        unit = self._plan.leaves[number].unit
        if unit is not None:
            self._units[unit] -= 1
            self._unit_bytes[unit] += nbytes
            if self._units[unit]:
                return
            nbytes = self._unit_bytes.pop(unit)
        self._budget.hold(wait, nbytes)

    def _report(self, region: ByteRegion, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            name = self._plan.leaves[region.leaf].name
            self._progress(Progress(self._done_bytes, self._total_bytes, name))


def _threads(plan: ReadPlan, storage: RangeReader) -> int:
    """Requests at once: fewer where the page cache holds what some regions begin with."""
    profile = plan.profile
    if profile.cached_concurrency is None or not isinstance(storage, LocalStorage):
        return profile.concurrency
    starts = [(file, region.start) for file, regions in plan.batches for region in regions]
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
