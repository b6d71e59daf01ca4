"""Jobs: the smallest pieces of a read plan that one thread carries out.

A `Destination` is a tile's members in memory. Ranges whose bytes stand in the file in the order
of the members are read straight into it (`RunsJob`, `GroupJob`); others are read into a staging
buffer and put in place by one numpy strided copy a block (`BlocksJob`).
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from orbax_safetensors_layout.format.dtypes import DType
from orbax_safetensors_layout.geometry.runs import StridedRuns
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan.reads import (
    MAX_RANK,
    TINY_REGION_BYTES,
    Group,
    Region,
)
from orbax_safetensors_layout.plan.tiles import TileRead
from orbax_safetensors_layout.storage.base import Buffer, Storage
from orbax_safetensors_layout.transfer.buffers import Bytes, align, allocate

_JOB_SECONDS = 1e-3  # many small requests share a job that takes about this long


class Destination(NamedTuple):
    """The members of a region's tile in memory, one every `slot_bytes`.

    Attributes:
        region: The region.
        memory: Room for all members.
    """

    region: Region
    memory: Bytes

    def members(self, dtype: DType) -> list[np.ndarray]:
        """Each member as an array over the memory; packed ones as their bytes."""
        read = self.region.read
        stored = np.dtype(np.uint8) if dtype.packed else dtype.numpy
        count, rank = len(read.tile.members), len(read.member_shape)
        if count > 1 and 0 < rank < MAX_RANK:
            strides = (read.slot_bytes, *read.staging.within)
            shape = (count, *read.member_shape)
            return [*np.ndarray(shape, stored, self.memory.data, 0, strides)]
        return [
            np.ndarray(read.member_shape, stored, self.memory.data, number * read.slot_bytes)
            for number in range(count)
        ]

    def buffers(self, start: int, stop: int) -> list[Buffer]:
        """Where bytes `start` to `stop` of the members' concatenation are."""
        read = self.region.read
        view = self.memory.data
        if read.slot_bytes == read.member_bytes or len(read.tile.members) == 1:
            return [view[start:stop]]
        found = []
        while start < stop:
            number, within = divmod(start, read.member_bytes)
            count = min(stop - start, read.member_bytes - within)
            at = number * read.slot_bytes + within
            found.append(view[at : at + count])
            start += count
        return found


class Job(Protocol):
    """Something that one worker thread does."""

    @property
    def file(self) -> str:
        """The file that it reads."""
        ...

    @property
    def destinations(self) -> Sequence[Destination]:
        """What the job fills, wholly or in part."""
        ...

    def run(self, storage: Storage, scratch: Scratch) -> tuple[int, int]:
        """Reads, and puts what was read in its place; returns bytes read and requests made."""
        ...


class Scratch(threading.local):
    """Staging memory of each worker thread, grown to what its jobs need."""

    def __init__(self) -> None:
        self._memory: Bytes | None = None

    def take(self, nbytes: int) -> Bytes:
        """At least `nbytes` of aligned memory; the same each time, so use it up before asking."""
        if self._memory is None or self._memory.size < nbytes:
            self._memory = allocate(nbytes)
        return self._memory


class RunsJob(NamedTuple):
    """Some requests of one region, or a piece of one, read straight into the destination.

    Attributes:
        file: The file.
        destination: The region in memory.
        first: First request.
        last: One past the last request.
        piece: For one request: the bytes of it to read, half-open.
    """

    file: str
    destination: Destination
    first: int
    last: int
    piece: tuple[int, int]

    @property
    def destinations(self) -> Sequence[Destination]:
        return (self.destination,)

    def run(self, storage: Storage, scratch: Scratch) -> tuple[int, int]:
        region = self.destination.region
        requests, shared = region.read.requests, region.read.shared
        start, stop = self.piece
        for number, offset in enumerate(requests.offsets(self.first, self.last).tolist()):
            within = (self.first + number) * requests.run_bytes
            buffers = self.destination.buffers(within + start, within + stop)
            storage.read_into(self.file, region.base + offset + start, buffers, shared=shared)
        count = self.last - self.first
        return (stop - start) * count, count


