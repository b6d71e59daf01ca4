"""Destinations: the memory of tiles, and where in it a region's bytes go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format.dtypes import DType
from orbax_safetensors_layout.plan.groups import Group
from orbax_safetensors_layout.plan.regions import Region
from orbax_safetensors_layout.storage.base import Buffer
from orbax_safetensors_layout.transfer.buffers import Bytes, allocate

TINY_TILE_BYTES = 64 << 10
"""Tiles below this share memory with their like only, never with larger ones."""

MAX_RANK = 64
"""Most dimensions of a numpy array."""


class Destination(NamedTuple):
    """A region, and the memory of the tile that it belongs to.

    Attributes:
        region: The region.
        memory: Room for all members of the tile, one every `slot_bytes`.
    """

    region: Region
    memory: Bytes

    def members(self, dtype: DType) -> list[np.ndarray]:
        """Each member as an array over the memory; packed ones as their bytes."""
        layout = self.region.layout
        stored = np.dtype(np.uint8) if dtype.packed else dtype.numpy
        count, rank = len(layout.tile.members), len(layout.member_shape)
        if count > 1 and 0 < rank < MAX_RANK:
            strides = (layout.slot_bytes, *layout.within)
            shape = (count, *layout.member_shape)
            return [*np.ndarray(shape, stored, self.memory.data, 0, strides)]
        return [
            np.ndarray(layout.member_shape, stored, self.memory.data, number * layout.slot_bytes)
            for number in range(count)
        ]

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where bytes `start` to `stop` of a direct region are in the memory, half-open."""
        at, spans = self.region.at, self.region.read.spans
        assert spans is not None
        if not spans.levels:
            return [(at + start, at + stop)]
        length = spans.run_bytes
        first, last = start // length, -(-stop // length)
        found = [
            (at + offset, at + offset + length) for offset in spans.offsets(first, last).tolist()
        ]
        found[0] = (found[0][0] + start - first * length, found[0][1])
        found[-1] = (found[-1][0], found[-1][1] + stop - last * length)
        return found

    def buffers(self, start: int, stop: int) -> list[Buffer]:
        """Bytes `start` to `stop` of a direct region in memory."""
        view = self.memory.data
        return [view[low:high] for low, high in self.spans(start, stop)]


def destinations_of(group: Group, opened: Mapping[tuple[int, int], Bytes]) -> list[Destination]:
    """Makes room for the tiles of a group's regions.

    Small tiles share memory with their like: an array that is kept then does not keep much larger
    ones from being freed.

    Args:
        group: The group.
        opened: The memory of tiles that have theirs already.
    """
    regions = group.regions
    if len(regions) == 1:
        (region,) = regions
        memory = opened.get(region.tile) if region.parts > 1 else None
        if memory is None:
            # The region goes to `at`; where it is aligned, it can be read past the page cache.
            memory = allocate(
                region.layout.memory_bytes, file_offset=max(0, region.start - region.at)
            )
        return [Destination(region, memory)]
    tiles = {region.tile: region for region in regions}
    memories = {key: opened[key] for key in tiles if key in opened}
    fresh = [region for key, region in tiles.items() if key not in memories]
    for alike in (
        [r for r in fresh if r.layout.memory_bytes < TINY_TILE_BYTES],
        [r for r in fresh if r.layout.memory_bytes >= TINY_TILE_BYTES],
    ):
        memories.update(_shared(alike))
    return [Destination(region, memories[region.tile]) for region in regions]


def _shared(regions: Sequence[Region]) -> dict[tuple[int, int], Bytes]:
    """One allocation for the tiles of some regions."""
    arena = allocate(sum(region.layout.memory_bytes for region in regions))
    memories, used = {}, 0
    for region in regions:
        memories[region.tile] = arena[used : used + region.layout.memory_bytes]
        used += region.layout.memory_bytes
    return memories
