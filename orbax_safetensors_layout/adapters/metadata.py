"""Metadata of a checkpoint, read once from its headers and manifest, in terms of Orbax's APIs."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, Sharding, SingleDeviceSharding

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import (
    Container,
    Manifest,
    NamedRecord,
    ShardingRecord,
    TensorEntry,
    TensorLeaf,
    leaf_names,
)
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.plan import array_sources
from orbax_safetensors_layout.pytree import HostLeaf, abstract_array, decode_treedef, prng
from orbax_safetensors_layout.sharding import decode_sharding

from . import _orbax
from .item import check_remains


class HostArrayMetadata(ocp.metadata.ArrayMetadata):
    """Metadata of a leaf that was a numpy array, and is restored as such."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredArray:
    """One array of a checkpoint, as a leaf of its tree."""

    shape: tuple[int, ...]  # of typed PRNG keys, theirs and not their data's
    dtype: Any
    chunk_shape: tuple[int, ...]  # of the largest piece in which it is stored
    record: ShardingRecord | None = None  # of its sharding when it was saved
    on_host: bool = False  # whether it was a numpy array

    @property
    def sharding(self) -> Sharding | None:
        """The recorded sharding, where this program has the devices."""
        return None if self.record is None else decode_sharding(self.record)


# Given the name, and the array, or the number or string of a tree's leaf.
_Describe = Callable[[str, StoredArray | bool | int | float | str], Any]


class CheckpointMetadata(NamedTuple):
    """The headers of a checkpoint, and its manifest, as one of Orbax's APIs describes them."""

    tree: Any  # a flat dict where a mapping makes the leaves, or there is no manifest
    custom: Any  # what was saved, else the strings in the files
    modified_nsecs: int | None  # of the newest file; None where an index lists no files

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], mapping: LeafMapping | None, describe: _Describe
    ) -> Self:
        """Reads all headers, and describes each leaf; refuses an item of which a part is gone."""
        check_remains(path)
        with Catalog.open(path) as catalog:
            times = [int(1e9 * catalog.storage.modified_seconds(file)) for file in catalog.files]
            manifest = catalog.manifest()
            custom: Any = catalog.metadata() if manifest is None else manifest.custom
            if manifest is not None and custom is None:
                custom = dict(manifest.metadata) or None
            if mapping is None:
                tree = _saved_tree(catalog, manifest, describe)
            else:
                values = {} if manifest is None else manifest.values()
                leaves = mapping.passed(values) | {
                    name: StoredArray(source.shape, source.dtype, source.shape)
                    for name, source in array_sources(catalog, mapping).items()
                }
                tree = {name: describe(name, leaf) for name, leaf in leaves.items()}
            return cls(tree, custom, max(times, default=None))


def _saved_tree(catalog: Catalog, manifest: Manifest | None, describe: _Describe) -> Any:
    node = None if manifest is None else manifest.tree
    if node is None:
        names = tuple(catalog.names)
        node = Container("dict", tuple(map(TensorLeaf, names)), names)
    leaves = [*leaf_names(node)]
    tensors = [leaf.tensor for _, leaf in leaves if isinstance(leaf, TensorLeaf)]
    entries = catalog.entries([*catalog.names, *tensors])
    pieces = catalog.pieces(tensors)
    described = (
        describe(
            leaf.tensor,
            _stored_array(leaf, entries[leaf.tensor], pieces.get(leaf.tensor, ()), manifest),
        )
        if isinstance(leaf, TensorLeaf)
        else describe(name, leaf.value)
        for name, leaf in leaves
    )
    return decode_treedef(node, lambda _: next(described))


def _stored_array(
    leaf: TensorLeaf, entry: TensorEntry, pieces: Sequence[Box], manifest: Manifest | None
) -> StoredArray:
    shape: tuple[int, ...] = entry.shape
    dtype: Any = entry.dtype.numpy
    if leaf.key_impl is not None:
        keys = prng.keys_of(shape, dtype, leaf.key_impl, file=entry.file, tensor=leaf.tensor)
        shape, dtype = keys.shape, keys.dtype
    record = None
    if manifest is not None and leaf.sharding is not None:
        record = manifest.shardings[leaf.sharding]
    chunk_shape = max((box.shape for box in pieces), key=math.prod, default=entry.shape)
    return StoredArray(shape, dtype, chunk_shape, record, leaf.kind in ("numpy", "numpy_scalar"))


def metadata_v0(directory: os.PathLike[str], mapping: LeafMapping | None) -> Any:
    """A `TreeMetadata`, which also serves as the tree to restore."""
    describe = functools.partial(_describe_v0, directory)
    checkpoint = CheckpointMetadata.read(directory, mapping, describe)
    return _orbax.tree_metadata(checkpoint.tree, custom_metadata=checkpoint.custom)


def _describe_v0(directory: os.PathLike[str], name: str, leaf: Any) -> Any:
    if isinstance(leaf, str):
        return ocp.metadata.StringMetadata(name=name, directory=directory)
    if not isinstance(leaf, StoredArray):
        dtype = np.dtype(type(leaf))
        return ocp.metadata.ScalarMetadata(name=name, directory=directory, dtype=dtype)
    kind = HostArrayMetadata if leaf.on_host else ocp.metadata.ArrayMetadata
    return kind(
        name=name,
        directory=directory,
        shape=leaf.shape,
        sharding=_sharding_v0(leaf),
        dtype=leaf.dtype,
        storage=ocp.metadata.StorageMetadata(chunk_shape=leaf.chunk_shape),
    )


def _sharding_v0(stored: StoredArray) -> Any:
    """As Orbax records shardings; of one over devices that are not here, without devices."""
    sharding, record = stored.sharding, stored.record
    if isinstance(sharding, NamedSharding):
        return ocp.metadata.NamedShardingMetadata.from_jax_sharding(sharding)
    if isinstance(sharding, SingleDeviceSharding):
        return ocp.metadata.SingleDeviceShardingMetadata.from_jax_sharding(sharding)
    if not isinstance(record, NamedRecord):
        return None
    axis_types = (name.capitalize() for name in record.mesh.axis_types)
    return ocp.metadata.NamedShardingMetadata(
        shape=np.array(record.mesh.sizes),
        axis_names=list(record.mesh.axis_names),
        partition_spec=record.spec,
        axis_types=tuple(AxisType.__members__.get(name, AxisType.Auto) for name in axis_types),
    )


def metadata_v1(path: str | os.PathLike[str], mapping: LeafMapping | None) -> CheckpointMetadata:
    """Metadata whose tree also serves as the tree to load; numbers and strings are their types."""
    return CheckpointMetadata.read(path, mapping, _describe_v1)


def _describe_v1(_: str, leaf: Any) -> Any:
    if not isinstance(leaf, StoredArray):
        return type(leaf)
    if leaf.on_host:
        return HostLeaf(leaf.shape, leaf.dtype)
    return abstract_array(leaf.shape, leaf.dtype, sharding=leaf.sharding)
