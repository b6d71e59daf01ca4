"""The shape of a mesh whose devices need not exist, and which of them holds which part.

Devices are numbered in row-major order of the mesh and divided among the processes in equal blocks,
as `jax.make_mesh` does by default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.geometry import Box

Spec: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dimension, outermost first, the mesh axes that split it, as a `PartitionSpec` says."""

_MOST_DEVICES = 1 << 20  # there are tables of them for each array shape


class ShardIndices(NamedTuple):
    """The part of an array that each device holds."""

    numbers: npt.NDArray[np.int64]  # [devices, dimensions] number of the part along each dimension
    parts: tuple[int, ...]  # extent of a part along each dimension

    def box(self, cell: Sequence[int]) -> Box:
        """Return the region of a part."""
        start = tuple(number * extent for number, extent in zip(cell, self.parts, strict=True))
        return Box(start, tuple(a + n for a, n in zip(start, self.parts, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """A mesh of devices.

    Raises:
        ValueError: The processes do not divide the devices, or there are none of either.
    """

    axes: Mapping[str, int]  # name to size of each axis, outermost first
    processes: int  # number of processes that share the devices

    def __post_init__(self) -> None:
        if self.processes < 1 or any(size < 1 for size in self.axes.values()):
            raise ValueError(
                f"a mesh of {dict(self.axes)} on {self.processes} processes has no devices"
            )
        if self.devices > _MOST_DEVICES:
            raise ValueError(f"{self.devices:,} devices are more than {_MOST_DEVICES:,}")
        if self.devices % self.processes:
            raise ValueError(f"{self.processes} processes do not divide {self.devices} devices")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.axes.values())

    @property
    def devices_per_process(self) -> int:
        """Number of devices of each process."""
        return self.devices // self.processes

    def ways(self, names: Sequence[str]) -> int:
        """Return into how many parts some axes split a dimension."""
        return math.prod(self.axes[name] for name in names)

    def shard_indices(self, spec: Spec, shape: Sequence[int]) -> ShardIndices:
        """Return the part of an array that each device holds; raises where the spec does not fit.

        Dimensions that the spec leaves out are not split.
        """
        if len(spec) > len(shape):
            raise ValueError(f"{spec} has more dimensions than the shape")
        positions = np.unravel_index(np.arange(self.devices), [*self.axes.values()])
        coordinate = dict(zip(self.axes, positions, strict=True))
        numbers = np.zeros((self.devices, len(shape)), np.int64)
        parts = list(shape)
        for axis, names in enumerate(spec):
            ways = self.ways(names)
            if shape[axis] % ways:
                raise ValueError(f"dimension {axis} of {shape[axis]} is not divisible by {ways}")
            parts[axis] //= ways
            for name in names:
                numbers[:, axis] = numbers[:, axis] * self.axes[name] + coordinate[name]
        return ShardIndices(numbers, tuple(parts))
