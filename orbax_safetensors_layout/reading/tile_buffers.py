"""Destinations: the memory of tiles, and where in it a region's bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import DType
from orbax_safetensors_layout.plan import (
    SMALL_REGION_BYTES,
    ByteRegion,
    RequestGroup,
    TileKey,
    TileLayout,
)
from orbax_safetensors_layout.runtime import Bytes, Staging, allocate
from orbax_safetensors_layout.storage import Buffer

TINY_TILE_BYTES = 64 << 10
"""Tiles below this share memory with their like only, never with larger ones."""

MAX_RANK = 64
"""Most dimensions of a numpy array."""


class TileBuffer(NamedTuple):
    """Memory of a tile."""

    memory: Bytes
    begin: int  # where in it the tile begins, with a member every `slot_bytes`


class BufferSlice(NamedTuple):
    """A region, and the memory of the tile that it belongs to."""

    region: ByteRegion
    room: TileBuffer

    def members(self, dtype: DType) -> list[np.ndarray]:
        """Each member as an array over the memory; packed ones as their bytes."""
        layout = self.region.layout
        memory, begin = self.room
        stored = np.dtype(np.uint8) if dtype.packed else dtype.numpy
        count, rank = len(layout.tile.members), len(layout.member_shape)
        if count > 1 and 0 < rank < MAX_RANK:
            strides = (layout.slot_bytes, *layout.within)
            shape = (count, *layout.member_shape)
            return [*np.ndarray(shape, stored, memory.data, begin, strides)]
        slots = range(begin, begin + count * layout.slot_bytes, layout.slot_bytes)
        return [np.ndarray(layout.member_shape, stored, memory.data, slot) for slot in slots]

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where bytes `start` to `stop` of a direct region are in the memory, half-open."""
        at, spans = self.room.begin + self.region.at, self.region.read.spans
        assert spans is not None
        if not spans.levels:
            return [(at + start, at + stop)]
        length = spans.run_bytes
        first, last = start // length, -(-stop // length)
        begins = [at + offset for offset in spans.offsets(first, last).tolist()]
        ends = [begin + length for begin in begins]
        begins[0] += start - first * length
        ends[-1] += stop - last * length
        return [*zip(begins, ends, strict=True)]

    def buffers(self, start: int, stop: int) -> list[Buffer]:
        """Bytes `start` to `stop` of a direct region in memory."""
        view = self.room.memory.data
        return [view[low:high] for low, high in self.spans(start, stop)]

    def copy_from(self, twin: BufferSlice, start: int, stop: int) -> None:
        """Copies bytes `start` to `stop` of a direct region from one of the same bytes."""
        for low, high in zip(twin.spans(start, stop), self.spans(start, stop), strict=True):
            self.room.memory[slice(*high)] = twin.room.memory[slice(*low)]


def buffer_slices(
    group: RequestGroup, opened: Mapping[TileKey, TileBuffer], staging: Staging
) -> list[BufferSlice]:
    """Makes room for the tiles of a group's regions, but for those that are `opened`.

    Small tiles share memory with their like: an array that is kept then does not keep much larger
    ones from being freed. Tiles whose values are computed on are in the `staging` memory.
    """
    regions = group.regions
    if len(regions) == 1:
        (region,) = regions
        room = opened.get(region.tile) if region.parts > 1 else None
        if room is None:
            # The region goes to `at`; where it is aligned, it can be read past the page cache.
            offset = max(0, region.start - region.at)
            make = staging.take if region.layout.staged else allocate
            room = TileBuffer(make(region.layout.memory_bytes, file_offset=offset), 0)
        return [BufferSlice(region, room)]
    # A tile of one region has a key of its own.
    keys = [r.tile if r.parts > 1 else number for number, r in enumerate(regions)]
    tiles = zip(keys, regions, strict=True)
    fresh = {key: region.layout for key, region in tiles if key not in opened}
    new_rooms = zip(fresh, _rooms([*fresh.values()], staging), strict=True)
    rooms: dict[TileKey | int, TileBuffer] = dict(new_rooms)
    rooms.update(opened.items())
    return [BufferSlice(region, rooms[key]) for key, region in zip(keys, regions, strict=True)]


def _rooms(layouts: Sequence[TileLayout], staging: Staging) -> list[TileBuffer]:
    """Memory for tiles: one allocation for the tiny ones, one for the small, one for each other.

    That of values which are computed on is apart from what arrays keep.
    """
    totals: dict[tuple[bool, int], int] = {}
    places = []
    for number, layout in enumerate(layouts):
        nbytes = layout.memory_bytes
        size = -1 if nbytes < TINY_TILE_BYTES else -2 if nbytes < SMALL_REGION_BYTES else number
        kind = layout.staged, size
        begin = totals.get(kind, 0)
        places.append((kind, begin))
        totals[kind] = begin + nbytes
    arenas = {
        kind: staging.take(total) if kind[0] else allocate(total) for kind, total in totals.items()
    }
    return [TileBuffer(arenas[kind], begin) for kind, begin in places]
