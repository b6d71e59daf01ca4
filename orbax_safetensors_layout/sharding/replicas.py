"""The devices that hold an array: a row for each distinct box, a column for each replica."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.geometry import Box


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

    def slots(self, process: int) -> Sequence[tuple[int, int]]:
        """Return the row and column of each device of a process."""
        return _slots(self).get(process, ())

    @property
    def most_slots(self) -> int:
        """Number of devices of the process that has most of them."""
        return max(map(len, _slots(self).values()))


@functools.lru_cache(256)
def _slots(grid: ReplicaGrid) -> dict[int, list[tuple[int, int]]]:
    slots: dict[int, list[tuple[int, int]]] = {}
    for row, processes in enumerate(grid.processes):
        for column, process in enumerate(processes):
            slots.setdefault(process, []).append((row, column))
    return slots


class Replicas(NamedTuple):
    """The distinct boxes of an array, and who holds them."""

    boxes: tuple[Box, ...]  # each box once, ascending
    grid: ReplicaGrid  # a row of devices for each
