"""Buffers: the memory of tiles, and where in it a region's bytes go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import DType
from orbax_safetensors_layout.plan import SMALL_REGION_BYTES, ByteRegion, RequestGroup, TileKey
from orbax_safetensors_layout.runtime import Bytes
from orbax_safetensors_layout.storage import Buffer

Allocate = Callable[..., Bytes]  # of bytes, and of the `file_offset` that they begin at

_TINY_TILE_BYTES = 64 << 10  # tiles below this share memory with their like, not with larger ones


class TileBuffer(NamedTuple):
    """Memory of a tile."""

    memory: Bytes
    begin: int  # where in it the tile begins, with a member every `slot_bytes`


class BufferSlice(NamedTuple):
    """A region, and the memory of the tile that it belongs to."""

    region: ByteRegion
    buffer: TileBuffer

    def members(self, dtype: DType) -> list[np.ndarray]:
        """Each member as an array over the memory; packed ones as their bytes."""
        layout, begin, data = self.region.layout, self.buffer.begin, self.buffer.memory.data
        stored = np.dtype(np.uint8) if dtype.packed else dtype.numpy
        slots = range(begin, begin + layout.memory_bytes, layout.slot_bytes)
        return [np.ndarray(layout.member_shape, stored, data, slot) for slot in slots]

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return half-open ranges of memory for bytes `start` to `stop` of a direct region."""
        at, spans = self.buffer.begin + self.region.at, self.region.read.spans
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
        view = self.buffer.memory.data
        return [view[low:high] for low, high in self.spans(start, stop)]

    def copy_from(self, twin: BufferSlice, start: int, stop: int) -> None:
        """Copies bytes `start` to `stop` of a direct region from one of the same bytes."""
        for low, high in zip(twin.spans(start, stop), self.spans(start, stop), strict=True):
            self.buffer.memory[slice(*high)] = twin.buffer.memory[slice(*low)]


def buffer_slices(
    group: RequestGroup,
    opened: Mapping[TileKey, TileBuffer],
    stage: Allocate,
    allocate: Allocate,
) -> list[BufferSlice]:
    """Allocates the tiles of a group's regions, but for those that are `opened`.

    Small tiles share memory with their like: an array that is kept then does not keep much larger
    ones from being freed. `stage` allocates tiles whose values are computed on.
    """
    regions = group.regions
    buffers: dict[TileKey | int, TileBuffer] = {
        r.tile: opened[r.tile] for r in regions if r.parts > 1 and r.tile in opened
    }
    # A tile of one region has a key of its own.
    keys = [r.tile if r.parts > 1 else number for number, r in enumerate(regions)]
    fresh = {key: r for key, r in zip(keys, regions, strict=True) if key not in buffers}
    tiles = _allocated([*fresh.values()], stage, allocate)
    buffers.update(zip(fresh, tiles, strict=True))
    return [BufferSlice(region, buffers[key]) for key, region in zip(keys, regions, strict=True)]


def _allocated(
    regions: Sequence[ByteRegion], stage: Allocate, allocate: Allocate
) -> list[TileBuffer]:
    """Memory for tiles: one allocation for the tiny ones, one for the small, one for each other."""
    totals: dict[tuple[bool, int], int] = {}
    places = []
    for number, region in enumerate(regions):
        nbytes = region.layout.memory_bytes
        size = -1 if nbytes < _TINY_TILE_BYTES else -2 if nbytes < SMALL_REGION_BYTES else number
        kind = region.layout.is_scratch, size
        begin = totals.get(kind, 0)
        places.append((kind, begin))
        totals[kind] = begin + nbytes
    # One region goes to `at`; where it is aligned, it can be read past the page cache.
    offset = max(0, regions[0].start - regions[0].at) if len(regions) == 1 else 0
    arenas = {
        kind: (stage if kind[0] else allocate)(total, file_offset=offset)
        for kind, total in totals.items()
    }
    return [TileBuffer(arenas[kind], begin) for kind, begin in places]
