"""What a checkpoint holds, read once from its headers and manifest for Orbax's metadata calls."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import (
    Leaf,
    Manifest,
    ShardingRecord,
    TensorEntry,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
)
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.mapping import TensorSpec
from orbax_safetensors_layout.plan import array_sources
from orbax_safetensors_layout.pytree import decode_treedef, prng
from orbax_safetensors_layout.sharding import decode_sharding

from .remains import check_remains

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax
_HOST_KINDS = ("numpy", "numpy_scalar")


class StoredArrayMetadata(NamedTuple):
    """One tensor of a checkpoint, as a leaf of its tree.

    Attributes:
        name: Its name.
        shape: Its shape; of typed PRNG keys, theirs and not their data's.
        dtype: Its dtype.
        sharding: How it was sharded when it was saved, if that is recorded.
        on_host: Whether it was a numpy array.
        chunk_shape: Shape of the largest piece in which it is stored.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: ShardingRecord | None
    on_host: bool
    chunk_shape: tuple[int, ...]

    @property
    def placement(self) -> jax.sharding.Sharding | None:
        """The recorded sharding, where this program has the devices."""
        return None if self.sharding is None else decode_sharding(self.sharding)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """The headers of a checkpoint, and its manifest.

    Attributes:
        tensors: Every tensor by its name.
        strings: The `__metadata__` strings of the files.
        modified_nsecs: When the last of its files was written, in nanoseconds since the epoch; None
            where an index lists no files.
        manifest: What was recorded beside the tensors; None for a checkpoint that others wrote.
        leaves: The leaves that a mapping makes of the tensors, if one was given.
    """

    tensors: Mapping[str, TensorEntry]
    strings: Mapping[str, str]
    modified_nsecs: int | None
    manifest: Manifest | None
    leaves: Mapping[str, TensorSpec] | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str], mapping: LeafMapping | None = None) -> Self:
        """Reads all headers.

        Args:
            path: The checkpoint.
            mapping: Tells of the leaves that it makes, in place of the tensors.

        Raises:
            MappingError: The mapping does not fit.
            CheckpointNotFoundError: There is no safetensors checkpoint at `path`.
            FormatError: A header, the index or the manifest is malformed.
        """
        check_remains(path)
        with Catalog.open(path) as catalog:
            written = [int(1e9 * catalog.storage.modified_seconds(file)) for file in catalog.files]
            return cls(
                catalog.all_entries(),
                catalog.metadata(),
                max(written, default=None),
                catalog.manifest(),
                None
                if mapping is None
                else {
                    name: TensorSpec(source.shape, source.dtype)
                    for name, source in array_sources(catalog, mapping).items()
                },
            )

    @property
    def custom_metadata(self) -> Any:
        """What was saved as such; of a checkpoint that others wrote, the strings in its files."""
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

        Args:
            array: Describes a tensor.
            value: Describes a number or string with this name.
        """
        if self.leaves is not None:
            return {
                name: array(
                    StoredArrayMetadata(name, fact.shape, fact.dtype, None, False, fact.shape)
                )
                for name, fact in self.leaves.items()
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
            wrap = functools.partial(prng.wrap, name=leaf.key_impl)
            keys = jax.eval_shape(wrap, _struct(shape, dtype))
            shape, dtype = keys.shape, keys.dtype
        record = chunk = None
        if manifest is not None and leaf.sharding is not None:
            record = manifest.shardings[leaf.sharding]
        if manifest is not None and manifest.pieces is not None:
            boxes = (stored.box for stored in manifest.pieces.boxes(leaf.tensor))
            chunk = max(boxes, key=lambda box: box.size).shape
        on_host = leaf.kind in _HOST_KINDS
        return StoredArrayMetadata(leaf.tensor, shape, dtype, record, on_host, chunk or entry.shape)
