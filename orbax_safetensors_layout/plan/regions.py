"""Regions: the elements of one tensor that are in one tile, in the file and in memory.

The geometry is in bytes from the region's first one, and shared by all regions that have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.geometry import AffineView, Box, Gather, StridedRuns
from orbax_safetensors_layout.options import StorageProfile

from .axes import Axis, axes_of, memory_runs
from .blocking import Blocking
from .tiles import TileLayout

TileKey = tuple[int, Box]
"""The number of a leaf, and the part of it that the first member of a tile is."""

_DIRECT_SPAN_BYTES = 32 << 10
"""Pieces of this size are read straight into their places, however many they are: a buffer more
costs less time than copying it from a staging buffer."""


class GatherAxis(NamedTuple):
    """Slabs of a region that are in no regular order."""

    number: int  # number of the axis that they are indices of
    indices: npt.NDArray[np.int64]  # index of each, in order; several may have the same
    places: npt.NDArray[np.int64]  # where in memory each goes, in bytes


@dataclasses.dataclass(frozen=True, slots=True)
class RegionPlan:
    """How a region is read, wherever in the file and in memory it is."""

    itemsize: int
    axes: tuple[Axis, ...]  # its dimensions, outermost in the file first
    repeats: tuple[Axis, ...]  # dimensions along which each element is put in several places
    runs: StridedRuns  # the needed bytes
    requests: StridedRuns  # the same with the gaps that are cheaper to read than to skip
    # Where those bytes go in memory, in the order of the file, if they are read straight into it;
    # None where they are staged.
    spans: StridedRuns | None
    blocking: Blocking  # how a region that is staged is cut
    # Its slabs, if they are in no regular order; the axis that they are of is one of `axes`, from
    # the first to the last of them in the file.
    gather: GatherAxis | None = None

    @classmethod
    def plan(
        cls,
        layout: TileLayout,
        extents: Sequence[int],
        strides: Sequence[int],
        phases: Sequence[int],
        profile: StorageProfile,
        slabs: Gather | None = None,
    ) -> RegionPlan:
        """Return the read of a region, whose `strides` count elements of the tensor.

        With `slabs`, of such slabs in no regular order, from the first to the last in the file:
        their places are bytes of memory, their offsets bytes of the file, ascending from 0.
        """
        itemsize = layout.itemsize
        shape, steps = tuple(extents), [abs(stride) for stride in strides]
        runs = requests = StridedRuns.of(AffineView(0, shape, tuple(steps)), itemsize)
        axes, repeats = axes_of(layout, extents, [s * itemsize for s in strides], phases)
        gather = None
        if slabs is not None:
            along, places, offsets = slabs.axis, slabs.places, slabs.offsets
            step = int(np.gcd.reduce(offsets)) or itemsize
            indices = offsets // step
            count = int(indices[-1]) + 1
            steps[along] = step // itemsize
            shape = (*extents[:along], count, *extents[along + 1 :])
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
        return cls(itemsize, axes, repeats, runs, requests, spans, blocking, gather)

    @property
    def direct(self) -> bool:
        """Whether it is read straight into its place."""
        return self.spans is not None

    def interlaces(self, shift: int) -> bool:
        """Whether an equal region, `shift` bytes behind in the file, can share its requests.

        Their spans overlap, and where a span is cut, and where its rows end, so does the other's.
        Of those that are read straight into place, only copies of one another share them.
        """
        if self.direct or self.gather is not None:
            return not shift
        if not shift < self.requests.run_bytes:
            return False
        reach, blocking = self.itemsize, self.blocking
        for number in reversed(range(len(self.axes))):
            axis = self.axes[number]
            is_cut = number < blocking.row or blocking.lengths[number] < axis.whole
            if is_cut and reach + shift > axis.source:
                return False
            reach += (axis.extent - 1) * axis.source
        return True

    def storage_requests(self, profile: StorageProfile) -> int:
        """Return the number of ranged reads that fetch the region by itself."""
        requests = self.requests
        if self.direct:
            return requests.count * -(-requests.run_bytes // profile.request_bytes)
        return self.blocking.requests(self.axes)

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
