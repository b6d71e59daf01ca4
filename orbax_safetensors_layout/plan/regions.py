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
    """Slabs of a region that are in no regular order.

    Attributes:
        number: Number of the axis that they are indices of.
        indices: Index of each, in order; several may have the same.
        places: Where in memory each goes, in bytes.
    """

    number: int
    indices: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class RegionPlan:
    """How a region is read, wherever in the file and in memory it is.

    Attributes:
        itemsize: Bytes of an element.
        axes: Its dimensions, outermost in the file first.
        repeats: Dimensions along which each element is put in several places.
        runs: The needed bytes.
        requests: The same with the gaps that are cheaper to read than to skip.
        spans: Where those bytes go in memory, in the order of the file, if they are read straight
            into it; None where they are staged.
        blocking: How a region that is staged is cut.
        gather: Its slabs, if they are in no regular order; the axis that they are of is one of
            `axes`, from the first to the last of them in the file.
    """

    itemsize: int
    axes: tuple[Axis, ...]
    repeats: tuple[Axis, ...]
    runs: StridedRuns
    requests: StridedRuns
    spans: StridedRuns | None
    blocking: Blocking
    gather: GatherAxis | None = None

    @classmethod
    def plan(
        cls,
        layout: TileLayout,
        extents: Sequence[int],
        strides: Sequence[int],
        phases: Sequence[int],
        profile: StorageProfile,
    ) -> RegionPlan:
        """Return the read of a region.

        Args:
            layout: The tile in memory.
            extents: The region's shape.
            strides: Its element strides in the tensor.
            phases: As `axes_of` takes them.
            profile: The cost model.
        """
        itemsize = layout.itemsize
        forward = AffineView(0, tuple(extents), tuple(map(abs, strides)))
        runs = StridedRuns.of(forward, itemsize)
        requests = runs.coalesce(profile.max_gap_bytes)
        in_bytes = [stride * itemsize for stride in strides]
        axes, repeats = axes_of(layout, extents, in_bytes, phases)
        spans = None
        if not repeats and requests.total_bytes == runs.total_bytes:
            spans = memory_runs(axes, itemsize)
            members = len(layout.tile.members)
            if spans and spans.run_bytes < _DIRECT_SPAN_BYTES and spans.count > members:
                spans = None
        blocking = Blocking.plan(axes, itemsize, requests.run_bytes, profile)
        return cls(itemsize, axes, repeats, runs, requests, spans, blocking)

    @classmethod
    def gathered(
        cls,
        layout: TileLayout,
        extents: Sequence[int],
        strides: Sequence[int],
        phases: Sequence[int],
        profile: StorageProfile,
        slabs: Gather,
    ) -> RegionPlan:
        """The read of slabs in no regular order, from the first to the last in the file.

        Args:
            layout: The tile in memory.
            extents: The shape of a slab.
            strides: Its element strides in the tensor.
            phases: As `axes_of` takes them.
            profile: The cost model.
            slabs: Their places in bytes of memory, and their offsets in bytes of the file: in
                order, from 0.
        """
        itemsize, (axis, places, offsets) = (
            layout.itemsize,
            (slabs.axis, slabs.places, slabs.offsets),
        )
        slab = StridedRuns.of(AffineView(0, tuple(extents), tuple(map(abs, strides))), itemsize)
        step = int(np.gcd.reduce(offsets)) or itemsize
        indices = offsets // step
        count = int(indices[-1]) + 1
        hull = [abs(stride) for stride in strides]
        hull[axis] = step // itemsize
        shape = (*extents[:axis], count, *extents[axis + 1 :])
        requests = StridedRuns.of(AffineView(0, shape, tuple(hull)), itemsize)
        requests = requests.coalesce(profile.max_gap_bytes)
        in_bytes = [stride * itemsize for stride in strides]
        axes, repeats = axes_of(layout, extents, in_bytes, phases)
        number = sum(axis.source > step for axis in axes)
        along = Axis(count, step, count, 0, layout.within[axis], 0)
        axes = (*axes[:number], along, *axes[number:])
        distinct = len(np.unique(indices))
        return cls(
            itemsize,
            axes,
            repeats,
            StridedRuns(0, slab.total_bytes, ((distinct, step),)),
            requests,
            None,
            Blocking.plan(axes, itemsize, requests.run_bytes, profile),
            GatherAxis(number, indices, places),
        )

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
        """Return the bytes of those reads."""
        if self.direct:
            return self.requests.total_bytes
        return self.blocking.read_bytes(self.axes, self.itemsize)


class ByteRegion(NamedTuple):
    """A region at its place.

    Attributes:
        leaf: Number of the leaf in the plan.
        source: Number of the piece of the leaf.
        start: First byte read, in the file.
        at: Where in the tile's memory the first byte goes.
        read: The geometry.
        layout: The tile.
        parts: How many regions fill the tile.
    """

    leaf: int
    source: int
    start: int
    at: int
    read: RegionPlan
    layout: TileLayout
    parts: int

    @property
    def stop(self) -> int:
        """One past the last byte read."""
        return self.start + self.read.requests.stop

    @property
    def tile(self) -> TileKey:
        """The key of its tile in the plan."""
        return self.leaf, self.layout.regions[0]