class Pieces(NamedTuple):
    """A block as a grid of contiguous pieces, alike in the staging buffer and in memory.

    Attributes:
        shape: The grid.
        dtype: The widest unsigned integer that fits the pieces. (Raw bytes of a piece's size copy
            as fast, but numpy holds the GIL where there are fewer than 500 elements.)
        source_strides: Byte strides of the grid in the staging buffer.
        target_strides: Byte strides of the grid in memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @classmethod
    def of(cls, read: TileRead, axis: int) -> Pieces:
        """The dimensions of a tile from `axis` on."""
        staging, unit = read.staging, read.itemsize
        grid: list[tuple[int, int, int]] = []
        for d in reversed(range(axis, len(read.member_shape))):
            extent = read.member_shape[d]
            within = (extent, staging.source[d], staging.within[d])
            across = (read.tile.grid[d], extent * staging.source[d], staging.across[d])
            for count, source, target in (within, across):
                if not grid and source == target == unit:
                    unit *= count
                elif count > 1:
                    grid.append((count, source, target))
        width = math.gcd(unit, 8)
        grid.insert(0, (unit // width, width, width))
        shape, sources, targets = zip(*reversed(grid), strict=True)
        return cls(shape, np.dtype(f"u{width}"), sources, targets)

    def repeated(self, count: int, source_stride: int, target_stride: int) -> Pieces:
        """The same for each of `count` indices of one more leading dimension."""
        if count == 1:
            return self
        return Pieces(
            (count, *self.shape),
            self.dtype,
            (source_stride, *self.source_strides),
            (target_stride, *self.target_strides),
        )


class Block(NamedTuple):
    """A block of one region that is read into a staging buffer and copied from there.

    Attributes:
        destination: The region in memory.
        requests: The block's requests, absolute in the file.
        pieces: The block as contiguous pieces.
        target_offset: First byte of the block in the destination.
    """

    destination: Destination
    requests: StridedRuns
    pieces: Pieces
    target_offset: int

    def copy(self, staging: Bytes) -> None:
        """Puts the block, which begins at the first byte of `staging`, in its place."""
        shape, dtype, source_strides, target_strides = self.pieces
        memory = self.destination.memory.data
        source: np.ndarray = np.ndarray(shape, dtype, staging.data, strides=source_strides)
        target: np.ndarray = np.ndarray(shape, dtype, memory, self.target_offset, target_strides)
        target[...] = source


class BlocksJob(NamedTuple):
    """Some blocks of one region, one after the other.

    Attributes:
        file: The file.
        destination: The region in memory.
        blocks: The blocks.
    """

    file: str
    destination: Destination
    blocks: Sequence[Block]

    @property
    def destinations(self) -> Sequence[Destination]:
        return (self.destination,)

    def run(self, storage: Storage, scratch: Scratch) -> tuple[int, int]:
        shared = self.destination.region.read.shared
        for block in self.blocks:
            length = block.requests.run_bytes
            staging = scratch.take(block.requests.total_bytes)
            for number, offset in enumerate(block.requests.offsets().tolist()):
                into = staging.data[number * length : (number + 1) * length]
                storage.read_into(self.file, offset, [into], shared=shared)
            block.copy(staging)
        requests = [block.requests for block in self.blocks]
        return sum(r.total_bytes for r in requests), sum(r.count for r in requests)


class GroupJob(NamedTuple):
    """Neighbouring small regions fetched by one request.

    Attributes:
        file: The file.
        destinations: The regions in memory, by file offset.
        blocks: For each region that needs staging, its one block; else None.
    """

    file: str
    destinations: Sequence[Destination]
    blocks: Sequence[Block | None]

    def run(self, storage: Storage, scratch: Scratch) -> tuple[int, int]:
        start = self.destinations[0].region.start
        stop = self.destinations[-1].region.stop
        staged = [
            align(destination.region.stop - destination.region.start)
            for destination, block in zip(self.destinations, self.blocks, strict=True)
            if block
        ]
        staging = scratch.take(sum(staged) + (stop - start if self._has_gaps() else 0))
        gap_at, stage_at = sum(staged), 0
        buffers = _BufferList()
        copies: list[tuple[Block, int]] = []
        position = start
        for destination, block in zip(self.destinations, self.blocks, strict=True):
            region = destination.region
            if region.start > position:
                buffers.add(staging, gap_at, gap_at + region.start - position)
            length = region.stop - region.start
            if block:
                buffers.add(staging, stage_at, stage_at + length)
                copies.append((block, stage_at))
                stage_at += align(length)
            else:
                buffers.extend(destination)
            position = region.stop
        shared = self.destinations[0].region.read.shared
        storage.read_into(self.file, start, buffers.views(), shared=shared)
        for block, at in copies:
            block.copy(staging[at:])
        return stop - start, 1

    def _has_gaps(self) -> bool:
        return any(a.region.stop < b.region.start for a, b in itertools.pairwise(self.destinations))


class _BufferList:
    """Destination buffers in file order; neighbours in memory become one."""

    def __init__(self) -> None:
        self._spans: list[tuple[Bytes, int, int]] = []

    def add(self, memory: Bytes, start: int, stop: int) -> None:
        if self._spans:
            last, first, end = self._spans[-1]
            if last is memory and end == start:
                self._spans[-1] = (memory, first, stop)
                return
        self._spans.append((memory, start, stop))

    def extend(self, destination: Destination) -> None:
        """Adds all members of a destination; its memory is a slice of its group's."""
        read = destination.region.read
        base = destination.memory.base
        memory = destination.memory
        shift = 0
        if isinstance(base, np.ndarray):
            shift = memory.ctypes.data - base.ctypes.data
            memory = base
        members = len(read.tile.members)
        if read.slot_bytes == read.member_bytes:
            self.add(memory, shift, shift + members * read.member_bytes)
            return
        for number in range(members):
            at = shift + number * read.slot_bytes
            self.add(memory, at, at + read.member_bytes)

    def views(self) -> list[Buffer]:
        return [memory.data[start:stop] for memory, start, stop in self._spans]


