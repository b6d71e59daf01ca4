"""Holders of the boxes of an array: its shards, and the devices of their replicas."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.geometry import Box


@dataclasses.dataclass(frozen=True)
class AddressableShards:
    """The distinct regions of one array that the devices of one process hold."""

    boxes: tuple[Box, ...]  # each region once, however many local devices hold it
    shared: tuple[bool, ...]  # for each box, whether devices of other processes hold it too

    @functools.cached_property
    def elements(self) -> int:
        return sum(box.size for box in self.boxes)

    @staticmethod
    @functools.lru_cache(1024)
    def private(boxes: tuple[Box, ...]) -> AddressableShards:
        """Return the shards of a process that alone holds some boxes.

        It is the same object for equal boxes, so that they are planned once.
        """
        return AddressableShards(boxes, (False,) * len(boxes))

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> AddressableShards:
        """Return the shards of a process that alone holds all of an array."""
        return cls.private((Box.whole(shape),))


class GlobalShards(NamedTuple):
    """The distinct boxes of an array and the processes whose devices hold them."""

    boxes: tuple[Box, ...]  # each box once; together they are the array
    holders: tuple[tuple[int, ...], ...]  # for each box the processes that hold it, ascending

    def held_by(self, process: int) -> bool:
        return all(process in holders for holders in self.holders)


class ReplicaGrid(NamedTuple):
    """The devices that hold the boxes of an array; equal for arrays with the same placement."""

    # [boxes][replicas] the devices; replicas in the order of their processes.
    devices: tuple[tuple[Any, ...], ...]
    processes: tuple[tuple[int, ...], ...]  # [boxes][replicas] the process of each
    # Of boxes that are merged from several of the array: how many along each axis that divides
    # them. The columns are the replicas of all of those in turn.
    cuts: tuple[int, ...] = ()

    @property
    def columns(self) -> int:
        """Number of devices that hold each box, or a part of it."""
        return len(self.devices[0])

    @property
    def replicas(self) -> int:
        """Number of devices that hold the same."""
        return self.columns // math.prod(self.cuts)

    @property
    def is_shared(self) -> bool:
        """Whether several processes hold the same box."""
        return any(len(set(row)) > 1 for row in self.processes)

    @property
    def parts_processes(self) -> bool:
        """Whether the boxes merged into one have replicas on different processes."""
        count = math.prod(self.cuts)
        return any(len({row[cut::count] for cut in range(count)}) > 1 for row in self.processes)

    @property
    def own_share(self) -> float:
        """The share of the first merged box that a process holds, the most of any."""
        count = math.prod(self.cuts)
        held = {(process, n % count) for n, process in enumerate(self.processes[0])}
        return max(collections.Counter(process for process, _ in held).values()) / count

    @property
    def most_boxes(self) -> int:
        """Number of boxes of the process that holds most of them."""
        return max(len({row for row, _ in slots}) for slots in _slots(self).values())

    def slots(self, process: int) -> Sequence[tuple[int, int]]:
        """Return the row and column of each device of a process."""
        return _slots(self).get(process, ())

    @property
    def most_slots(self) -> int:
        """Number of devices of the process that has most of them."""
        return max(map(len, _slots(self).values()))


_MOST_GRIDS = 256
_slots_of: dict[int, tuple[ReplicaGrid, dict[int, list[tuple[int, int]]]]] = {}


def _slots(grid: ReplicaGrid) -> dict[int, list[tuple[int, int]]]:
    """Return row and column of the devices of each process; kept by object, as hashing is slow."""
    known = _slots_of.get(id(grid))
    if known is not None and known[0] is grid:
        return known[1]
    slots: dict[int, list[tuple[int, int]]] = {}
    for row, processes in enumerate(grid.processes):
        for column, process in enumerate(processes):
            slots.setdefault(process, []).append((row, column))
    if len(_slots_of) >= _MOST_GRIDS:
        _slots_of.clear()
    _slots_of[id(grid)] = grid, slots
    return slots


class Replicas(NamedTuple):
    """The distinct boxes of an array, ascending, with a row of devices for each."""

    boxes: tuple[Box, ...]
    grid: ReplicaGrid
