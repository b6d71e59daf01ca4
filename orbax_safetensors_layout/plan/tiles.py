"""Layouts in memory of tiles: neighbouring shards of a leaf that are read as one box."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from orbax_safetensors_layout.geometry import Box, Tile, row_major_strides
from orbax_safetensors_layout.runtime import SLOT_ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class TileLayout:
    """One tile of a leaf in memory; shared by all leaves of a shape and sharding."""

    tile: Tile  # the tile; its members are box numbers of the leaf, of which it may have a part
    regions: tuple[Box, ...]  # the part of the leaf that each member is
    shared: bool  # other processes hold this tile too
    staged: bool  # its values are computed from this memory into that of the arrays
    itemsize: int  # bytes of an element (1 where elements are packed into bytes)
    member_shape: tuple[int, ...]
    member_bytes: int
    slot_bytes: int  # bytes from one member to the next
    memory_bytes: int  # bytes that all members take
    within: tuple[int, ...]  # byte strides inside a member
    across: tuple[int, ...]  # byte strides from member to member

    @classmethod
    def of(
        cls,
        tile: Tile,
        itemsize: int,
        *,
        shared: bool,
        staged: bool,
        regions: Iterable[Box] | None = None,
    ) -> TileLayout:
        """Return the layout of a tile of elements of `itemsize` bytes."""
        member_shape = tile.member_shape
        member_bytes = math.prod(member_shape) * itemsize
        slot_bytes = -(-member_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return cls(
            tile=tile,
            regions=tuple(tile.cells() if regions is None else regions),
            shared=shared,
            staged=staged,
            itemsize=itemsize,
            member_shape=member_shape,
            member_bytes=member_bytes,
            slot_bytes=slot_bytes,
            memory_bytes=slot_bytes * len(tile.members),
            within=tuple(n * itemsize for n in row_major_strides(member_shape)),
            across=tuple(n * slot_bytes for n in row_major_strides(tile.grid)),
        )
