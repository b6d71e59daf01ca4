"""The read plan: for each leaf the boxes one process needs, and the requests that fetch them.

Everything here is arithmetic on compressed runs, cached by shape: a plan costs
O(tensors x shards x dimensions) and never a Python object per row. See ARCHITECTURE.md, Reading.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.geometry.affine import AffineView, row_major_strides
from orbax_safetensors_layout.geometry.box import Box, Tile, tile
from orbax_safetensors_layout.geometry.packing import packed_box
from orbax_safetensors_layout.geometry.runs import StridedRuns
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan.cost import Cost

SLOT_ALIGNMENT = 64
"""Shards begin at multiples of this many bytes: what JAX's CPU backend asks of a buffer that it
adopts without a copy (seen with jax 0.10 and 0.12; `tests/test_adoption.py` checks it)."""

SMALL_REGION_BYTES = 4 << 20
"""Smaller regions share a request, and a buffer, with their neighbours in the file. Larger ones
have a buffer of their own, so that freeing one array frees its memory."""


class LocalBoxes(NamedTuple):
    """The distinct regions of one array that the devices of one process hold.

    Attributes:
        boxes: Each region once, however many local devices hold it.
        shared: For each box, whether devices of other processes hold it too.
    """

    boxes: tuple[Box, ...]
    shared: tuple[bool, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> LocalBoxes:
        """All of an array, for one reader."""
        return cls((Box.whole(shape),), (False,))


class LeafRead(NamedTuple):
    """One leaf of the wanted tree and the tensor it comes from.

    Attributes:
        name: The tensor's name in the file.
        entry: Where the tensor is.
        local: The boxes this process needs of it.
        dtype: The dtype that the leaf will have.
    """

    name: str
    entry: TensorEntry
    local: LocalBoxes
    dtype: np.dtype


class Staging(NamedTuple):
    """Byte strides of a tile that is copied into place from a staging buffer.

    Attributes:
        outer: Leading dimensions whose indices are requests of their own.
        source: Strides in a staging buffer that holds the requests one after the other.
        within: Strides inside a member in memory.
        across: Strides from member to member in memory.
    """

    outer: int
    source: tuple[int, ...]
    within: tuple[int, ...]
    across: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TileRead:
    """How one tile of a tensor is read; made once for all tensors of a shape and sharding.

    Offsets are bytes from the tensor's first byte.

    Attributes:
        tile: The tile; its members are box numbers of the leaf.
        itemsize: Bytes of an element (1 where elements are packed into bytes).
        strides: Byte strides of the tensor in the file.
        runs: The needed bytes.
        requests: The same with the gaps that are cheaper to read than to skip.
        direct: The file's bytes, in order, are the members' bytes, one member after the other.
        shared: Other processes read this tile too.
        member_shape: Shape of a member box.
        member_bytes: Bytes of a member box.
        slot_bytes: Bytes from one member to the next in memory.
        memory_bytes: Bytes that all members take in memory.
        staging: How a tile that is not direct is staged.
    """

    tile: Tile
    itemsize: int
    strides: tuple[int, ...]
    runs: StridedRuns
    requests: StridedRuns
    direct: bool
    shared: bool
    member_shape: tuple[int, ...]
    member_bytes: int
    slot_bytes: int
    memory_bytes: int
    staging: Staging

    @classmethod
    def plan(
        cls, shape: tuple[int, ...], itemsize: int, found: Tile, *, shared: bool, max_gap_bytes: int
    ) -> TileRead:
        """The read of one tile of a row-major tensor of `shape`."""
        runs = StridedRuns.of(AffineView.row_major(shape).restrict(found.box), itemsize)
        requests = runs.coalesce(max_gap_bytes)
        gapless = requests.total_bytes == runs.total_bytes
        strides = tuple(n * itemsize for n in row_major_strides(shape))
        member_bytes = math.prod(found.member_shape) * itemsize
        slot_bytes = -(-member_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return cls(
            tile=found,
            itemsize=itemsize,
            strides=strides,
            runs=runs,
            requests=requests,
            direct=gapless and _members_in_file_order(found),
            shared=shared,
            member_shape=found.member_shape,
            member_bytes=member_bytes,
            slot_bytes=slot_bytes,
            memory_bytes=slot_bytes * len(found.members),
            staging=_staging(found, itemsize, strides, requests.run_bytes, slot_bytes),
        )

    def staged_bytes(self, axis: int) -> int:
        """Bytes of a staging buffer for all indices of the dimensions from `axis` on."""
        extents, staging = self.tile.box.shape, self.staging
        if axis < staging.outer:
            return math.prod(extents[axis : staging.outer]) * self.requests.run_bytes
        inner = zip(extents[axis:], staging.source[axis:], strict=True)
        return sum((n - 1) * stride for n, stride in inner) + self.itemsize


def _staging(
    found: Tile, itemsize: int, strides: tuple[int, ...], request_bytes: int, slot_bytes: int
) -> Staging:
    extents = found.box.shape
    tail, outer = itemsize, len(extents)
    while outer and tail < request_bytes:  # dimensions of one index may count to either side
        outer -= 1
        tail += (extents[outer] - 1) * strides[outer]
    compact = tuple(n * request_bytes for n in row_major_strides(extents[:outer]))
    return Staging(
        outer=outer,
        source=compact + strides[outer:],
        within=tuple(n * itemsize for n in row_major_strides(found.member_shape)),
        across=tuple(n * slot_bytes for n in row_major_strides(found.grid)),
    )


def _members_in_file_order(found: Tile) -> bool:
    """Whether reading the tile row by row finishes one member before it begins the next."""
    split = [axis for axis, count in enumerate(found.grid) if count > 1]
    return not split or all(extent == 1 for extent in found.member_shape[: split[-1]])


class Region(NamedTuple):
    """One tile of one leaf at its place in a file.

    Attributes:
        leaf: Number of the leaf in the plan.
        read: The tile's geometry.
        base: Byte offset of the tensor in the file.
    """

    leaf: int
    read: TileRead
    base: int

    @property
    def start(self) -> int:
        """First byte read."""
        return self.base + self.read.requests.base

    @property
    def stop(self) -> int:
        """One past the last byte read."""
        return self.base + self.read.requests.stop


class Group(NamedTuple):
    """Regions of one file that are fetched together.

    Attributes:
        file: The file.
        regions: One region of any kind, or several small ones whose span is one request.
    """

    file: str
    regions: tuple[Region, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPlan:
    """What one process reads, and into which leaves.

    Attributes:
        leaves: The leaves, in the order of the wanted tree.
        regions: For each file that is read, by name, its regions by offset.
        profile: The storage class's cost model that the requests were made with.
        memory_budget_bytes: Bound on staging memory.
    """

    leaves: tuple[LeafRead, ...]
    regions: tuple[tuple[str, tuple[Region, ...]], ...]
    profile: StorageProfile
    memory_budget_bytes: int

    def groups(self) -> Iterator[Group]:
        """What is fetched together, by file and offset, lazily."""
        for file, regions in self.regions:
            yield from _group(file, regions, self.profile)

    def cost(self) -> Cost:
        """What the plan costs this process."""
        needed = read = requests = 0
        largest = 0
        touched: set[int] = set()
        for group in self.groups():
            count, read_bytes = self._requests_of(group)
            requests += count
            read += read_bytes
            largest = max(largest, min(read_bytes, self.profile.request_bytes))
            for region in group.regions:
                needed += region.read.runs.total_bytes
                touched.add(region.leaf)
        return Cost(
            tensors=len(touched),
            needed_bytes=needed,
            read_bytes=read,
            requests=requests,
            files=len(self.regions),
            peak_host_bytes=min(self.memory_budget_bytes, largest * self.profile.concurrency),
        )

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Every byte range that will be read as (file, start, stop), one a request, lazily."""
        for group in self.groups():
            if len(group.regions) > 1:
                yield group.file, group.regions[0].start, max(r.stop for r in group.regions)
                continue
            region = group.regions[0]
            for offset in region.read.requests.offsets().tolist():
                start = region.base + offset
                yield group.file, start, start + region.read.requests.run_bytes

    def _requests_of(self, group: Group) -> tuple[int, int]:
        if len(group.regions) > 1:
            return 1, max(r.stop for r in group.regions) - group.regions[0].start
        requests = group.regions[0].read.requests
        each = -(-requests.run_bytes // self.profile.request_bytes)
        return requests.count * each, requests.total_bytes

    def by_tensor(self) -> list[tuple[str, int, int]]:
        """(name, bytes needed, bytes read) of each leaf, each as if it were read alone."""
        needed, read = [0] * len(self.leaves), [0] * len(self.leaves)
        for _, regions in self.regions:
            for region in regions:
                needed[region.leaf] += region.read.runs.total_bytes
                read[region.leaf] += region.read.requests.total_bytes
        return [(leaf.name, n, r) for leaf, n, r in zip(self.leaves, needed, read, strict=True)]

    def __str__(self) -> str:
        rows = [("tensor", "shape", "dtype", "needed", "read")]
        rows += [
            (name, str(list(leaf.entry.shape)), leaf.entry.dtype.code, f"{n:,}", f"{r:,}")
            for leaf, (name, n, r) in zip(self.leaves, self.by_tensor(), strict=True)
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(
                text.ljust(width) if i < 3 else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, str(self.cost())])


def plan_reads(
    leaves: Sequence[LeafRead], *, profile: StorageProfile, memory_budget_bytes: int
) -> ReadPlan:
    """Plans the reads of one process.

    Args:
        leaves: What is wanted.
        profile: Cost model of the storage class.
        memory_budget_bytes: Bound on staging memory.
    """
    planner = _TilePlanner(profile.max_gap_bytes)
    by_file: dict[str, list[Region]] = {}
    for number, leaf in enumerate(leaves):
        if not leaf.local.boxes or not leaf.entry.nbytes:
            continue
        regions = by_file.setdefault(leaf.entry.file, [])
        base = leaf.entry.start
        regions.extend(Region(number, read, base) for read in planner.tile_reads(leaf))
    in_order = tuple(
        (file, tuple(sorted(found, key=lambda region: region.start)))
        for file, found in sorted(by_file.items())
    )
    return ReadPlan(tuple(leaves), in_order, profile, memory_budget_bytes)


class _TilePlanner:
    """Geometry of tiles, computed once for each distinct (shape, dtype width, boxes)."""

    def __init__(self, max_gap_bytes: int) -> None:
        self._max_gap_bytes = max_gap_bytes
        # The value holds `local`, so that its id stays its own.
        self._cache: dict[tuple[object, ...], tuple[LocalBoxes, list[TileRead]]] = {}

    def tile_reads(self, leaf: LeafRead) -> list[TileRead]:
        key = (leaf.entry.shape, leaf.entry.dtype.code, id(leaf.local))
        cached = self._cache.get(key)
        if cached is None:
            dtype = leaf.entry.dtype
            if dtype.packed:
                reads = list(self._packed(leaf.entry.shape, dtype.bits, leaf.local))
            else:
                reads = list(self._plain(leaf.entry.shape, dtype.bits // 8, leaf.local))
            cached = self._cache[key] = (leaf.local, reads)
        return cached[1]

    def _plain(
        self, shape: tuple[int, ...], itemsize: int, local: LocalBoxes
    ) -> Iterator[TileRead]:
        # Shared and private boxes are tiled apart: they are read differently.
        for shared in (False, True):
            numbers = [i for i, s in enumerate(local.shared) if s is shared]
            for found in tile([local.boxes[i] for i in numbers]):
                found = found._replace(members=tuple(numbers[i] for i in found.members))
                yield TileRead.plan(
                    shape, itemsize, found, shared=shared, max_gap_bytes=self._max_gap_bytes
                )

    def _packed(self, shape: tuple[int, ...], bits: int, local: LocalBoxes) -> Iterator[TileRead]:
        for number, (box, shared) in enumerate(zip(local.boxes, local.shared, strict=True)):
            packed = packed_box(shape, bits, box)
            alone = Tile(packed.box, (1,) * len(packed.shape), (number,))
            yield TileRead.plan(
                packed.shape, 1, alone, shared=shared, max_gap_bytes=self._max_gap_bytes
            )


def _group(file: str, regions: Sequence[Region], profile: StorageProfile) -> Iterator[Group]:
    """Joins neighbouring small regions whose gap is cheaper to read than to skip."""
    pending: list[Region] = []
    first = end = limit = 0
    for region in regions:
        requests = region.read.requests
        start = region.base + requests.base
        stop = start + requests.run_bytes
        if requests.levels or stop - start >= SMALL_REGION_BYTES:
            yield Group(file, (region,))
            continue
        limit_now = profile.request_bytes if region.read.direct else profile.staging_bytes
        if (
            pending
            and 0 <= start - end <= profile.max_gap_bytes
            and stop - first <= min(limit, limit_now)
            and region.read.shared == pending[0].read.shared
        ):
            pending.append(region)
            limit = min(limit, limit_now)
        else:
            if pending:
                yield Group(file, tuple(pending))
            pending, first, limit = [region], start, limit_now
        end = stop
    if pending:
        yield Group(file, tuple(pending))
