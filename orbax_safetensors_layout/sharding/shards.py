"""The boxes of a sharded array that a process holds, from JAX's shardings.

Concrete shardings have index maps of their own. For a `NamedSharding` over an `AbstractMesh` the
boxes are computed from the mesh's shape alone, so that a plan for thousands of devices needs none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.geometry import Box

from .addressable import AddressableShards, GlobalShards
from .mesh_shape import MeshShape, ShardIndices, Spec
from .replicas import ReplicaGrid, Replicas

Index = tuple[slice, ...]
Placement = Sharding | Format
"""The placement of an array: a sharding, or a format (a sharding and a device layout)."""


def sharding_of(placement: Placement) -> Sharding:
    """Return the sharding of a placement."""
    if isinstance(placement, Sharding):
        return placement
    assert isinstance(placement.sharding, Sharding)
    return placement.sharding


def is_abstract(sharding: Sharding) -> bool:
    """Return whether a sharding names no devices, only a mesh's shape."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def box_of(index: Index, shape: Sequence[int]) -> Box:
    """Return the box of a device's index as JAX gives it."""
    starts, stops = [], []
    for part, extent in zip(index, shape, strict=True):
        start, stop, _ = part.indices(extent)
        starts.append(start)
        stops.append(stop)
    return Box(tuple(starts), tuple(stops))


def spec_of(sharding: NamedSharding) -> Spec:
    """Return the mesh axes that split each dimension."""
    return tuple(map(_axis_names, sharding.spec))


class ProcessShards:
    """The boxes of one process, computed once for each distinct (sharding, shape).

    Args:
        process_index: The process; `None` is this one.
        process_count: For an `AbstractMesh`: how many processes share its devices, which are
            numbered in row-major order of the mesh and divided into equal blocks; `None` is
            the number of this program.

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
        self._cache: dict[tuple[Sharding, tuple[int, ...]], AddressableShards] = {}
        self._held: dict[tuple[Sharding | None, tuple[int, ...]], GlobalShards] = {}
        self._replicas: dict[tuple[Sharding, tuple[int, ...]], Replicas | None] = {}

    @property
    def process_index(self) -> int:
        """Index of the process."""
        return self._process_index

    @property
    def process_count(self) -> int:
        """Number of processes."""
        return self._process_count

    def whole(self, shape: tuple[int, ...]) -> AddressableShards:
        """Return all of an array on the host, shared if there are several processes."""
        return AddressableShards((Box.whole(shape),), (jax.process_count() > 1,))

    def boxes(self, sharding: Sharding, shape: tuple[int, ...]) -> AddressableShards:
        """Return the distinct boxes of `shape` under `sharding` that the process's devices hold.

        Raises:
            MismatchError: The sharding does not divide the shape.
        """
        key = (sharding, shape)
        found = self._cache.get(key)
        if found is None:
            owners = self._owners(sharding, shape, everyone=False)
            mine = [box for box, processes in owners.items() if self._process_index in processes]
            found = self._cache[key] = AddressableShards(
                tuple(mine), tuple(len(owners[box]) > 1 for box in mine)
            )
        return found

    def held(self, sharding: Sharding | None, shape: tuple[int, ...]) -> GlobalShards:
        """Return all distinct boxes of a global `shape` and the processes that hold each.

        Without a sharding every process holds all of it, on its host.

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
            found = self._held[key] = GlobalShards(tuple(boxes), holders)
        return found

    def replicas(self, sharding: Sharding, shape: tuple[int, ...]) -> Replicas | None:
        """Return the devices that hold each box of `shape`; None where their number differs.

        Devices of an `AbstractMesh` are numbers.
        """
        key = (sharding, shape)
        if key not in self._replicas:
            holders: dict[Box, list[tuple[int, int, Any]]] = {}
            if is_abstract(sharding):
                found, processes = self._abstract_cells(sharding, shape)
                cells = zip(found.cells.tolist(), processes.tolist(), strict=True)
                for number, (cell, process) in enumerate(cells):
                    holders.setdefault(found.box(cell), []).append((process, number, number))
            else:
                boxes = _device_boxes(sharding, shape)
                for device, box in boxes.items():
                    place = (device.process_index, device.id, device)
                    holders.setdefault(box, []).append(place)
            self._replicas[key] = _replicas(holders)
        return self._replicas[key]

    def _owners(
        self, sharding: Sharding, shape: tuple[int, ...], *, everyone: bool
    ) -> dict[Box, set[int]]:
        try:
            _check_reduced(sharding)
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
        found, process = self._abstract_cells(sharding, shape)
        grid = found.cells
        wanted = grid if everyone else grid[process == self._process_index]
        owners: dict[Box, set[int]] = {}
        for cell in np.unique(wanted, axis=0):
            holders = process[(grid == cell).all(1)]
            # The parts of an array without elements are one box.
            held = owners.setdefault(found.box(cell.tolist()), set())
            held.update(np.unique(holders).tolist())
        return owners

    def _abstract_cells(
        self, sharding: Sharding, shape: tuple[int, ...]
    ) -> tuple[ShardIndices, npt.NDArray[np.int64]]:
        """Return the part that each device holds, and the process of each device."""
        assert isinstance(sharding, NamedSharding)
        mesh = MeshShape(dict(sharding.mesh.shape), self._process_count)
        process = np.arange(mesh.devices) // mesh.devices_per_process
        return mesh.cells(spec_of(sharding), shape), process


def _check_reduced(sharding: Sharding) -> None:
    """Refuses shardings of partial sums, whose shards are not parts of the array."""
    if isinstance(sharding, NamedSharding) and getattr(sharding.spec, "unreduced", None):
        raise ValueError("its devices would hold partial sums, of axes that are unreduced")


def _axis_names(part: Any) -> tuple[str, ...]:
    """Return the mesh axes that split a dimension; none for an unconstrained one, as in JAX."""
    if isinstance(part, str):
        return (part,)
    return part if isinstance(part, tuple) else ()


def _concrete_owners(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, set[int]]:
    sharding.shard_shape(shape)  # raises where a dimension is not divisible
    owners: dict[Box, set[int]] = {}
    for device, box in _device_boxes(sharding, shape).items():
        owners.setdefault(box, set()).add(device.process_index)
    return owners


def _device_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    boxes: dict[int, Box] = {}
    found: dict[Any, Box] = {}
    index_map: Mapping[Any, Index | None] = sharding.devices_indices_map(shape)
    for device, index in index_map.items():
        assert index is not None
        box = boxes.get(id(index))
        if box is None:
            box = boxes[id(index)] = box_of(index, shape)
        found[device] = box
    return found


def _replicas(holders: Mapping[Box, list[tuple[int, int, Any]]]) -> Replicas | None:
    """Return the replicas, from (process, order, device) of each box's holders."""
    if len({len(places) for places in holders.values()}) != 1:
        return None
    boxes = sorted(holders)
    rows = [sorted(holders[box], key=lambda place: place[:2]) for box in boxes]
    grid = ReplicaGrid(
        tuple(tuple(device for _, _, device in row) for row in rows),
        tuple(tuple(process for process, _, _ in row) for row in rows),
    )
    return Replicas(tuple(boxes), grid)