def destinations_of(group: Group) -> list[Destination]:
    """Allocates room for all regions of a group.

    Small regions share memory with their like: an array that is kept then does not keep much
    larger ones from being freed.
    """
    regions = group.regions
    if len(regions) == 1:
        memory = allocate(regions[0].read.memory_bytes, file_offset=regions[0].start)
        return [Destination(regions[0], memory)]
    sizes = [region.read.memory_bytes for region in regions]
    tiny = [size < TINY_REGION_BYTES for size in sizes]
    arenas = {kind: allocate(_total(sizes, tiny, kind)) for kind in set(tiny)}
    used = dict.fromkeys(arenas, 0)
    destinations = []
    for region, size, kind in zip(regions, sizes, tiny, strict=True):
        start = used[kind]
        used[kind] = start + size
        destinations.append(Destination(region, arenas[kind][start : start + size]))
    return destinations


def _total(sizes: Sequence[int], tiny: Sequence[bool], kind: bool) -> int:
    return sum(size for size, is_tiny in zip(sizes, tiny, strict=True) if is_tiny is kind)


def jobs_of(
    group: Group, destinations: Sequence[Destination], profile: StorageProfile
) -> Iterator[Job]:
    """The jobs that fill `destinations`, lazily."""
    if len(destinations) > 1:
        yield _group_job(group.file, destinations)
    elif destinations[0].region.read.direct:
        yield from _runs_jobs(group.file, destinations[0], profile)
    else:
        blocks = _blocks(destinations[0])
        batch = _per_job(profile.staging_bytes, profile)
        while some := list(itertools.islice(blocks, batch)):
            yield BlocksJob(group.file, destinations[0], some)


