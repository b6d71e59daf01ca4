"""Blocks: parts of a region that are read into a staging buffer and copied into their place."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.geometry import StridedRuns, row_major_strides
from orbax_safetensors_layout.plan import GatherAxis, RegionPlan, Request
from orbax_safetensors_layout.runtime import Bytes, allocate
from orbax_safetensors_layout.storage import Buffer

from .tile_buffers import BufferSlice

_SHORT_LOOP = 8  # numpy's inner loop should be longer
_LONG_LOOP = 32

_MOVED_BYTES = 1 << 20  # at once, of slabs in no regular order

# A dimension of a copy: indices, and bytes from one to the next where staged and in memory.
Segment = tuple[int, int, int]


class Scratch(threading.local):
    """Staging memory of each worker thread, grown to what its jobs need."""

    def __init__(self) -> None:
        self._memory: Bytes | None = None
        self._rows: tuple[StagedRows | None, list[Buffer]] = (None, [])

    def take(self, nbytes: int) -> Bytes:
        """At least `nbytes` of aligned memory, the same each time."""
        if self._memory is None or self._memory.size < nbytes:
            self._memory = allocate(nbytes)
            self._rows = (None, [])
        return self._memory

    def rows(self, rows: StagedRows) -> list[Buffer]:
        """Rows from the beginning of the memory that was taken last; made once for equal blocks."""
        if self._rows[0] != rows:
            assert self._memory is not None
            self._rows = (rows, rows.buffers(self._memory.data, 0))
        return self._rows[1]


class StagedRows(NamedTuple):
    """The place of one request in a staging buffer."""

    number: int  # rows
    row_bytes: int  # bytes of each but the last
    last_bytes: int  # bytes of the last
    pitch: int  # bytes from row to row

    def buffers(self, staging: Buffer, at: int) -> list[Buffer]:
        """The rows of a request that lies at byte `at`."""
        rows = [
            staging[start : start + self.row_bytes]
            for start in range(at, at + (self.number - 1) * self.pitch, self.pitch)
        ]
        start = at + (self.number - 1) * self.pitch
        return [*rows, staging[start : start + self.last_bytes]]


class Copy(NamedTuple):
    """One strided copy from a staging buffer into memory."""

    shape: tuple[int, ...]  # a grid of elements, or of contiguous pieces
    # The widest unsigned integer that fits them. (Raw bytes of a piece's size copy as fast, but
    # numpy holds the GIL where there are fewer than 500 elements.)
    dtype: np.dtype
    source_offset: int  # first byte in the staging buffer, counted from the block's
    source_strides: tuple[int, ...]  # byte strides there
    target_offset: int  # first byte in memory, counted from the block's
    target_strides: tuple[int, ...]  # byte strides there
    moves: Moves | None = None  # one more axis of the grid, whose indices are in no regular order

    def run(self, staging: Buffer, shift: int, memory: Buffer, at: int) -> None:
        """Copies, from byte `shift` of the staging buffer on to byte `at` of memory on."""
        shape, dtype, begin, sources, first, targets, moves = self
        begin, first = shift + begin, at + first
        if moves is None:
            source: np.ndarray = np.ndarray(shape, dtype, staging, begin, sources)
            target: np.ndarray = np.ndarray(shape, dtype, memory, first, targets)
            target[...] = source
            return
        n, parts, (taken, step), (put, stride) = moves
        sources, targets = (*sources[:n], step, *sources[n:]), (*targets[:n], stride, *targets[n:])
        source = np.ndarray((*shape[:n], taken, *shape[n:]), dtype, staging, begin, sources)
        target = np.ndarray((*shape[:n], put, *shape[n:]), dtype, memory, first, targets)
        before = (slice(None),) * n
        for rows, places in parts:
            values = source[(*before, rows)] if isinstance(rows, slice) else source.take(rows, n)
            target[(*before, places)] = values


Indices = slice | npt.NDArray[np.int64]


class Moves(NamedTuple):
    """An axis of a copy whose indices are in no regular order."""

    axis: int  # its number in the grid
    # Indices in the staging buffer, and those in memory that they go to.
    parts: tuple[tuple[Indices, Indices], ...]
    source: tuple[int, int]  # extent in the staging buffer, and bytes from one index to the next
    target: tuple[int, int]  # the same in memory


def _parts(
    taken: npt.NDArray[np.int64], places: npt.NDArray[np.int64], most: int
) -> Iterator[tuple[Indices, Indices]]:
    """Indices and where they go: as slices if runs of them are long, else `most` at once."""
    edges = np.flatnonzero((np.diff(taken) != 1) | (np.diff(places) != 1)) + 1
    if len(edges) * _LONG_LOOP > len(taken):
        edges = np.arange(most, len(taken), most)
    for low, high in itertools.pairwise([0, *edges.tolist(), len(taken)]):
        yield _as_slice(taken[low:high]), _as_slice(places[low:high])


def _as_slice(indices: npt.NDArray[np.int64]) -> Indices:
    """Indices as a slice, if each is one more than that before it."""
    first = int(indices[0])
    return slice(first, first + len(indices)) if (np.diff(indices) == 1).all() else indices


class Cut(NamedTuple):
    """The requests and copies of blocks of one shape."""

    requests: StridedRuns  # the block's requests, from the block's first byte in the file
    rows: StagedRows  # how each lies in the staging buffer; one after the other
    copies: tuple[Copy, ...]  # what puts them in their place
    staging_bytes: int  # what they take in the staging buffer

    @classmethod
    def of(cls, read: RegionPlan, ranges: Sequence[tuple[int, int]], added_bytes: int) -> Cut:
        """The cut of a block, from its half-open range of each axis.

        Requests are longer by `added_bytes` bytes, for regions that interlace.
        """
        axes, blocking = read.axes, read.blocking
        counts = [high - low for low, high in ranges]
        first, row = blocking.request, blocking.row
        reach = [(n - 1) * axis.source for n, axis in zip(counts, axes, strict=True)]
        last_bytes = sum(reach[row:]) + read.itemsize + added_bytes
        row_bytes = axes[row - 1].source if row > first else last_bytes
        rows = StagedRows(
            math.prod(counts[first:row]), row_bytes, last_bytes, row_bytes + blocking.pad_bytes
        )
        outer = [stride * rows.pitch for stride in row_major_strides(counts[:row])]
        staged = (*outer, *(axis.source for axis in axes[row:]))
        levels = [(n, axis.source) for n, axis in zip(counts[:first], axes, strict=False)]
        length = (rows.number - 1) * row_bytes + last_bytes
        return cls(
            StridedRuns(0, length, tuple(levels)),
            rows,
            tuple(_copies(read, ranges, staged)),
            math.prod(counts[:row]) * rows.pitch,
        )

    @classmethod
    def whole(cls, read: RegionPlan, added_bytes: int) -> Cut:
        """All of a region of one request, as it is in the file; `added_bytes` as for `of`."""
        ranges = [(0, axis.extent) for axis in read.axes]
        copies = _copies(read, ranges, [axis.source for axis in read.axes])
        length = read.requests.run_bytes + added_bytes
        rows = StagedRows(1, length, length, length)
        return cls(StridedRuns(0, length, ()), rows, tuple(copies), length)


class Block(NamedTuple):
    """A block of one region, or of several that interlace."""

    cut: Cut  # its shape
    start: int  # its first byte in the file
    slices: Sequence[BufferSlice]  # its regions
    moved: int = 0  # bytes of memory from the beginning of a region to that of the block

    def buffers(self, staging: Bytes, scratch: Scratch) -> Iterator[tuple[int, list[Buffer]]]:
        """Each request: where it begins in the file, and where it goes in the staging buffer."""
        requests, rows = self.cut.requests, self.cut.rows
        if not requests.levels:
            yield self.start, scratch.rows(rows)
            return
        for number, offset in enumerate(requests.offsets().tolist()):
            yield self.start + offset, rows.buffers(staging.data, number * rows.number * rows.pitch)

    def copy(self, staging: Buffer) -> None:
        """Puts the block, which begins at the first byte of `staging`, in its places."""
        start = self.slices[0].region.start
        for region, buffer in self.slices:
            at = buffer.begin + region.at + self.moved
            for copy in self.cut.copies:
                copy.run(staging, region.start - start, buffer.memory.data, at)


def blocks_of(request: Request, slices: Sequence[BufferSlice]) -> Iterator[Block]:
    """The blocks of regions that are staged, in the order of the file."""
    read = request.read
    ranges = [[*a.ranges(n)] for a, n in zip(read.axes, read.blocking.lengths, strict=True)]
    cuts: dict[tuple[tuple[int, int], ...], Cut] = {}  # equal but for those at the ends
    steps = [
        [_step(read, number, low, high) for low, high in cut] for number, cut in enumerate(ranges)
    ]
    for block, step in zip(itertools.product(*ranges), itertools.product(*steps), strict=True):
        kind = tuple(same for same, _, _ in step)
        if kind not in cuts:
            cuts[kind] = Cut.of(read, block, request.added_bytes)
        start = request.start + sum(source for _, source, _ in step)
        yield Block(cuts[kind], start, slices, sum(target for _, _, target in step))


def _step(read: RegionPlan, number: int, low: int, high: int) -> tuple[tuple[int, int], int, int]:
    """Return the key of ranges with equal copies, and where one begins in file and memory."""
    axis = read.axes[number]
    if read.gather is not None and number == read.gather.number:
        return (low, high), low * axis.source, 0
    phase = (axis.phase + low) % axis.member if axis.crosses else 0
    return (high - low, phase), low * axis.source, axis.memory_offset(low)


def _copies(
    read: RegionPlan, ranges: Sequence[tuple[int, int]], staged: Sequence[int]
) -> Iterator[Copy]:
    """The copies of a block, whose axes have the strides `staged` in the staging buffer."""
    dimensions = [*zip(read.axes, ranges, staged, strict=True)]
    dimensions += [(axis, (0, axis.extent), 0) for axis in read.repeats]
    if read.gather is not None:
        _, between, stride = dimensions.pop(read.gather.number)
    whole = [
        [
            (
                (first - low) * stride,
                axis.memory_offset(first) - axis.memory_offset(low),
                ((count, stride, axis.within), (members, axis.member * stride, axis.across)),
            )
            for first, members, count in axis.segments(low, high)
        ]
        for axis, (low, high), stride in dimensions
    ]
    for part in itertools.product(*whole):
        segments = [segment for _, _, both in reversed(part) for segment in both]
        begin, at = sum(p[0] for p in part), sum(p[1] for p in part)
        for copy in _copy(segments, read.itemsize, begin, at):
            if read.gather is None:
                yield copy
            else:
                yield from _moved(copy, read.gather, between, stride)


def _moved(copy: Copy, gather: GatherAxis, between: tuple[int, int], stride: int) -> Iterator[Copy]:
    """A copy of one slab as that of all that are in a range, `stride` bytes apart where staged."""
    low, high = np.searchsorted(gather.indices, between)
    if low == high:
        return
    taken, places = gather.indices[low:high] - between[0], gather.places[low:high]
    axis = sum(abs(other) > stride for other in copy.source_strides)
    if axis == len(copy.shape) or not isinstance(_as_slice(taken), slice):
        order = np.argsort(places)  # memory is written in its order
        taken, places = taken[order], places[order]
    step = int(np.gcd.reduce(places)) or 1
    places = places // step
    most = max(1, _MOVED_BYTES // (math.prod(copy.shape) * copy.dtype.itemsize))
    extents = (int(taken.max()) + 1, stride), (int(places.max()) + 1, step)
    yield copy._replace(moves=Moves(axis, tuple(_parts(taken, places, most)), *extents))


def _copy(segments: Sequence[Segment], itemsize: int, begin: int, at: int) -> Iterator[Copy]:
    """A grid, innermost in the file first, as copies from byte `begin` staged to `at` in memory."""
    unit = itemsize
    grid: list[Segment] = []
    for count, source, target in segments:
        if not grid and source == target == unit:
            unit *= count
        elif count > 1:
            grid.append((count, source, target))
    width = math.gcd(unit, 8)
    if unit > width or not grid:
        grid.insert(0, (unit // width, width, width))
    # numpy walks memory in the order of the target. Where its inner loop would be short, and not
    # a copy of contiguous bytes, it is taken apart: each index of it is a copy of its own.
    inner = min(grid, key=lambda segment: abs(segment[2]))
    others = [count for count, _, _ in grid if count != inner[0]]
    contiguous = inner[1] == inner[2] == width
    if not contiguous and inner[0] <= _SHORT_LOOP and max(others, default=0) >= _LONG_LOOP:
        grid.remove(inner)
    else:
        inner = (1, 0, 0)
    shape, sources, targets = zip(*reversed(grid), strict=True)
    dtype = np.dtype(f"u{width}")
    for index in range(inner[0]):
        source, target = begin + index * inner[1], at + index * inner[2]
        yield Copy(shape, dtype, source, sources, target, targets)
