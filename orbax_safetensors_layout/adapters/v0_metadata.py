"""Metadata of a checkpoint in the terms of Orbax v0."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

from orbax_safetensors_layout.format import NamedRecord

from . import _orbax
from .metadata import CheckpointMetadata, StoredArrayMetadata

_AXIS_TYPES = {name.lower(): kind for name, kind in AxisType.__members__.items()}


class HostArrayMetadata(ocp.metadata.ArrayMetadata):
    """Of a leaf that was a numpy array, and is restored as one."""


def describe(directory: os.PathLike[str], contents: CheckpointMetadata) -> Any:
    """A `TreeMetadata` with the structure that was saved.

    Arrays are `ocp.metadata.ArrayMetadata`, numbers `ScalarMetadata`, strings `StringMetadata`. A
    checkpoint that others wrote is a flat dict from tensor name to `ArrayMetadata`.
    """

    def array(stored: StoredArrayMetadata) -> ocp.metadata.ArrayMetadata:
        kind = HostArrayMetadata if stored.on_host else ocp.metadata.ArrayMetadata
        return kind(
            name=stored.name,
            directory=directory,
            shape=stored.shape,
            sharding=_sharding(stored),
            dtype=stored.dtype,
            storage=ocp.metadata.StorageMetadata(chunk_shape=stored.chunk_shape),
        )

    def value(name: str, found: bool | int | float | str) -> Any:
        if isinstance(found, str):
            return ocp.metadata.StringMetadata(name=name, directory=directory)
        dtype = np.dtype(type(found))
        return ocp.metadata.ScalarMetadata(name=name, directory=directory, dtype=dtype)

    return _orbax.tree_metadata(contents.tree(array, value), contents.custom_metadata)


def _sharding(stored: StoredArrayMetadata) -> Any:
    """As Orbax records shardings; of one over devices that are not here, without devices."""
    placement, record = stored.placement, stored.sharding
    if isinstance(placement, NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(placement)
    if isinstance(placement, SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(placement)
    if not isinstance(record, NamedRecord):
        return None
    return ocp.metadata.NamedShardingMetadata(
        shape=np.array(record.mesh.sizes),
        axis_names=list(record.mesh.axis_names),
        partition_spec=record.spec,
        axis_types=tuple(_AXIS_TYPES.get(name, AxisType.Auto) for name in record.mesh.axis_types),
    )