def _group_job(file: str, destinations: Sequence[Destination]) -> GroupJob:
    found: dict[int, Pieces] = {}  # by the TileRead, which tensors of one shape share
    blocks: list[Block | None] = []
    for destination in destinations:
        read = destination.region.read
        if read.direct:
            blocks.append(None)
            continue
        pieces = found.get(id(read))
        if pieces is None:
            pieces = found[id(read)] = Pieces.of(read, 0)
        region = destination.region
        requests = StridedRuns(region.start, region.stop - region.start, ())
        blocks.append(Block(destination, requests, pieces, 0))
    return GroupJob(file, destinations, blocks)


def _runs_jobs(file: str, destination: Destination, profile: StorageProfile) -> Iterator[RunsJob]:
    requests = destination.region.read.requests
    run = requests.run_bytes
    if run > profile.request_bytes:
        for number in range(requests.count):
            for start in range(0, run, profile.request_bytes):
                piece = (start, min(start + profile.request_bytes, run))
                yield RunsJob(file, destination, number, number + 1, piece)
        return
    batch = _per_job(run, profile)
    for first in range(0, requests.count, batch):
        last = min(first + batch, requests.count)
        yield RunsJob(file, destination, first, last, (0, run))


def _per_job(request_bytes: int, profile: StorageProfile) -> int:
    """How many requests of a size share a job: where one more costs little time, several."""
    by_time = int(_JOB_SECONDS / profile.latency_seconds) if profile.latency_seconds else 1024
    return max(1, min(profile.request_bytes // request_bytes, by_time))


def _blocks(destination: Destination) -> Iterator[Block]:
    region = destination.region
    read, staging = region.read, region.read.staging
    axis, cells, rows, _ = read.blocking
    member, grid = read.member_shape[axis], read.tile.grid[axis]
    cuts: dict[tuple[int, int], tuple[StridedRuns, Pieces]] = {}  # all alike but those at the ends
    for outer in itertools.product(*map(range, read.tile.box.shape[:axis])):
        for cell in range(0, grid, cells):
            for row in range(0, member, rows):
                extent = min(cells, grid - cell), min(rows, member - row)
                if extent not in cuts:
                    cuts[extent] = _cut(read, *extent)
                runs, pieces = cuts[extent]
                index = (*outer, cell * member + row)
                offset = region.start + sum(map(operator.mul, index, read.strides))
                target = sum(
                    (i // n) * across + (i % n) * within
                    for i, n, across, within in zip(
                        index, read.member_shape, staging.across, staging.within, strict=False
                    )
                )
                requests = StridedRuns(offset, runs.run_bytes, runs.levels)
                yield Block(destination, requests, pieces, target)


def _cut(read: TileRead, cells: int, rows: int) -> tuple[StridedRuns, Pieces]:
    """The requests, from offset 0, and the pieces of one block of a tile.

    Args:
        read: The tile.
        cells: Members that the block touches along the dimension that is cut.
        rows: Indices that it has of each of them along it: all, or some of a single member. It
            has one index of the dimensions before and all of those after.
    """
    staging, axis = read.staging, read.blocking.axis
    member, stride = read.member_shape[axis], staging.source[axis]
    if axis >= staging.outer:
        length = (cells * rows - 1) * stride + read.staged_bytes(axis + 1)
        runs = StridedRuns(0, length, ())
    else:
        counts = (cells * rows, *read.tile.box.shape[axis + 1 : staging.outer])
        levels = zip(counts, read.strides[axis : staging.outer], strict=True)
        runs = StridedRuns(0, read.requests.run_bytes, tuple(levels))
    pieces = Pieces.of(read, axis + 1).repeated(rows, stride, staging.within[axis])
    return runs, pieces.repeated(cells, member * stride, staging.across[axis])
