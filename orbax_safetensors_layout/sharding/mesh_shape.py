"""The shape of a mesh whose devices need not exist, and the parts of arrays that they hold.

Devices are numbered in row-major order of the mesh and divided among the processes in equal blocks,
as `jax.make_mesh` does by default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from orbax_safetensors_layout.geometry import Box, Ints, row_major_strides
from orbax_safetensors_layout.options import require

from .holders import AddressableShards, GlobalShards, ReplicaGrid, Replicas

Spec: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dimension, outermost first, the mesh axes that split it, as a `PartitionSpec` says."""

_MOST_DEVICES = 1 << 20  # there are tables of them for each array shape


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """A mesh of devices; raises ValueError where the processes do not divide them."""

    axes: Mapping[str, int]  # name to size of each axis, outermost first
    processes: int  # number of processes that share the devices
    processes_per_host: int = 1

    def __post_init__(self) -> None:
        sizes: list[Any] = [*self.axes.values(), self.processes]
        is_valid = all(isinstance(size, int | np.integer) and size > 0 for size in sizes)
        require(is_valid, "sizes of axes, and processes,", "positive integers", sizes)
        if self.devices > _MOST_DEVICES:
            raise ValueError(f"{self.devices:,} devices are more than {_MOST_DEVICES:,}")
        if self.devices % self.processes:
            raise ValueError(f"{self.processes} processes do not divide {self.devices} devices")
        if self.processes_per_host < 1 or self.processes % self.processes_per_host:
            raise ValueError(
                f"{self.processes_per_host} a host do not divide {self.processes} processes"
            )

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def hosts(self) -> int:
        return self.processes // self.processes_per_host

    @property
    def devices_per_process(self) -> int:
        return self.devices // self.processes

    def ways(self, names: Sequence[str]) -> int:
        """Return into how many parts some axes split a dimension."""
        return math.prod(self.axes[name] for name in names)


class Partition(NamedTuple):
    """The equal parts of an array that each process of a cluster holds."""

    shape: tuple[int, ...]  # of a part
    numbers: Ints  # [devices, dimensions] number of the part along each dimension
    # [processes, devices of a process] numbers of the parts that its devices hold, sorted.
    rows: Ints
    origin: Ints  # [processes, dimensions] the lowest part along each dimension
    likeness: Ints  # [processes] equal where the parts are the same relative to the origin
    holders: Ints  # [parts] number of processes that hold each part
    grid: tuple[int, ...]  # number of parts along each dimension

    @classmethod
    def of(
        cls, shape: tuple[int, ...], spec: Spec, mesh: MeshShape, *, packed: bool = False
    ) -> Partition:
        """Return the parts of an array; those of `packed` elements are compared at their places."""
        if len(spec) > len(shape):
            raise ValueError(f"{spec} has more dimensions than the shape")
        counts = tuple(map(mesh.ways, spec)) + (1,) * (len(shape) - len(spec))
        for axis, (extent, ways) in enumerate(zip(shape, counts, strict=True)):
            if extent % ways:
                raise ValueError(f"dimension {axis} of {extent} is not divisible by {ways}")
        positions = np.unravel_index(np.arange(mesh.devices), [*mesh.axes.values()])
        coordinate = dict(zip(mesh.axes, positions, strict=True))
        numbers = np.zeros((mesh.devices, len(shape)), np.int64)
        for axis, names in enumerate(spec):
            for name in names:
                numbers[:, axis] = numbers[:, axis] * mesh.axes[name] + coordinate[name]
        strides = np.array(row_major_strides(counts), np.int64)
        each = (mesh.processes, mesh.devices_per_process)
        rows = np.sort((numbers @ strides).reshape(each), axis=1)
        is_new = np.ones(rows.shape, bool)
        is_new[:, 1:] = rows[:, 1:] != rows[:, :-1]
        holders = np.bincount(rows[is_new])
        origin = numbers.reshape(*each, len(shape)).min(1)
        moved = 0 if packed else (origin @ strides)[:, None]
        relative = np.concatenate([rows - moved, holders[rows] > 1], 1)
        likeness = np.unique(relative, axis=0, return_inverse=True)[1].reshape(-1)
        part = tuple(extent // ways for extent, ways in zip(shape, counts, strict=True))
        return cls(part, numbers, rows, origin, likeness, holders, counts)

    def local(self, process: int) -> AddressableShards:
        numbers = np.unique(self.rows[process])
        shared = self.holders[numbers] > 1
        # The parts of an array without elements may be one box.
        boxes = dict(zip(self._boxes(numbers), shared.tolist(), strict=True))
        return AddressableShards(tuple(boxes), tuple(boxes.values()))

    def held(self) -> GlobalShards:
        """Return all boxes with their holders; an array without elements is one box, of all."""
        if 0 in self.shape:
            whole = Box.whole([n * count for n, count in zip(self.shape, self.grid, strict=True)])
            return GlobalShards((whole,), (tuple(range(len(self.rows))),))
        of_part: dict[int, list[int]] = {}
        for process, row in enumerate(self.rows.tolist()):
            for part in dict.fromkeys(row):
                of_part.setdefault(part, []).append(process)
        numbers = sorted(of_part)
        holders = tuple(tuple(of_part[number]) for number in numbers)
        return GlobalShards(tuple(self._boxes(numbers)), holders)

    def replicas(self) -> Replicas:
        """Return all boxes, ascending, with the numbers of the devices that hold each."""
        parts = self.numbers @ np.array(row_major_strides(self.grid), np.int64)
        count = math.prod(self.grid)
        devices = np.argsort(parts, kind="stable").reshape(count, -1)
        processes = devices // self.rows.shape[1]
        of_boxes = [tuple(map(tuple, rows.tolist())) for rows in (devices, processes)]
        return Replicas(tuple(self._boxes(range(count))), ReplicaGrid(of_boxes[0], of_boxes[1]))

    def _boxes(self, numbers: Ints | Sequence[int]) -> list[Box]:
        indices = np.stack(np.unravel_index(numbers, self.grid or (1,)), 1)[:, : len(self.grid)]
        return [self.box(cell) for cell in indices.tolist()]

    def box(self, cell: Sequence[int]) -> Box:
        start = tuple(number * extent for number, extent in zip(cell, self.shape, strict=True))
        return Box(start, tuple(a + n for a, n in zip(start, self.shape, strict=True)))
