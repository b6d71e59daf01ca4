"""Shardings as data: what is needed to place an array again as it was, without JAX."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TypeAlias

from .schema import Schema, short_repr


class Unconstrained(enum.Enum):
    """The part of a spec that leaves a dimension to the compiler."""

    UNCONSTRAINED = "unconstrained"


UNCONSTRAINED = Unconstrained.UNCONSTRAINED
SpecPart: TypeAlias = str | tuple[str, ...] | Unconstrained | None


@dataclasses.dataclass(frozen=True, slots=True)
class MeshRecord:
    """A mesh of devices, which are positions in `jax.devices()`, in row-major order."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    axis_types: tuple[str, ...]
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NamedRecord:
    """A `NamedSharding`; `memory_kind` is None where it is the devices' default.

    The spec splits each dimension by nothing, a mesh axis, several, or as the compiler likes.
    """

    mesh: MeshRecord
    spec: tuple[SpecPart, ...]
    memory_kind: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SingleDeviceRecord:
    """A `SingleDeviceSharding`; its device is a position in `jax.devices()`."""

    device: int
    memory_kind: str | None = None


ShardingRecord: TypeAlias = NamedRecord | SingleDeviceRecord


def dump_sharding(record: ShardingRecord) -> dict[str, object]:
    """Return a sharding as a JSON value."""
    if isinstance(record, SingleDeviceRecord):
        return {"device": record.device, "memory_kind": record.memory_kind}
    mesh = record.mesh
    return {
        "mesh": dict(zip(mesh.axis_names, mesh.sizes, strict=True)),
        "axis_types": mesh.axis_types,
        "devices": mesh.devices,
        "spec": [
            {part.value: True} if isinstance(part, Unconstrained) else part for part in record.spec
        ],
        "memory_kind": record.memory_kind,
    }


def parse_sharding(raw: object, checks: Schema) -> ShardingRecord:
    """Parses and validates a sharding."""
    fields = checks.members(raw, "sharding")
    memory_kind = fields.get("memory_kind")
    if memory_kind is not None:
        memory_kind = checks.text(memory_kind, "memory kind")
    if "device" in fields:
        return SingleDeviceRecord(checks.size(fields["device"], "device"), memory_kind)
    mesh = _mesh(fields, checks)
    spec = tuple(_part(part, checks) for part in checks.items(fields.get("spec"), "spec"))
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    axes = [axis for part in parts for axis in part if isinstance(axis, str)]
    if not set(axes) <= set(mesh.axis_names) or len(set(axes)) != len(axes):
        expected = f"each of the mesh axes {short_repr(mesh.axis_names)} at most once"
        checks.refuse("malformed spec", expected, short_repr(spec))
    return NamedRecord(mesh, spec, memory_kind)


def _mesh(fields: dict[str, object], checks: Schema) -> MeshRecord:
    axes = checks.members(fields.get("mesh"), "mesh")
    sizes = tuple(checks.size(size, "size of a mesh axis") for size in axes.values())
    types = checks.texts(fields.get("axis_types"), "axis types")
    devices = checks.sizes(fields.get("devices"), "devices of a mesh")
    fits = len(types) == len(axes) and math.prod(sizes) == len(set(devices)) == len(devices)
    if not fits or not devices:
        expected = "a type for each axis, and distinct devices, as many as the sizes multiply to"
        found = f"axes {short_repr(axes)}, {len(types)} types, {len(devices)} devices"
        checks.refuse("malformed mesh", expected, found)
    return MeshRecord(tuple(axes), sizes, types, devices)


def _part(raw: object, checks: Schema) -> SpecPart:
    if raw is None:
        return None
    if isinstance(raw, list):
        return checks.texts(raw, "spec")
    if raw == ((UNCONSTRAINED.value, True),):
        return UNCONSTRAINED
    return checks.text(raw, "spec")
