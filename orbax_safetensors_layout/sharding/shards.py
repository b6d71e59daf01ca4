"""The boxes of a sharded array that a process holds, from JAX's shardings.

Concrete shardings have index maps of their own. For a `NamedSharding` over an `AbstractMesh` the
boxes are computed from the mesh's shape alone, so that a plan for thousands of devices needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.options import require

from .holders import AddressableShards, GlobalShards, ReplicaGrid, Replicas
from .mesh_shape import MeshShape, Partition, Spec

Placement = Sharding | Format
"""The placement of an array: a sharding, or a format (a sharding and a device layout)."""


def sharding_of(placement: Placement) -> Sharding:
    """Return the sharding of a placement."""
    sharding = placement.sharding if isinstance(placement, Format) else placement
    assert isinstance(sharding, Sharding)
    return sharding


def is_abstract(sharding: Sharding) -> TypeGuard[NamedSharding]:
    """Return whether a sharding names no devices, only a mesh's shape."""
    return isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """Return the box of a device's index as JAX gives it."""
    bounds = [part.indices(extent) for part, extent in zip(index, shape, strict=True)]
    return Box(tuple(start for start, _, _ in bounds), tuple(stop for _, stop, _ in bounds))


def spec_of(sharding: NamedSharding) -> Spec:
    """Return the mesh axes that split each dimension; none an unconstrained one, as in JAX."""
    parts = ((part,) if isinstance(part, str) else part for part in sharding.spec)
    return tuple(part if isinstance(part, tuple) else () for part in parts)


def abstract_sharding(mesh: MeshShape, spec: Spec) -> NamedSharding:
    """Return a sharding over a mesh without devices."""
    axes = AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes))
    parts: Any = PartitionSpec(*(names or None for names in spec))  # type: ignore[no-untyped-call]
    return NamedSharding(axes, parts)


class ProcessShards:
    """The boxes of one process, computed once for each distinct (sharding, shape).

    The process is `process_index` of `process_count`, by default this one of this program's; for an
    `AbstractMesh` they may be others, see `MeshShape`. Methods raise `MismatchError` where a
    sharding does not divide a shape.
    """

    def __init__(
        self,
        process_index: int | None = None,
        process_count: int | None = None,
        *,
        processes_per_host: int = 1,
    ) -> None:
        self.processes_per_host = processes_per_host
        self.process_index = jax.process_index() if process_index is None else process_index
        self.process_count = jax.process_count() if process_count is None else process_count
        self._is_here = process_count in (None, jax.process_count())
        index, count = self.process_index, self.process_count
        is_valid = all(isinstance(n, Integral) for n in (index, count)) and 0 <= index < count
        expected = f"an integer below process_count={count!r} (say that for an abstract mesh)"
        require(is_valid, "process_index", expected, index)
        of_host = processes_per_host
        is_valid = isinstance(of_host, Integral) and 0 < of_host <= count
        require(is_valid, "processes_per_host", f"an integer from 1 to {count}", of_host)
        self._local: dict[tuple[Sharding, tuple[int, ...]], AddressableShards] = {}
        self._held: dict[tuple[Sharding | None, tuple[int, ...]], GlobalShards] = {}
        self._replicas: dict[tuple[Sharding, tuple[int, ...]], Replicas | None] = {}

    def whole(self, shape: tuple[int, ...]) -> AddressableShards:
        """Return all of an array on the host, shared if there are several processes."""
        return AddressableShards((Box.whole(shape),), (self.process_count > 1,))

    def boxes(self, sharding: Sharding, shape: tuple[int, ...]) -> AddressableShards:
        """Return the distinct boxes of `shape` under `sharding` that the process's devices hold."""
        key = (sharding, shape)
        if key not in self._local:
            with _checked(sharding, shape):
                if is_abstract(sharding):
                    self._local[key] = self._partition(sharding, shape).local(self.process_index)
                else:
                    owners = self._owners(sharding, shape)
                    boxes = tuple(box for box in owners if self.process_index in owners[box])
                    shared = tuple(len(owners[box]) > 1 for box in boxes)
                    self._local[key] = AddressableShards(boxes, shared)
        return self._local[key]

    def held(self, sharding: Sharding | None, shape: tuple[int, ...]) -> GlobalShards:
        """Return all boxes with their holders; without a sharding every process holds all."""
        key = (sharding, shape)
        if key not in self._held:
            with _checked(sharding, shape):
                if sharding is not None and is_abstract(sharding):
                    self._held[key] = self._partition(sharding, shape).held()
                else:
                    owners = {Box.whole(shape): set(range(self.process_count))}
                    if sharding is not None:
                        owners = self._owners(sharding, shape)
                    if 0 in shape:
                        owners = {Box.whole(shape): set().union(*owners.values())}
                    boxes = tuple(sorted(owners))
                    holders = tuple(tuple(sorted(owners[box])) for box in boxes)
                    self._held[key] = GlobalShards(boxes, holders)
        return self._held[key]

    def replicas(self, sharding: Sharding, shape: tuple[int, ...]) -> Replicas | None:
        """Return the devices, or their numbers, of each box; None where their count differs."""
        key = (sharding, shape)
        if key not in self._replicas:
            if is_abstract(sharding):
                self._replicas[key] = self._partition(sharding, shape).replicas()
                return self._replicas[key]
            by_box = sorted(self._holders(sharding, shape).items())
            rows = [sorted(places, key=lambda place: place[:2]) for _, places in by_box]
            devices = tuple(tuple(device for _, _, device in row) for row in rows)
            processes = tuple(tuple(process for process, _, _ in row) for row in rows)
            replicas = Replicas(tuple(box for box, _ in by_box), ReplicaGrid(devices, processes))
            self._replicas[key] = replicas if len(set(map(len, rows))) == 1 else None
        return self._replicas[key]

    def _partition(self, sharding: NamedSharding, shape: tuple[int, ...]) -> Partition:
        mesh = MeshShape(dict(sharding.mesh.shape), self.process_count)
        return Partition.of(shape, spec_of(sharding), mesh)

    def _owners(self, sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, set[int]]:
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
