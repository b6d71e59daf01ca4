"""The boxes of one array, and the processes whose devices hold them."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from orbax_safetensors_layout.geometry import Box


@dataclasses.dataclass(frozen=True)
class AddressableShards:
    """The distinct regions of one array that the devices of one process hold.

    Attributes:
        boxes: Each region once, however many local devices hold it.
        shared: For each box, whether devices of other processes hold it too.
    """

    boxes: tuple[Box, ...]
    shared: tuple[bool, ...]

    @functools.cached_property
    def elements(self) -> int:
        """Number of elements of all boxes."""
        return sum(box.size for box in self.boxes)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> AddressableShards:
        """Return the shards of a process that alone holds all of an array."""
        return cls((Box.whole(shape),), (False,))


class GlobalShards(NamedTuple):
    """The distinct boxes of an array and the processes whose devices hold them.

    Attributes:
        boxes: Each box once; together they are the array.
        holders: For each box the processes that hold it, ascending.
    """

    boxes: tuple[Box, ...]
    holders: tuple[tuple[int, ...], ...]

    def held_by(self, process: int) -> bool:
        """Return whether a process holds the whole array."""
        return all(process in holders for holders in self.holders)
