"""The boxes of one array, and the processes whose devices hold them."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from orbax_safetensors_layout.geometry import Box


@dataclasses.dataclass(frozen=True)
class AddressableShards:
    """The distinct regions of one array that the devices of one process hold."""

    boxes: tuple[Box, ...]  # each region once, however many local devices hold it
    shared: tuple[bool, ...]  # for each box, whether devices of other processes hold it too

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of all boxes."""
        return sum(box.size for box in self.boxes)

    @classmethod
    def private(cls, boxes: tuple[Box, ...]) -> AddressableShards:
        """Return the shards of a process that alone holds some boxes."""
        return cls(boxes, (False,) * len(boxes))

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> AddressableShards:
        """Return the shards of a process that alone holds all of an array."""
        return cls.private((Box.whole(shape),))


class GlobalShards(NamedTuple):
    """The distinct boxes of an array and the processes whose devices hold them."""

    boxes: tuple[Box, ...]  # each box once; together they are the array
    holders: tuple[tuple[int, ...], ...]  # for each box the processes that hold it, ascending

    def held_by(self, process: int) -> bool:
        """Return whether a process holds the whole array."""
        return all(process in holders for holders in self.holders)
