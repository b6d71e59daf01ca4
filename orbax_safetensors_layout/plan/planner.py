"""Plans the regions of leaves; leaves with equal shards share their geometry."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.geometry import AffineView, Box, Gather, Tile, packed_box, tile
from orbax_safetensors_layout.options import KIB, StorageProfile
from orbax_safetensors_layout.sharding import AddressableShards

from .axes import TileLayout
from .leaf_reads import LeafRead, TensorPiece
from .regions import ByteRegion, Geometry, RegionPlan

BUNDLES_IN_BUDGET = 4  # while one is on its way to the devices, others are read
_SLABS_IN_BUDGET = 8  # so are they

_RegionPlace = tuple[int, int, RegionPlan]
"""The first byte of a region in the file, its place in the memory of its tile, and its read."""


class RegionPlanner:
    """Plans the regions of each leaf in O(pieces x tiles x dimensions)."""

    def __init__(self, profile: StorageProfile, memory_budget_bytes: int, *, adopt: bool) -> None:
        self._profile = profile
        # The largest tile that arrays do not adopt; a larger one is taken apart into members.
        self._most_bytes = None if adopt else memory_budget_bytes
        least = max(memory_budget_bytes // _SLABS_IN_BUDGET, 64 * KIB)
        self._slab_bytes = min(profile.request_bytes, least)
        # A slab of a gather is all over the file, and costs a read of most of it.
        self._gather_bytes = max(self._slab_bytes, memory_budget_bytes // BUNDLES_IN_BUDGET)
        self._reads: dict[tuple[object, ...], RegionPlan] = {}
        # The values hold the `AddressableShards`, so that an id stays its own.
        self._layouts: dict[tuple[object, ...], tuple[AddressableShards, list[TileLayout]]] = {}
        self._known: dict[tuple[object, ...], tuple[AddressableShards, list[ByteRegion]]] = {}

    def regions(self, number: int, leaf: LeafRead) -> list[ByteRegion]:
        """Return the regions of leaf `number` of a plan, tile by tile, after `LeafRead.check`."""
        pattern: object = leaf.pattern
        if len(leaf.sources) == 1 and leaf.sources[0].gather is None:
            ((entry, box, view, _),) = leaf.sources
            pattern = view, box, entry.shape, entry.dtype.code
        starts = [source.entry.start for source in leaf.sources]
        make = self._packed if leaf.stored.packed else self._several
        if pattern is None:
            leaf.check()
            return list(make(number, leaf))
        # What is converted is cut into slabs, what a block takes is not.
        use = leaf.is_converted, leaf.block is not None
        key = (leaf.shape, leaf.stored.code, use, id(leaf.local), pattern)
        known = self._known.get(key)
        if known is None:
            leaf.check()
            # From each tensor's first byte, the same for all leaves of the pattern.
            reads = [r._replace(start=r.start - starts[r.source]) for r in make(number, leaf)]
            known = self._known[key] = (leaf.local, reads)
        return [
            ByteRegion(number, source, starts[source] + start, at, read, layout, parts)
            for _, source, start, at, read, layout, parts in known[1]
        ]

    def _several(self, number: int, leaf: LeafRead) -> Iterator[ByteRegion]:
        starts = np.array([source.box.start for source in leaf.sources])
        stops = np.array([source.box.stop for source in leaf.sources])
        for layout in self._layouts_of(leaf):
            box = layout.tile.box
            overlaps = (starts < box.stop).all(-1) & (stops > box.start).all(-1)
            places = [
                (index, *place)
                for index in np.flatnonzero(overlaps).tolist()
                for place in self._overlaps(leaf.sources[index], layout)
            ]
            filled = [box.intersect(fill.box) for fill in leaf.fills]
            elements = sum(part.size for part in filled if part is not None)
            elements += sum(read.elements for *_, read in places)
            if elements != box.size:  # else memory that nothing was written to would be delivered
                raise MismatchError(
                    "the pieces of the leaf do not fill a part of it",
                    file=leaf.file,
                    tensor=leaf.name,
                    expected=f"{box.size} elements of {list(box.start)} to {list(box.stop)}",
                    found=elements,
                )
            for place in places:
                yield ByteRegion(number, *place, layout, len(places))

    def _overlaps(self, source: TensorPiece, layout: TileLayout) -> Iterator[_RegionPlace]:
        """Yields the regions of a piece and a tile; of a gather, one for near rows."""
        if source.gather is None:
            yield self._overlap(source, layout)
            return
        axis = source.gather.axis
        low, high = layout.tile.box.start[axis], layout.tile.box.stop[axis]
        gather = source.gather.within(low, high)
        if not len(gather.places):
            return
        slab = source._replace(box=source.box.along(axis, low, low + 1))
        cell, inside = np.divmod(gather.places, layout.member_shape[axis])
        places = cell * layout.across[axis] + inside * layout.within[axis]
        order = np.argsort(gather.offsets, kind="stable")
        places, offsets = places[order], gather.offsets[order] * layout.itemsize
        _, _, geometry = _overlap_geometry(slab, layout)
        stride = abs(source.view.strides[axis])
        inner = [(n, abs(s)) for n, s in zip(*geometry[:2], strict=True)]
        reach = 1 + sum((n - 1) * s for n, s in inner if s < stride)
        gaps = np.diff(offsets) - reach * layout.itemsize
        # Slabs whose elements stand between those of others are read together within their steps.
        everything = int(gather.offsets.max()) + reach
        step = min((s for n, s in inner if n > 1 and s > stride), default=everything)
        most = (step - reach) * layout.itemsize
        edges = [0]
        for edge in [*(np.flatnonzero(gaps > self._profile.max_gap_bytes) + 1), len(offsets)]:
            while (last := int(offsets[edges[-1]]) + most) < offsets[edge - 1]:
                edges.append(int(np.searchsorted(offsets, last, "right")))
            edges.append(int(edge))
        start, at, read = self._overlap(slab, layout)
        for first, last in itertools.pairwise(edges):
            shift = int(offsets[first])
            if last - first == 1:
                yield start + shift, at + int(places[first]), read
            else:
                near = Gather(axis, places[first:last], offsets[first:last] - shift)
                yield start + shift, at, RegionPlan.plan(layout, geometry, self._profile, near)

    def _overlap(self, source: TensorPiece, layout: TileLayout) -> _RegionPlace:
        start, at, geometry = _overlap_geometry(source, layout)
        key = (layout.member_shape, layout.tile.grid, layout.itemsize, geometry)
        if key not in self._reads:
            self._reads[key] = RegionPlan.plan(layout, geometry, self._profile)
        return start, at, self._reads[key]

    def _layouts_of(self, leaf: LeafRead) -> list[TileLayout]:
        itemsize = leaf.stored.bits // 8
        axes = _file_order(leaf) if leaf.is_converted else None
        gathers = any(source.gather is not None for source in leaf.sources)
        most_bytes = self._gather_bytes if gathers else self._slab_bytes
        key = (itemsize, leaf.uses_scratch, axes, most_bytes, id(leaf.local))
        if key not in self._layouts:
            most = max(1, most_bytes // itemsize)
            layouts = [
                TileLayout.of(slab, itemsize, shared=shared, is_scratch=leaf.uses_scratch)
                for tile, shared in self._tiled(leaf.local, itemsize)
                for slab in (tile.slabs(most, axes=axes) if axes else [tile])
            ]
            self._layouts[key] = (leaf.local, layouts)
        return self._layouts[key][1]

    def _tiled(self, local: AddressableShards, itemsize: int) -> Iterator[tuple[Tile, bool]]:
        # Shared and private boxes are tiled apart: they are read differently.
        for shared in (False, True):
            for joined in tile(local.boxes, [i for i, s in enumerate(local.shared) if s is shared]):
                if self._most_bytes is None or joined.box.size * itemsize <= self._most_bytes:
                    yield joined, shared
                    continue
                for member in joined.members:  # too large for the budget
                    yield Tile.alone(local.boxes[member], member), shared

    def _packed(self, number: int, leaf: LeafRead) -> Iterator[ByteRegion]:
        """Yields regions of elements that share bytes: each box by itself, as whole bytes."""
        entry, bits = leaf.sources[0].entry, leaf.stored.bits
        most = max(1, self._slab_bytes * 8 // bits)
        boxes = zip(leaf.local.boxes, leaf.local.shared, strict=True)
        for index, (whole, shared) in enumerate(boxes):
            for slab in Tile.alone(whole).slabs(most, leaf.stored.group):
                packed = packed_box(entry.shape, bits, slab.box)
                alone = Tile.alone(packed.box, index)
                layout = TileLayout.of(alone, 1, shared=shared, is_scratch=True, regions=[slab.box])
                view = AffineView.row_major(packed.shape)
                source = TensorPiece(entry, Box.whole(packed.shape), view)
                start, at, read = self._overlap(source, layout)
                yield ByteRegion(number, 0, start, at, read, layout, 1)


def _overlap_geometry(source: TensorPiece, layout: TileLayout) -> tuple[int, int, Geometry]:
    """Return where a piece and a tile overlap, as `_RegionPlace`, with the read's geometry."""
    entry, piece, view, _ = source
    box = layout.tile.box
    first, at = view.offset, 0
    extents, phases, strides = [], [], []
    for axis, stride in enumerate(view.strides):
        low = max(box.start[axis], piece.start[axis])
        extent = min(box.stop[axis], piece.stop[axis]) - low
        member = layout.member_shape[axis]
        lead = low - box.start[axis]
        phase = lead % member
        if stride < 0:  # the file has the last index first
            phase = -(lead + extent) % member
            low, lead = low + extent - 1, lead + extent - 1
        cell, inside = divmod(lead, member)
        at += cell * layout.across[axis] + inside * layout.within[axis]
        first += (low - piece.start[axis]) * stride
        extents.append(extent)
        strides.append(stride if extent > 1 else 1)
        phases.append(phase if phase + extent > member else 0)
    geometry = tuple(extents), tuple(strides), tuple(phases)
    return entry.start + first * layout.itemsize, at, geometry


def _file_order(leaf: LeafRead) -> tuple[int, ...]:
    """Return the axes, those first along which a step goes farthest in the files."""
    box, strides = leaf.sources[0].box, leaf.sources[0].view.strides
    farthest = [
        (n < whole, abs(s)) for n, whole, s in zip(box.shape, leaf.shape, strides, strict=True)
    ]
    order = sorted(range(len(strides)), key=farthest.__getitem__, reverse=True)
    gathers = {source.gather.axis for source in leaf.sources if source.gather is not None}
    return tuple(sorted(order, key=gathers.__contains__))  # any part of these is all over the file
