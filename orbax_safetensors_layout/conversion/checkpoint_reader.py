"""What is converted: a tree of arrays, of which regions can be read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import MissingTensorError
from orbax_safetensors_layout.format import Manifest, TensorEntry, TensorKind, TensorLeaf, ValueLeaf
from orbax_safetensors_layout.geometry import Box, row_blocks
from orbax_safetensors_layout.pytree import decode_treedef, dotted_name

from .readable_arrays import (
    LeafRegion,
    ReadableArrays,
    TargetLeaf,
    read_regions,
)


@dataclasses.dataclass(frozen=True, slots=True)
class SourceArray:
    """An array of a source, as a leaf of its tree.

    Attributes:
        name: Its dotted name in the tree that is converted.
        stored: Its name in the source.
        shape: Its shape; of typed PRNG keys, their data's.
        dtype: Dtype of its values.
        kind: What it was before it was saved.
        key_impl: Name of the implementation of typed PRNG keys.
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: TensorKind = "numpy"
    key_impl: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def leaf(self) -> TargetLeaf:
        """The array as it is, as a leaf of a target."""
        return TargetLeaf(self.name, self.shape, self.dtype, self.name)


def rerooted(tree: Any, subtree: str | None) -> Any:
    """A tree, or a part of it, whose arrays are called by their dotted names in it.

    Args:
        tree: A source's tree.
        subtree: Dotted name of the part; None for all.

    Raises:
        MissingTensorError: There is no such part.
    """
    for key in subtree.split(".") if subtree else ():
        below = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda x, tree=tree: x is not tree
        )
        named = {dotted_name(path): child for path, child in below[0] if path}
        if key not in named:
            raise MissingTensorError(
                "the tree has no such part",
                tensor=subtree,
                expected=f"one of {sorted(named)[:20]}",
                found=key,
            )
        tree = named[key]
        if jax.tree_util.all_leaves([tree]):
            tree = {key: tree}  # a tree is a container

    def renamed(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, SourceArray):
            return leaf
        return dataclasses.replace(leaf, name=dotted_name(path) or leaf.stored)

    return jax.tree_util.tree_map_with_path(renamed, tree)


def arrays_of(tree: Any) -> dict[str, SourceArray]:
    """The arrays of a source's tree by name."""
    found = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, SourceArray))
    return {array.name: array for array in found}


def values_of(tree: Any) -> dict[str, Any]:
    """What a source's tree holds besides arrays, by name."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {dotted_name(path): leaf for path, leaf in paths if not isinstance(leaf, SourceArray)}


class CheckpointReader(Protocol):
    """A checkpoint that is read.

    Attributes:
        path: Where it is.
        kind: `"hf"`, `"sharded"` or `"orbax"`.
        tree: Its pytree: `SourceArray`s, Python numbers and strings.
        is_recorded: Whether the tree is what was saved, not just the dict of its arrays.
        metadata: Strings that stand in its files.
        custom: Its custom metadata, a JSON value.
    """

    path: str
    kind: str
    tree: Any
    is_recorded: bool
    metadata: Mapping[str, str]
    custom: Any

    def identity(self) -> str:
        """A digest of all that tells this checkpoint from another that stood at the same path."""
        ...

    def lease(self, arrays: Sequence[SourceArray]) -> ReadableArrays | None:
        """Arrays of which regions can be read as they stand; None where whole chunks are read."""
        ...

    def blocks(self, array: SourceArray, most_bytes: int) -> Iterator[Box]:
        """Boxes of an array that together read each byte once."""
        ...

    def read(self, wanted: Sequence[tuple[SourceArray, Box]]) -> list[np.ndarray]:
        """Some of these boxes, at once."""
        ...

    def chunk(self, array: SourceArray) -> tuple[int, ...] | None:
        """Shape of what is decoded at once; None where any elements can be read."""
        ...

    def largest_chunk_bytes(self, array: SourceArray) -> int:
        """What has to be in memory at once to read any of an array."""
        ...

    def close(self) -> None:
        """Releases what is open."""
        ...


class SafetensorsReader:
    """A safetensors checkpoint of either layout.

    Args:
        path: A folder or a file.
        memory_budget_bytes: Host bytes that a read may hold besides its values.

    Raises:
        CheckpointNotFoundError: Nothing stands at `path`.
        FormatError: A file is malformed.
    """

    def __init__(self, path: str, memory_budget_bytes: int) -> None:
        self._catalog = Catalog.open(path)
        self._budget = memory_budget_bytes
        self.path = self._catalog.path
        self._entries: Mapping[str, TensorEntry] = self._catalog.all_entries()
        manifest = self._catalog.manifest()
        self.kind: str = self._catalog.layout
        self.is_recorded = manifest is not None and manifest.tree is not None
        self.metadata: Mapping[str, str] = self._catalog.metadata()
        self.custom = None if manifest is None else manifest.custom
        self.tree = self._tree(manifest)

    def _tree(self, manifest: Manifest | None) -> Any:
        if manifest is None or manifest.tree is None:
            return {name: self._array(TensorLeaf(name, "numpy")) for name in self._entries}
        return decode_treedef(
            manifest.tree,
            lambda leaf: leaf.value if isinstance(leaf, ValueLeaf) else self._array(leaf),
        )

    def _array(self, leaf: TensorLeaf) -> SourceArray:
        entry = self._entries[leaf.tensor]
        return SourceArray(
            leaf.tensor, leaf.tensor, entry.shape, entry.dtype.numpy, leaf.kind, leaf.key_impl
        )

    def identity(self) -> str:
        """Of all files their names, sizes and times, and of all headers what they say."""
        storage = self._catalog.storage
        digest = hashlib.sha256(repr([*self._entries.values()]).encode())
        for file in self._catalog.files:
            digest.update(repr((file, storage.size(file), storage.modified_seconds(file))).encode())
        return digest.hexdigest()

    def lease(self, arrays: Sequence[SourceArray]) -> ReadableArrays:
        """The files themselves."""
        entries = {array.name: self._entries[array.stored] for array in arrays}
        pieces = self._catalog if self._catalog.layout == "sharded" else None
        return ReadableArrays(entries, self._catalog.storage, pieces)

    def blocks(self, array: SourceArray, most_bytes: int) -> Iterator[Box]:
        """Rows, which stand in the file one after the other."""
        packed = self._entries[array.stored].dtype.packed
        yield from row_blocks(array.shape, 8 * array.dtype.itemsize, most_bytes, 8 if packed else 1)

    def read(self, wanted: Sequence[tuple[SourceArray, Box]]) -> list[np.ndarray]:
        """Some of the blocks."""
        lease = self.lease([array for array, _ in wanted])
        regions = [LeafRegion(array.leaf, box) for array, box in wanted]
        return read_regions(lease, regions, memory_budget_bytes=self._budget)

    def chunk(self, array: SourceArray) -> None:
        """Any elements can be read."""

    def largest_chunk_bytes(self, array: SourceArray) -> int:
        """Nothing but what is asked for."""
        return 0

    def close(self) -> None:
        """Closes the files."""
        self._catalog.close()
