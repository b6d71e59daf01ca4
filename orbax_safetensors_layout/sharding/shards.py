"""The boxes of a sharded array that a process holds, from JAX's shardings.

Concrete shardings have index maps of their own. For a `NamedSharding` over an `AbstractMesh` the
boxes are computed from the mesh's shape alone, so that a plan for thousands of devices needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.geometry import Box

from .addressable import AddressableShards, GlobalShards
from .mesh_shape import MeshShape, Spec
from .partition import Partition
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
        self.process_index = jax.process_index() if process_index is None else process_index
        self.process_count = jax.process_count() if process_count is None else process_count
        self._is_here = process_count in (None, jax.process_count())
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(
                f"There is no process {self.process_index} of {self.process_count}; for an"
                " abstract mesh say how many there are with process_count."
            )
        self._local: dict[tuple[Sharding, tuple[int, ...]], AddressableShards] = {}
        self._held: dict[tuple[Sharding | None, tuple[int, ...]], GlobalShards] = {}
        self._replicas: dict[tuple[Sharding, tuple[int, ...]], Replicas | None] = {}

    def whole(self, shape: tuple[int, ...]) -> AddressableShards:
        """Return all of an array on the host, shared if there are several processes."""
        return AddressableShards((Box.whole(shape),), (jax.process_count() > 1,))

    def boxes(self, sharding: Sharding, shape: tuple[int, ...]) -> AddressableShards:
        """Return the distinct boxes of `shape` under `sharding` that the process's devices hold.

        Raises:
            MismatchError: The sharding does not divide the shape.
        """
        key = (sharding, shape)
        if key not in self._local:
            with _checked(sharding, shape):
                if isinstance(sharding, NamedSharding) and is_abstract(sharding):
                    local = self._partition(sharding, shape).local(self.process_index)
                else:
                    owners = self._owners(sharding, shape)
                    boxes = [box for box in owners if self.process_index in owners[box]]
                    shared = tuple(len(owners[box]) > 1 for box in boxes)
                    local = AddressableShards(tuple(boxes), shared)
            self._local[key] = local
        return self._local[key]

    def held(self, sharding: Sharding | None, shape: tuple[int, ...]) -> GlobalShards:
        """Return all distinct boxes of a global `shape` and the processes that hold each.

        Without a sharding every process holds all of it, on its host.

        Raises:
            MismatchError: The sharding does not divide the shape.
        """
        key = (sharding, shape)
        if key not in self._held:
            with _checked(sharding, shape):
                if isinstance(sharding, NamedSharding) and is_abstract(sharding):
                    held = self._partition(sharding, shape).held()
                else:
                    owners = {Box.whole(shape): set(range(self.process_count))}
                    if sharding is not None:
                        owners = self._owners(sharding, shape)
                    if 0 in shape:
                        owners = {Box.whole(shape): set().union(*owners.values())}
                    boxes = tuple(sorted(owners))
                    held = GlobalShards(boxes, tuple(tuple(sorted(owners[box])) for box in boxes))
            self._held[key] = held
        return self._held[key]

    def replicas(self, sharding: Sharding, shape: tuple[int, ...]) -> Replicas | None:
        """Return the devices that hold each box of `shape`; None where their number differs.

        Devices of an `AbstractMesh` are numbers.
        """
        key = (sharding, shape)
        if key not in self._replicas:
            self._replicas[key] = _replicas(self._holders(sharding, shape))
        return self._replicas[key]

    def _partition(self, sharding: NamedSharding, shape: tuple[int, ...]) -> Partition:
        mesh = MeshShape(dict(sharding.mesh.shape), self.process_count)
        return Partition.of(shape, spec_of(sharding), mesh)

    def _owners(self, sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, set[int]]:
        """Return the processes that hold each box."""
        if not self._is_here:
            raise ValueError(
                f"its devices belong to {jax.process_count()} processes, not to"
                f" {self.process_count}; a plan for others takes an AbstractMesh"
            )
        sharding.shard_shape(shape)  # raises where a dimension is not divisible
        holders = self._holders(sharding, shape)
        return {box: {process for process, _, _ in devices} for box, devices in holders.items()}

    def _holders(
        self, sharding: Sharding, shape: tuple[int, ...]
    ) -> dict[Box, list[tuple[int, int, Any]]]:
        """Return the devices that hold each box, as (process, order, device)."""
        holders: dict[Box, list[tuple[int, int, Any]]] = {}
        if isinstance(sharding, NamedSharding) and is_abstract(sharding):
            parts, rows = self._partition(sharding, shape)[:2]
            for number, cell in enumerate(parts.numbers.tolist()):
                place = (number // rows.shape[1], number, number)
                holders.setdefault(parts.box(cell), []).append(place)
            return holders
        known: dict[int, Box] = {}  # JAX gives devices with equal indices the same tuple
        index_map: dict[Any, Any] = {**sharding.devices_indices_map(shape)}
        for device, index in index_map.items():
            if id(index) not in known:
                known[id(index)] = box_of(index, shape)
            place = (device.process_index, device.id, device)
            holders.setdefault(known[id(index)], []).append(place)
        return holders


@contextlib.contextmanager
def _checked(sharding: Sharding | None, shape: tuple[int, ...]) -> Iterator[None]:
    """Explains a sharding that does not fit, and refuses one whose shards are partial sums."""
    try:
        if isinstance(sharding, NamedSharding) and getattr(sharding.spec, "unreduced", None):
            raise ValueError("its devices would hold partial sums, of axes that are unreduced")
        yield
    except (ValueError, IndexError) as error:
        raise MismatchError(
            "the sharding does not fit: it must divide the shape evenly, on devices of"
            " the processes that are planned for",
            expected=f"a shape that {sharding} can divide",
            found=f"{shape}: {error}",
            hint="Shard another dimension, or fewer ways.",
        ) from error


def _axis_names(part: Any) -> tuple[str, ...]:
    """Return the mesh axes that split a dimension; none for an unconstrained one, as in JAX."""
    if isinstance(part, str):
        return (part,)
    return part if isinstance(part, tuple) else ()


def _replicas(holders: dict[Box, list[tuple[int, int, Any]]]) -> Replicas | None:
    if len({len(places) for places in holders.values()}) != 1:
        return None
    boxes = sorted(holders)
    rows = [sorted(holders[box], key=lambda place: place[:2]) for box in boxes]
    grid = ReplicaGrid(
        tuple(tuple(device for _, _, device in row) for row in rows),
        tuple(tuple(process for process, _, _ in row) for row in rows),
    )
    return Replicas(tuple(boxes), grid)
