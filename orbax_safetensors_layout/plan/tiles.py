"""Tiles: how neighbouring shards of a tensor, read as one box, lie in the file and in memory.

Pure geometry in bytes from the tensor's first byte, made once for all tensors of one shape and
sharding.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from orbax_safetensors_layout.geometry.affine import AffineView, row_major_strides
from orbax_safetensors_layout.geometry.box import Tile
from orbax_safetensors_layout.geometry.runs import StridedRuns
from orbax_safetensors_layout.options import StorageProfile

SLOT_ALIGNMENT = 64
"""Shards begin at multiples of this many bytes: what JAX's CPU backend asks of a buffer that it
adopts without a copy (seen with jax 0.10 and 0.12; `tests/test_adoption.py` checks it)."""


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


class Blocking(NamedTuple):
    """How a tile that is copied into place is cut into blocks of bounded size.

    Attributes:
        axis: The dimension that is cut; a block has one index of each before it.
        cells: Members along it in one block, at most.
        rows: Indices of a member along it in one block, at most: all of them if `cells` > 1.
        blocks: Number of blocks.
    """

    axis: int
    cells: int
    rows: int
    blocks: int


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
        blocking: How it is cut.
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
    blocking: Blocking

    @classmethod
    def plan(
        cls,
        shape: tuple[int, ...],
        itemsize: int,
        found: Tile,
        *,
        shared: bool,
        profile: StorageProfile,
    ) -> TileRead:
        """The read of one tile of a row-major tensor of `shape`."""
        runs = StridedRuns.of(AffineView.row_major(shape).restrict(found.box), itemsize)
        requests = runs.coalesce(profile.max_gap_bytes)
        gapless = requests.total_bytes == runs.total_bytes
        strides = tuple(n * itemsize for n in row_major_strides(shape))
        member_bytes = math.prod(found.member_shape) * itemsize
        slot_bytes = -(-member_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        staging = _staging(found, itemsize, strides, requests.run_bytes, slot_bytes)
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
            staging=staging,
            blocking=_blocking(found, staging, requests.run_bytes, itemsize, profile.staging_bytes),
        )

    def staged_bytes(self, axis: int) -> int:
        """Bytes of a staging buffer for all indices of the dimensions from `axis` on."""
        extents = self.tile.box.shape
        return _staged_bytes(extents, self.staging, self.requests.run_bytes, self.itemsize, axis)

    def storage_requests(self, profile: StorageProfile) -> int:
        """Ranged reads that fetch the tile by itself."""
        requests = self.requests
        if self.direct:
            return requests.count * -(-requests.run_bytes // profile.request_bytes)
        return self.blocking.blocks if self.blocking.axis >= self.staging.outer else requests.count


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


def _staged_bytes(
    extents: tuple[int, ...], staging: Staging, request_bytes: int, itemsize: int, axis: int
) -> int:
    if axis < staging.outer:
        return math.prod(extents[axis : staging.outer]) * request_bytes
    inner = zip(extents[axis:], staging.source[axis:], strict=True)
    return sum((n - 1) * stride for n, stride in inner) + itemsize


def _blocking(
    found: Tile, staging: Staging, request_bytes: int, itemsize: int, most_bytes: int
) -> Blocking:
    extents, rank = found.box.shape, len(found.grid)
    if not rank:
        return Blocking(0, 1, 1, 1)

    def staged(axis: int) -> int:
        return _staged_bytes(extents, staging, request_bytes, itemsize, axis)

    axis = 0
    while axis < rank - 1 and staged(axis + 1) > most_bytes:
        axis += 1
    stride, tail = staging.source[axis], staged(axis + 1)
    grid, member = found.grid[axis], found.member_shape[axis]
    outer = math.prod(extents[:axis])
    spare = most_bytes - tail - (member - 1) * stride
    if spare >= 0:
        blocks = -(-grid // (1 + spare // (member * stride)))
        cells = -(-grid // blocks)
        return Blocking(axis, cells, member, outer * -(-grid // cells))
    blocks = -(-member // (1 + max(0, most_bytes - tail) // stride))
    rows = -(-member // blocks)
    return Blocking(axis, 1, rows, outer * grid * -(-member // rows))


def _members_in_file_order(found: Tile) -> bool:
    """Whether reading the tile row by row finishes one member before it begins the next."""
    split = [axis for axis, count in enumerate(found.grid) if count > 1]
    return not split or all(extent == 1 for extent in found.member_shape[: split[-1]])
