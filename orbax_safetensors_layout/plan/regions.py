"""Regions: the elements of one tensor that are in one tile, in the file and in memory.

One that is not read straight into its place is cut into blocks, read into a staging buffer in the
order of the file: a compromise of long requests, and of whole cache lines in the copy from there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.geometry import (
    AffineView,
    Box,
    Gather,
    Ints,
    StridedRuns,
    replaced,
    row_major_strides,
)
from orbax_safetensors_layout.options import KIB, StorageProfile

from .axes import Axis, TileLayout, axes_of, memory_runs

TileKey = tuple[int, Box]
"""The number of a leaf, and the part of it that the first member of a tile is."""

Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""For each dimension of a region: extent, stride in elements of the tensor, and phase,
the place of the first index within its member, counted from the end where the stride is negative.
"""

# A transposing copy should write this many neighbouring bytes at least: two cache lines.
_LINE_BYTES = 128
# Blocks of a transposed region are not cut into shorter requests than this.
_LEAST_REQUEST_BYTES = 4096
# Elements at multiples of this distance fall into few sets of a cache. A transposing copy that
# gathers from rows of 8,192 bytes runs eight times faster where each row is followed by a gap of
# one cache line (0.26 in place of 2.0 ns per two-byte element, EPYC, numpy 2).
_CONFLICT_BYTES = 512
_PAD_BYTES = 64
# Pieces of this size are read straight into their places, however many they are: a buffer more
# costs less time than copying it from a staging buffer.
_DIRECT_SPAN_BYTES = 32 * KIB


class GatherAxis(NamedTuple):
    """Slabs of a region that are in no regular order."""

    number: int  # number of the axis that they are indices of, from the first to the last
    indices: Ints  # index of each, in order; several may have the same
    places: Ints  # where in memory each goes, in bytes


