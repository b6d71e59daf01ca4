"""The parts of an array that the processes of a cluster hold, computed for all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.geometry import Box, row_major_strides

from .addressable import AddressableShards, GlobalShards
from .mesh_shape import MeshShape, ShardIndices, Spec

Ints: TypeAlias = npt.NDArray[np.int64]


class Partition(NamedTuple):
    """The parts of an array that each process holds."""

    shards: ShardIndices
    # [processes, devices of a process] numbers of the parts that its devices hold, sorted.
    rows: Ints
    origin: Ints  # [processes, dimensions] the lowest part along each dimension
    likeness: Ints  # [processes] equal where the parts are the same relative to the origin
    holders: Ints  # [parts] number of processes that hold each part
    grid: tuple[int, ...]  # number of parts along each dimension

    @property
    def shard_elements(self) -> int:
        """Elements of one device's shard."""
        return self.shards.box([0] * len(self.shards.parts)).size

    @classmethod
    def of(
        cls, shape: tuple[int, ...], spec: Spec, grid: MeshShape, *, packed: bool = False
    ) -> Partition:
        """Return the parts of an array of `shape` that the processes hold.

        Where elements share bytes (`packed`), parts are alike at the same place only.
        """
        shards = grid.shard_indices(spec, shape)
        counts = tuple(grid.ways(names) for names in spec)
        counts += (1,) * (len(shape) - len(counts))
        strides = np.array(row_major_strides(counts), np.int64)
        each = (grid.processes, grid.devices_per_process)
        rows = np.sort((shards.numbers @ strides).reshape(each), axis=1)
        is_new = np.ones(rows.shape, bool)
        is_new[:, 1:] = rows[:, 1:] != rows[:, :-1]
        holders = np.bincount(rows[is_new])
        origin = shards.numbers.reshape(*each, len(shape)).min(1)
        moved = 0 if packed else (origin @ strides)[:, None]
        relative = np.concatenate([rows - moved, holders[rows] > 1], 1)
        likeness = np.unique(relative, axis=0, return_inverse=True)[1].reshape(-1)
        return cls(shards, rows, origin, likeness, holders, counts)

    def local(self, process: int) -> AddressableShards:
        """Return the boxes of one process."""
        numbers = np.unique(self.rows[process])
        shared = self.holders[numbers] > 1
        # The parts of an array without elements may be one box.
        boxes = dict(zip(self._boxes(numbers), shared.tolist(), strict=True))
        return AddressableShards(tuple(boxes), tuple(boxes.values()))

    def held(self) -> GlobalShards:
        """Return all boxes with their holders; an array without elements is one box, of all."""
        if 0 in self.shards.parts:
            shape = [n * count for n, count in zip(self.shards.parts, self.grid, strict=True)]
            return GlobalShards((Box.whole(shape),), (tuple(range(len(self.rows))),))
        of_part: dict[int, list[int]] = {}
        for process, row in enumerate(self.rows.tolist()):
            for part in dict.fromkeys(row):
                of_part.setdefault(part, []).append(process)
        numbers = sorted(of_part)
        holders = tuple(tuple(of_part[number]) for number in numbers)
        return GlobalShards(tuple(self._boxes(numbers)), holders)

    def _boxes(self, numbers: Ints | Sequence[int]) -> list[Box]:
        cells = np.stack(np.unravel_index(numbers, self.grid or (1,)), 1)[:, : len(self.grid)]
        return [self.shards.box(cell) for cell in cells.tolist()]
