"""The read plan: for each leaf the boxes one process needs, and the requests that fetch them.

Everything here is arithmetic on compressed runs, cached by shape: a plan costs
O(tensors x shards x dimensions) and never a Python object per row. See ARCHITECTURE.md, Reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.geometry.box import Box, Tile, tile
from orbax_safetensors_layout.geometry.packing import packed_box
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan.cost import Cost
from orbax_safetensors_layout.plan.tiles import TileRead

SMALL_REGION_BYTES = 4 << 20
"""Smaller regions share a request, and a buffer, with their neighbours in the file. Larger ones
have a buffer of their own, so that freeing one array frees its memory."""


TINY_REGION_BYTES = 64 << 10
"""Regions below this share memory with their like only, never with larger ones."""

MAX_GROUP_MEMBERS = 1000
"""Most buffers that one request fills; below IOV_MAX, 1024 on Linux, with the gaps between them."""

MAX_RANK = 64
"""Most dimensions of a numpy array."""


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
        memory_budget_bytes: Bound on what is held beyond the arrays.
        adopt: Whether the arrays keep the buffers they are made of, as on the CPU backend.
    """

    leaves: tuple[LeafRead, ...]
    regions: tuple[tuple[str, tuple[Region, ...]], ...]
    profile: StorageProfile
    memory_budget_bytes: int
    adopt: bool

    def groups(self) -> Iterator[Group]:
        """What is fetched together, by file and offset, lazily."""
        for file, regions in self.regions:
            yield from _group(file, regions, self.profile)

    def held_bytes(self, region: Region) -> int:
        """Host bytes that a region holds until its arrays are on their devices."""
        if self.adopt:
            return 0
        leaf = self.leaves[region.leaf]
        elements = sum(leaf.local.boxes[number].size for number in region.read.tile.members)
        unpacked = elements if leaf.entry.dtype.packed else 0
        cast = 0 if leaf.dtype == leaf.entry.dtype.numpy else elements * leaf.dtype.itemsize
        return region.read.memory_bytes + unpacked + cast

    def cost(self) -> Cost:
        """What the plan costs this process."""
        needed = read = requests = held = most_held = 0
        staged = False
        touched: set[int] = set()
        for group in self.groups():
            regions = group.regions
            if len(regions) > 1:
                requests += 1
                read += max(region.stop for region in regions) - regions[0].start
            else:
                requests += regions[0].read.storage_requests(self.profile)
                read += regions[0].read.requests.total_bytes
            staged = staged or not all(region.read.direct for region in regions)
            needed += sum(region.read.runs.total_bytes for region in regions)
            touched.update(region.leaf for region in regions)
            group_held = sum(map(self.held_bytes, regions))
            held, most_held = held + group_held, max(most_held, group_held)
        staging = self.profile.concurrency * self.profile.staging_bytes if staged else 0
        return Cost(
            tensors=len(touched),
            needed_bytes=needed,
            read_bytes=read,
            requests=requests,
            files=len(self.regions),
            peak_host_bytes=staging + min(held, max(self.memory_budget_bytes, most_held)),
        )

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """The byte ranges that will be read as (file, start, stop), lazily.

        Long ones are read in several requests.
        """
        for group in self.groups():
            if len(group.regions) > 1:
                yield group.file, group.regions[0].start, max(r.stop for r in group.regions)
                continue
            region = group.regions[0]
            for offset in region.read.requests.offsets().tolist():
                start = region.base + offset
                yield group.file, start, start + region.read.requests.run_bytes

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
    leaves: Sequence[LeafRead], *, profile: StorageProfile, memory_budget_bytes: int, adopt: bool
) -> ReadPlan:
    """Plans the reads of one process.

    Args:
        leaves: What is wanted.
        profile: Cost model of the storage class.
        memory_budget_bytes: Bound on what is held beyond the arrays. Where arrays do not adopt
            their buffers, shards are read together only as far as they fit it together.
        adopt: Whether the arrays keep the buffers they are made of.
    """
    planner = _TilePlanner(profile, None if adopt else memory_budget_bytes)
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
    return ReadPlan(tuple(leaves), in_order, profile, memory_budget_bytes, adopt)


class _TilePlanner:
    """Geometry of tiles, computed once for each distinct (shape, dtype width, boxes)."""

    def __init__(self, profile: StorageProfile, most_bytes: int | None) -> None:
        self._profile = profile
        self._most_bytes = most_bytes
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
            boxes = [local.boxes[i] for i in numbers]
            for found in self._bounded(tile(boxes), boxes, itemsize):
                found = found._replace(members=tuple(numbers[i] for i in found.members))
                yield TileRead.plan(shape, itemsize, found, shared=shared, profile=self._profile)

    def _bounded(
        self, tiles: Sequence[Tile], boxes: Sequence[Box], itemsize: int
    ) -> Iterator[Tile]:
        """The tiles, those that are too large for the budget taken apart."""
        for found in tiles:
            if self._most_bytes is None or found.box.size * itemsize <= self._most_bytes:
                yield found
                continue
            for number in found.members:
                yield Tile(boxes[number], (1,) * len(found.grid), (number,))

    def _packed(self, shape: tuple[int, ...], bits: int, local: LocalBoxes) -> Iterator[TileRead]:
        for number, (box, shared) in enumerate(zip(local.boxes, local.shared, strict=True)):
            packed = packed_box(shape, bits, box)
            alone = Tile(packed.box, (1,) * len(packed.shape), (number,))
            yield TileRead.plan(packed.shape, 1, alone, shared=shared, profile=self._profile)


def _group(file: str, regions: Sequence[Region], profile: StorageProfile) -> Iterator[Group]:
    """Joins neighbouring small regions whose gap is cheaper to read than to skip."""
    pending: list[Region] = []
    first = end = limit = members = 0
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
            and members + 2 * len(region.read.tile.members) <= MAX_GROUP_MEMBERS
            and region.read.shared == pending[0].read.shared
        ):
            pending.append(region)
            limit = min(limit, limit_now)
            members += 2 * len(region.read.tile.members)
        else:
            if pending:
                yield Group(file, tuple(pending))
            pending, first, limit = [region], start, limit_now
            members = 2 * len(region.read.tile.members)
        end = stop
    if pending:
        yield Group(file, tuple(pending))
