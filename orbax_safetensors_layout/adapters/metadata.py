"""Metadata of a checkpoint, read once from its headers and manifest, in terms of Orbax's APIs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import (
    Leaf,
    Manifest,
    NamedRecord,
    ShardingRecord,
    TensorEntry,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
    leaves as tree_leaves,
)
from orbax_safetensors_layout.mapping import Mapping as LeafMapping, TensorSpec
from orbax_safetensors_layout.plan import array_sources
from orbax_safetensors_layout.pytree import HostLeaf, decode_treedef, prng
from orbax_safetensors_layout.sharding import decode_sharding

from . import _orbax
from .item_load import check_remains

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax
_HOST_KINDS = ("numpy", "numpy_scalar")
_AXIS_TYPES = {name.lower(): kind for name, kind in AxisType.__members__.items()}


class HostArrayMetadata(ocp.metadata.ArrayMetadata):
    """Metadata of a leaf that was a numpy array, and is restored as such."""


class StoredArrayMetadata(NamedTuple):
    """One tensor of a checkpoint, as a leaf of its tree."""

    name: str
    shape: tuple[int, ...]  # of typed PRNG keys, theirs and not their data's
    dtype: Any
    sharding: ShardingRecord | None  # as recorded when it was saved
    on_host: bool  # whether it was a numpy array
    chunk_shape: tuple[int, ...]  # of the largest piece in which it is stored

    @property
    def placement(self) -> jax.sharding.Sharding | None:
        """The recorded sharding, where this program has the devices."""
        return None if self.sharding is None else decode_sharding(self.sharding)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The headers of a checkpoint, and its manifest.

    Attributes:
        modified_nsecs: When the last of its files was written, in nanoseconds since the epoch; None
            where an index lists no files.
        leaves: The leaves that a mapping makes of the tensors, if one was given.
    """

    tensors: Mapping[str, TensorEntry]
    strings: Mapping[str, str]  # the `__metadata__` of the files
    modified_nsecs: int | None
    manifest: Manifest | None
    leaves: Mapping[str, TensorSpec] | None

    @classmethod
    def read(cls, path: str | os.PathLike[str], mapping: LeafMapping | None) -> Self:
        """Reads all headers; refuses an item of which a part is gone."""
        check_remains(path)
        with Catalog.open(path) as catalog:
            leaves = None
            if mapping is not None:
                sources = array_sources(catalog, mapping).items()
                leaves = {name: TensorSpec(source.shape, source.dtype) for name, source in sources}
            manifest = catalog.manifest() if mapping is None else None
            tree = None if manifest is None else manifest.tree
            recorded = [] if tree is None else [*tree_leaves(tree)]
            names = [leaf.tensor for leaf in recorded if isinstance(leaf, TensorLeaf)]
            times = [int(1e9 * catalog.storage.modified_seconds(file)) for file in catalog.files]
            return cls(
                catalog.entries([*catalog.names, *names]),
                catalog.metadata(),
                max(times, default=None),
                catalog.manifest(),
                leaves,
            )

    @property
    def custom_metadata(self) -> Any:
        """The custom metadata that were saved; of others' checkpoints, the strings in the files."""
        if self.manifest is None:
            return dict(self.strings)
        if self.manifest.custom is not None:
            return self.manifest.custom
        return dict(self.manifest.metadata) or None

    def tree(
        self,
        array: Callable[[StoredArrayMetadata], Any],
        value: Callable[[str, bool | int | float | str], Any],
    ) -> Any:
        """The tree as it was saved, or a flat dict of the tensors of a checkpoint of others.

        Its leaves are what `array` and `value` return for tensors, and for numbers and strings.
        """
        if self.leaves is not None:
            return {
                name: array(
                    StoredArrayMetadata(name, spec.shape, spec.dtype, None, False, spec.shape)
                )
                for name, spec in self.leaves.items()
            }
        if self.manifest is None or self.manifest.tree is None:
            return {name: array(self._array(TensorLeaf(name))) for name in self.tensors}
        node = self.manifest.tree
        names = (name for name, _ in leaf_names(node))

        def describe(leaf: Leaf) -> Any:
            name = next(names)
            if isinstance(leaf, ValueLeaf):
                return value(name, leaf.value)
            return array(self._array(leaf))

        return decode_treedef(node, describe)

    def _array(self, leaf: TensorLeaf) -> StoredArrayMetadata:
        entry, manifest = self.tensors[leaf.tensor], self.manifest
        shape: tuple[int, ...] = entry.shape
        dtype: Any = entry.dtype.numpy
        if leaf.key_impl is not None:
            keys = prng.keys_of(shape, dtype, leaf.key_impl, file=entry.file, tensor=leaf.tensor)
            shape, dtype = keys.shape, keys.dtype
        record = chunk = None
        if manifest is not None and leaf.sharding is not None:
            record = manifest.shardings[leaf.sharding]
        if manifest is not None and manifest.pieces is not None:
            boxes = (stored.box for stored in manifest.pieces.boxes(leaf.tensor))
            chunk = max(boxes, key=lambda box: box.size).shape
        on_host = leaf.kind in _HOST_KINDS
        return StoredArrayMetadata(leaf.tensor, shape, dtype, record, on_host, chunk or entry.shape)


def describe_v0(directory: os.PathLike[str], checkpoint: CheckpointMetadata) -> Any:
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
            sharding=_sharding_v0(stored),
            dtype=stored.dtype,
            storage=ocp.metadata.StorageMetadata(chunk_shape=stored.chunk_shape),
        )

    def value(name: str, saved: bool | int | float | str) -> Any:
        if isinstance(saved, str):
            return ocp.metadata.StringMetadata(name=name, directory=directory)
        dtype = np.dtype(type(saved))
        return ocp.metadata.ScalarMetadata(name=name, directory=directory, dtype=dtype)

    tree = checkpoint.tree(array, value)
    return _orbax.tree_metadata(tree, custom_metadata=checkpoint.custom_metadata)


def _sharding_v0(stored: StoredArrayMetadata) -> Any:
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


def describe_v1(checkpoint: CheckpointMetadata) -> Any:
    """The tree of a checkpoint, which also serves as the tree to load.

    Arrays are `jax.ShapeDtypeStruct`s, with the sharding that they were saved with where this
    program has the devices; numpy arrays have a shape and a dtype alone; numbers and strings are
    their types. A checkpoint that others wrote is a flat dict from tensor name to
    `jax.ShapeDtypeStruct`.
    """

    def array(stored: StoredArrayMetadata) -> Any:
        if stored.on_host:
            return HostLeaf(stored.shape, stored.dtype)
        return _struct(stored.shape, stored.dtype, sharding=stored.placement)

    return checkpoint.tree(array, lambda _, value: type(value))