class Blocking(NamedTuple):
    """The shape of a region's blocks, and the layout of one in the staging buffer."""

    lengths: tuple[int, ...]  # indices of each axis in one block, at most
    # The axes from this one on share a request; a block has one for each index of those before.
    request: int
    # Those from this one on, not before `request`, are a row of the buffer: contiguous in the file.
    row: int
    pad_bytes: int  # unused bytes after each row

    @classmethod
    def plan(
        cls, axes: Sequence[Axis], itemsize: int, request_bytes: int, profile: StorageProfile
    ) -> Blocking:
        """Return the blocking of a region whose requests, without blocks, have `request_bytes`."""
        if not axes:
            return cls((), 0, 0, 0)
        sizes = _BlockSizes(axes, itemsize, request_bytes)
        inner = min(range(len(axes)), key=lambda d: (abs(axes[d].within), -d))
        lengths, cut = sizes.lengths(profile.staging_bytes)
        in_line = min(axes[inner].member, -(-_LINE_BYTES // itemsize))
        if inner < len(axes) - 1 and lengths[inner] < in_line:
            least = max(profile.max_gap_bytes, _LEAST_REQUEST_BYTES)
            rows = min(in_line, profile.staging_bytes // least)
            if rows > lengths[inner]:
                lengths, cut = sizes.lengths(profile.staging_bytes // rows, inner + 1)
                lengths = (*lengths[:inner], rows, *lengths[inner + 1 :])
        request = max(cut, sizes.outer)
        row, pad = _padding(axes, lengths, itemsize, inner, request)
        return cls(lengths, request, row, pad)

    def requests(self, axes: Sequence[Axis]) -> int:
        return math.prod(axis.extent for axis in axes[: self.request]) * self._blocks(axes)

    def read_bytes(self, axes: Sequence[Axis], itemsize: int) -> int:
        """Return the bytes of those reads: gaps between blocks are left out."""
        blocks = self._blocks(axes)
        nbytes = blocks * itemsize
        for axis, length in zip(axes[self.request :], self.lengths[self.request :], strict=True):
            ranges = _count(axis, length)
            # A range of n indices has n - 1 strides, and is in some of the blocks.
            nbytes += axis.source * (axis.extent - ranges) * (blocks // ranges)
        return math.prod(axis.extent for axis in axes[: self.request]) * nbytes

    def _blocks(self, axes: Sequence[Axis]) -> int:
        """Counts the blocks of axes that share a request."""
        tail = zip(axes[self.request :], self.lengths[self.request :], strict=True)
        return math.prod(_count(axis, length) for axis, length in tail)


@functools.lru_cache(4096)
def _count(axis: Axis, length: int) -> int:
    return sum(1 for _ in axis.ranges(length))


class _BlockSizes(NamedTuple):
    """Sizes of blocks; `request_bytes` is the length of a request that is not cut."""

    axes: Sequence[Axis]
    itemsize: int
    request_bytes: int

    @property
    def outer(self) -> int:
        """Leading axes whose indices are requests of their own."""
        reach, axis = self.itemsize, len(self.axes)
        while axis and reach < self.request_bytes:
            axis -= 1
            reach += (self.axes[axis].extent - 1) * self.axes[axis].source
        return axis

    def staged_bytes(self, first: int) -> int:
        """Bytes of a staging buffer for all indices of the axes from `first` on."""
        outer = self.outer
        if first < outer:
            return math.prod(axis.extent for axis in self.axes[first:outer]) * self.request_bytes
        return sum((a.extent - 1) * a.source for a in self.axes[first:]) + self.itemsize

    def lengths(self, most_bytes: int, first: int = 0) -> tuple[tuple[int, ...], int]:
        """Return the longest blocks of `most_bytes`, and the axis that is cut: `first` or later."""
        cut = first
        while cut < len(self.axes) - 1 and self.staged_bytes(cut + 1) > most_bytes:
            cut += 1
        axis, tail = self.axes[cut], self.staged_bytes(cut + 1)
        stride = axis.source if cut >= self.outer else tail
        length = _even(axis, 1 + max(0, most_bytes - tail) // stride)
        return (*[1] * cut, length, *[axis.whole for axis in self.axes[cut + 1 :]]), cut


def _even(axis: Axis, most: int) -> int:
    """Return a length up to `most` that cuts an axis evenly: whole members, or parts of one."""
    if most >= axis.extent:
        return axis.whole
    if most < axis.member:
        return -(-axis.member // -(-axis.member // most))
    members = axis.whole // axis.member
    return -(-members // -(-members // (most // axis.member))) * axis.member


def _padding(
    axes: Sequence[Axis], lengths: Sequence[int], itemsize: int, inner: int, request: int
) -> tuple[int, int]:
    """Return `Blocking.row` and `pad_bytes` of a block that is gathered along axis `inner`."""
    if inner < request:  # a row is a request
        tail = zip(axes[request:], lengths[request:], strict=True)
        row_bytes = sum((n - 1) * axis.source for axis, n in tail) + itemsize
        distance = row_bytes * row_major_strides(lengths[inner:request])[0]
        return request, 0 if distance % _CONFLICT_BYTES else _PAD_BYTES
    distance = axes[inner].source
    nested = all(
        axes[d].source == axes[d + 1].extent * axes[d + 1].source for d in range(request, inner)
    )
    if inner == len(axes) - 1 or not nested or distance % _CONFLICT_BYTES:
        return request, 0
    return inner + 1, _PAD_BYTES


@dataclasses.dataclass(frozen=True, eq=False)
class RegionPlan:
    """The read of a region, in bytes from its first; the same object for all that are equal."""

    itemsize: int
    axes: tuple[Axis, ...]  # its dimensions, outermost in the file first
    repeats: tuple[Axis, ...]  # dimensions along which each element is put in several places
    runs: StridedRuns  # the needed bytes
    requests: StridedRuns  # the same with the gaps that are cheaper to read than to skip
    spans: StridedRuns | None  # where they go in memory, in file order; None where they are staged
    blocking: Blocking  # how a region that is staged is cut
    request_bytes: int  # the longest request of one that is not staged
    gather: GatherAxis | None = None  # its slabs, if they are in no regular order

    @classmethod
    def plan(
        cls,
        layout: TileLayout,
        geometry: Geometry,
        profile: StorageProfile,
        slabs: Gather | None = None,
    ) -> RegionPlan:
        """Return the read of a region of a tile, or with `slabs` of slabs in no regular order."""
        itemsize, (shape, strides, phases) = layout.itemsize, geometry
        steps = [abs(stride) for stride in strides]
        runs = requests = StridedRuns.of(AffineView(0, shape, tuple(steps)), itemsize)
        axes, repeats = axes_of(layout, shape, [s * itemsize for s in strides], phases)
        gather = None
        if slabs is not None:
            # Places are bytes of memory; offsets bytes of the file, ascending from 0.
            along, places, offsets = slabs.axis, slabs.places, slabs.offsets
            step = int(np.gcd.reduce(offsets)) or itemsize
            indices = offsets // step
            count = int(indices[-1]) + 1
            steps[along] = step // itemsize
            shape = replaced(shape, along, count)
            requests = StridedRuns.of(AffineView(0, shape, tuple(steps)), itemsize)
            runs = StridedRuns(0, runs.total_bytes, ((len(np.unique(indices)), step),))
            number = sum(axis.source > step for axis in axes)
            axis = Axis(count, step, count, 0, layout.within[along], 0)
            axes = (*axes[:number], axis, *axes[number:])
            gather = GatherAxis(number, indices, places)
        requests = requests.coalesce(profile.max_gap_bytes)
        spans = None
        if gather is None and not repeats and requests.total_bytes == runs.total_bytes:
            spans = memory_runs(axes, itemsize)
            members = len(layout.tile.members)
            if spans and spans.run_bytes < _DIRECT_SPAN_BYTES and spans.count > members:
                spans = None
        blocking = Blocking.plan(axes, itemsize, requests.run_bytes, profile)
        most_bytes = profile.request_bytes
        return cls(itemsize, axes, repeats, runs, requests, spans, blocking, most_bytes, gather)

    @property
    def direct(self) -> bool:
        return self.spans is not None

    def interlaces(self, shift: int) -> bool:
        """Whether an equal region, `shift` bytes behind in the file, can share its requests."""
        if self.direct or self.gather is not None:
            return not shift
        if not shift < self.requests.run_bytes:
            return False
        # Spans must overlap, and be cut, and end rows, at the same places.
        reach, blocking = self.itemsize, self.blocking
        for number in reversed(range(len(self.axes))):
            axis = self.axes[number]
            is_cut = number < blocking.row or blocking.lengths[number] < axis.whole
            if is_cut and reach + shift > axis.source:
                return False
            reach += (axis.extent - 1) * axis.source
        return True

    @functools.cached_property
    def needed_bytes(self) -> int:
        return self.runs.total_bytes

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of the tile that it fills."""
        extents = [axis.extent for axis in (*self.axes, *self.repeats)]
        if self.gather is not None:
            extents[self.gather.number] = len(self.gather.places)
        return math.prod(extents)

    @functools.cached_property
    def storage_requests(self) -> int:
        requests = self.requests
        if self.direct:
            return requests.count * -(-requests.run_bytes // self.request_bytes)
        return self.blocking.requests(self.axes)

    @functools.cached_property
    def storage_bytes(self) -> int:
        if self.direct:
            return self.requests.total_bytes
        return self.blocking.read_bytes(self.axes, self.itemsize)


class ByteRegion(NamedTuple):
    """A region at its place."""

    leaf: int  # number of the leaf in the plan
    source: int  # number of the piece of the leaf
    start: int  # first byte read, in the file
    at: int  # where in the tile's memory the first byte goes
    read: RegionPlan
    layout: TileLayout
    parts: int  # how many regions fill the tile

    @property
    def stop(self) -> int:
        return self.start + self.read.requests.stop

    @property
    def tile(self) -> TileKey:
        return self.leaf, self.layout.regions[0]
