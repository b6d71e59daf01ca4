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
    """The shardings of one tree, each recorded once.

    Attributes:
        records: The records, for `Manifest.shardings`.

    Example:
        >>> table = ShardingTable()
        >>> table.number(SingleDeviceSharding(jax.devices()[0]))
        0
        >>> table.records
        [SingleDeviceRecord(device=0, memory_kind=None)]
    """

    def __init__(self) -> None:
        self.records: list[ShardingRecord] = []
        self._numbers: dict[ShardingRecord, int] = {}
        self._seen: dict[Sharding, int | None] = {}  # an array's sharding costs one look-up
        self._positions = {device: number for number, device in enumerate(jax.devices())}

    def number(self, sharding: Sharding) -> int | None:
        """Records a sharding, and returns its number in `records`.

        Returns None for what is not a `NamedSharding` over named axes or a `SingleDeviceSharding`,
        and for devices that are not in `jax.devices()`.
        """
        try:
            return self._seen[sharding]
        except KeyError:
            pass
        found = _describe(sharding, self._positions)
        number = None if found is None else self._numbers.setdefault(found, len(self.records))
        if found is not None and number == len(self.records):
            self.records.append(found)
        self._seen[sharding] = number
        return number


def decode_sharding(record: ShardingRecord) -> Sharding | None:
    """Return the recorded sharding, on devices of the same positions in `jax.devices()`.

    None where there are fewer devices, or none with such a memory.
    """
    devices = jax.devices()
    wanted = (record.device,) if isinstance(record, SingleDeviceRecord) else record.mesh.devices
    if max(wanted) >= len(devices):
        return None
    try:
        if isinstance(record, SingleDeviceRecord):
            return SingleDeviceSharding(devices[record.device], memory_kind=record.memory_kind)
        mesh = _mesh(record.mesh, devices)
        spec: PartitionSpec = PartitionSpec(*map(_jax_part, record.spec))  # type: ignore[no-untyped-call]
        return NamedSharding(mesh, spec, memory_kind=record.memory_kind)
    except (KeyError, ValueError):  # an axis type or a memory kind that this JAX does not know
        return None


def _describe(sharding: Sharding, positions: Mapping[Any, int]) -> ShardingRecord | None:
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


def _mesh(record: MeshRecord, devices: list[Any]) -> Mesh:
    array = np.empty(len(record.devices), object)
    array[:] = [devices[position] for position in record.devices]
    return Mesh(
        array.reshape(record.sizes),
        record.axis_names,
        axis_types=tuple(_AXIS_TYPES[name] for name in record.axis_types),
    )


def _record_part(part: Any) -> SpecPart:
    if part is PartitionSpec.UNCONSTRAINED:
        return UNCONSTRAINED
    return part if part is None or isinstance(part, str) else tuple(part)


def _jax_part(part: SpecPart) -> Any:
    return PartitionSpec.UNCONSTRAINED if part is UNCONSTRAINED else part
