"""Which boxes a process needs of a sharded array: the one module of `plan` that knows JAX.

Concrete shardings are asked for their own index maps. A `NamedSharding` over an `AbstractMesh` is
worked out here from the mesh's shape alone, so that a plan for thousands of devices needs none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.geometry.box import Box
from orbax_safetensors_layout.plan.grid import DeviceGrid, Spec
from orbax_safetensors_layout.plan.leaves import LocalBoxes
from orbax_safetensors_layout.plan.owners import HeldBoxes

Index = tuple[slice, ...]
Placement = Sharding | Format
"""Where an array goes: a sharding, or a format (a sharding and a device layout)."""


def sharding_of(placement: Placement) -> Sharding:
    """The sharding of a placement."""
    if isinstance(placement, Sharding):
        return placement
    assert isinstance(placement.sharding, Sharding)
    return placement.sharding


def is_abstract(sharding: Sharding) -> bool:
    """Whether a sharding names no devices, only a mesh's shape."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def box_of(index: Index, shape: Sequence[int]) -> Box:
    """A device's index, as JAX gives it, as a box."""
    starts, stops = [], []
    for part, extent in zip(index, shape, strict=True):
        start, stop, _ = part.indices(extent)
        starts.append(start)
        stops.append(stop)
    return Box(tuple(starts), tuple(stops))


def spec_of(sharding: NamedSharding) -> Spec:
    """The mesh axes that split each dimension."""
    return tuple(map(_axis_names, sharding.spec))


class ProcessShards:
    """The boxes of one process, computed once for each distinct (sharding, shape).

    Args:
        process_index: The process; `None` is this one.
        process_count: For an `AbstractMesh`: how many processes share its devices, which are
            numbered in row-major order of the mesh and divided into equal blocks; `None` is
            as many as there are.

    Raises:
        ValueError: There is no process of that index.
    """

    def __init__(self, process_index: int | None = None, process_count: int | None = None) -> None:
        self._process_index = jax.process_index() if process_index is None else process_index
        self._process_count = jax.process_count() if process_count is None else process_count
        self._is_here = process_count in (None, jax.process_count())
        if not 0 <= self._process_index < self._process_count:
            raise ValueError(
                f"There is no process {self._process_index} of {self._process_count}; for an"
                " abstract mesh say how many there are with process_count."
            )
        self._cache: dict[tuple[Sharding, tuple[int, ...]], LocalBoxes] = {}
        self._held: dict[tuple[Sharding | None, tuple[int, ...]], HeldBoxes] = {}

    @property
    def process_index(self) -> int:
        """The process."""
        return self._process_index

    @property
    def process_count(self) -> int:
        """How many processes there are."""
        return self._process_count

    def whole(self, shape: tuple[int, ...]) -> LocalBoxes:
        """All of an array on the host; other processes may want it too."""
        return LocalBoxes((Box.whole(shape),), (jax.process_count() > 1,))

    def boxes(self, sharding: Sharding, shape: tuple[int, ...]) -> LocalBoxes:
        """The distinct boxes of `shape` under `sharding` that the process's devices hold.

        Raises:
            MismatchError: The sharding does not divide the shape.
        """
        key = (sharding, shape)
        found = self._cache.get(key)
        if found is None:
            owners = self._owners(sharding, shape, everyone=False)
            mine = [box for box, processes in owners.items() if self._process_index in processes]
            found = self._cache[key] = LocalBoxes(
                tuple(mine), tuple(len(owners[box]) > 1 for box in mine)
            )
        return found

    def held(self, sharding: Sharding | None, shape: tuple[int, ...]) -> HeldBoxes:
        """All distinct boxes of `shape` and the processes that hold each.

        Args:
            sharding: Its sharding; None for a value that every process has on its host.
            shape: The global shape.

        Raises:
            MismatchError: The sharding does not divide the shape.
        """
        key = (sharding, shape)
        found = self._held.get(key)
        if found is None:
            if sharding is None:
                owners = {Box.whole(shape): set(range(self._process_count))}
            else:
                owners = self._owners(sharding, shape, everyone=True)
            if not math.prod(shape):
                owners = {Box.whole(shape): set().union(*owners.values())}
            boxes = sorted(owners)
            holders = tuple(tuple(sorted(owners[box])) for box in boxes)
            found = self._held[key] = HeldBoxes(tuple(boxes), holders)
        return found

    def _owners(
        self, sharding: Sharding, shape: tuple[int, ...], *, everyone: bool
    ) -> dict[Box, set[int]]:
        try:
            if is_abstract(sharding):
                return self._abstract_owners(sharding, shape, everyone)
            if self._is_here:
                return _concrete_owners(sharding, shape)
            raise ValueError(
                f"its devices belong to {jax.process_count()} processes, not to"
                f" {self._process_count}; a plan for others takes an AbstractMesh"
            )
        except (ValueError, IndexError) as error:
            raise MismatchError(
                "the sharding does not fit: it must divide the shape evenly, on devices of"
                " the processes that are planned for",
                expected=f"a shape that {sharding} can divide",
                found=f"{shape}: {error}",
                hint="Shard another dimension, or fewer ways.",
            ) from error

    def _abstract_owners(
        self, sharding: Sharding, shape: tuple[int, ...], everyone: bool
    ) -> dict[Box, set[int]]:
        assert isinstance(sharding, NamedSharding)
        mesh = DeviceGrid(dict(sharding.mesh.shape), self._process_count)
        found = mesh.cells(spec_of(sharding), shape)
        process = np.arange(mesh.devices) // mesh.devices_per_process
        grid = found.cells
        wanted = grid if everyone else grid[process == self._process_index]
        owners: dict[Box, set[int]] = {}
        for cell in np.unique(wanted, axis=0):
            holders = process[(grid == cell).all(1)]
            owners[found.box(cell.tolist())] = set(np.unique(holders).tolist())
        return owners


def _axis_names(part: Any) -> tuple[str, ...]:
    """The mesh axes that split one dimension; an unconstrained one is not split, as in JAX."""
    if isinstance(part, str):
        return (part,)
    return part if isinstance(part, tuple) else ()


def _concrete_owners(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, set[int]]:
    sharding.shard_shape(shape)  # raises where a dimension is not divisible
    owners: dict[Box, set[int]] = {}
    boxes: dict[int, Box] = {}
    index_map: Mapping[Any, Index | None] = sharding.devices_indices_map(shape)
    for device, index in index_map.items():
        assert index is not None
        box = boxes.get(id(index))
        if box is None:
            box = boxes[id(index)] = box_of(index, shape)
        owners.setdefault(box, set()).add(device.process_index)
    return owners
