"""Shardings of arrays to records, and records to shardings on this process's devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from orbax_safetensors_layout.format import (
    UNCONSTRAINED,
    MeshRecord,
    NamedRecord,
    ShardingRecord,
    SingleDeviceRecord,
    SpecPart,
)

_AXIS_TYPES: Mapping[str, Any] = {name.lower(): kind for name, kind in AxisType.__members__.items()}


class ShardingTable:
    """The shardings of one tree, each recorded once."""

    def __init__(self) -> None:
        self._numbers: dict[ShardingRecord, int] = {}
        self._seen: dict[Sharding, int | None] = {}  # an array's sharding costs one look-up
        self._positions = {device: number for number, device in enumerate(jax.devices())}

    @property
    def records(self) -> list[ShardingRecord]:
        """The shardings by number, for `Manifest.shardings`."""
        return [*self._numbers]

    def number(self, sharding: Sharding) -> int | None:
        """Records a sharding, and returns its number in `records`.

        Returns None for what is not a `NamedSharding` over named axes or a `SingleDeviceSharding`,
        and for devices that are not in `jax.devices()`.
        """
        if sharding not in self._seen:
            record = _encode(sharding, self._positions)
            if record is not None:
                self._numbers.setdefault(record, len(self._numbers))
            self._seen[sharding] = None if record is None else self._numbers[record]
        return self._seen[sharding]


def decode_sharding(record: ShardingRecord) -> Sharding | None:
    """Return the sharding on devices of these positions; None without these, or such memory."""
    devices = jax.devices()
    numbers = (record.device,) if isinstance(record, SingleDeviceRecord) else record.mesh.devices
    if max(numbers) >= len(devices):
        return None
    try:
        if isinstance(record, SingleDeviceRecord):
            return SingleDeviceSharding(devices[record.device], memory_kind=record.memory_kind)
        axis_types = tuple(_AXIS_TYPES[name] for name in record.mesh.axis_types)
        array = np.empty(len(numbers), object)
        array[:] = [devices[number] for number in numbers]
        mesh = Mesh(array.reshape(record.mesh.sizes), record.mesh.axis_names, axis_types=axis_types)
        parts = (PartitionSpec.UNCONSTRAINED if p is UNCONSTRAINED else p for p in record.spec)
        spec: PartitionSpec = PartitionSpec(*parts)  # type: ignore[no-untyped-call]
        return NamedSharding(mesh, spec, memory_kind=record.memory_kind)
    except (KeyError, ValueError):  # an axis type or a memory kind that this JAX does not know
        return None


def _encode(sharding: Sharding, positions: Mapping[Any, int]) -> ShardingRecord | None:
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        if device not in positions:
            return None
        return SingleDeviceRecord(positions[device], _memory_kind(sharding, device))
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    mesh, spec = sharding.mesh, sharding.spec
    devices = [positions.get(device) for device in mesh.devices.flat]
    if not devices or None in devices or not all(isinstance(name, str) for name in mesh.axis_names):
        return None
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    return NamedRecord(
        MeshRecord(
            tuple(mesh.axis_names),
            tuple(mesh.devices.shape),
            tuple(axis_type.name.lower() for axis_type in mesh.axis_types),
            tuple(position for position in devices if position is not None),
        ),
        tuple(map(_record_part, spec)),
        _memory_kind(sharding, mesh.devices.flat[0]),
    )


def _memory_kind(sharding: Sharding, device: Any) -> str | None:
    """Return None for the default memory, whose name depends on the platform."""
    kind = sharding.memory_kind
    return None if kind == device.default_memory().kind else kind


def _record_part(part: Any) -> SpecPart:
    if part is PartitionSpec.UNCONSTRAINED:
        return UNCONSTRAINED
    return part if part is None or isinstance(part, str) else tuple(part)
