"""Checkpoints that are converted or compared: trees of arrays, of which regions can be read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import MissingTensorError, SafetensorsLayoutError, listed
from orbax_safetensors_layout.format import (
    Manifest,
    TensorKind,
    TensorLeaf,
    ValueLeaf,
    leaves,
    storage_dtype,
)
from orbax_safetensors_layout.geometry import Box, row_blocks
from orbax_safetensors_layout.mapping import LeafExpr, Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions, require, storage_profile
from orbax_safetensors_layout.plan import (
    ArrayRegion,
    ArraySource,
    MappedSource,
    RegionReads,
    StoredSource,
    StoredTensors,
    array_sources,
)
from orbax_safetensors_layout.pytree import (
    ValueBox,
    decode_treedef,
    dotted_name,
    named_leaves,
)
from orbax_safetensors_layout.reading import ArrayReader, VerifyingReader, check_holdable
from orbax_safetensors_layout.storage import RangeReader

from .target import LeafRegion

CHUNKS_IN_BUDGET = 4  # two that are compared, or one converted, and as much to read them with


@dataclasses.dataclass(frozen=True, slots=True)
class SourceArray:
    """An array of a source, as a leaf of its tree; the shape of typed PRNG keys is their data's."""

    name: str  # dotted, in the tree that is converted
    stored: str  # in the source
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: TensorKind = "numpy"  # before it was saved
    key_impl: str | None = None  # the PRNG implementation of typed keys

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def rerooted(tree: Any, subtree: str | None = None) -> Any:
    """Return a source's tree, or the part of this dotted name; arrays are named after it."""
    require(isinstance(subtree, str | None), "subtree", "a dotted name", subtree)
    for key in subtree.split(".") if subtree else ():
        children = jax.tree_util.tree_flatten_with_path(tree, lambda x, tree=tree: x is not tree)
        named = {dotted_name(path): child for path, child in children[0] if path}
        if key not in named:
            raise MissingTensorError(
                "the tree has no such part",
                tensor=subtree,
                expected=f"one of {listed(map(repr, sorted(named)), 20)}",
                found=key,
            )
        tree = named[key]
        if isinstance(tree, ValueBox):
            tree = tree.value
        if jax.tree_util.all_leaves([tree]):
            tree = {key: tree}  # a tree is a container

    return renamed(tree, lambda names: names)


def renamed(tree: Any, names_of: Callable[[Sequence[str]], Sequence[str]]) -> Any:
    """Return a source's tree whose arrays have the names that `names_of` gives its leaves."""
    pairs, treedef = named_leaves(tree)
    names = names_of([name for name, _ in pairs])
    leaves = [
        dataclasses.replace(leaf, name=name or leaf.stored)
        if isinstance(leaf, SourceArray)
        else leaf
        for name, (_, leaf) in zip(names, pairs, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def arrays_of(tree: Any) -> dict[str, SourceArray]:
    """Return the arrays of a source's tree by name."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, SourceArray))
    return {array.name: array for array in leaves}


def values_of(tree: Any) -> dict[str, Any]:
    """Return the leaves of a source's tree that are not arrays, by name."""
    return {name: leaf for name, leaf in named_leaves(tree)[0] if not isinstance(leaf, SourceArray)}


class ReadableArrays(NamedTuple):
    """Arrays of a source, by name, of which any region can be read."""

    sources: Mapping[str, StoredSource]
    storage: RangeReader

    def read(self, regions: Sequence[LeafRegion], memory_budget_bytes: int) -> list[np.ndarray]:
        """Return the values of regions; reads hold up to `memory_budget_bytes` besides these."""
        return self._reader(memory_budget_bytes).read([*map(self._region, regions)])

    def bytes_to_read(self, regions: Sequence[LeafRegion]) -> int:
        """Return the bytes that it takes to read each region by itself."""
        total = 0
        for region in regions:
            reads = RegionReads([self._region(region)], region.nbytes)
            total += self._reader(region.nbytes).plan(reads).cost().read_bytes
        return total

    def _reader(self, memory_budget_bytes: int) -> ArrayReader:
        return ArrayReader(
            storage=self.storage,
            profile=storage_profile(self.storage.kind),
            memory_budget_bytes=memory_budget_bytes,
        )

    def _region(self, region: LeafRegion) -> ArrayRegion:
        leaf, box = region
        source: ArraySource
        if isinstance(leaf.made_of, str):
            source = self.sources[leaf.made_of]
        else:
            entries = {name: source.entry for name, source in self.sources.items()}
            source = MappedSource(LeafExpr.alone(leaf.made_of), StoredTensors(entries))
        return ArrayRegion.of_box(leaf.name, source, box, leaf.dtype)


class CheckpointReader(Protocol):
    """A checkpoint that is read."""

    path: str
    kind: str  # "hf", "sharded" or "orbax"
    tree: Any  # of `SourceArray`s, Python numbers and strings
    is_recorded: bool  # whether the tree is what was saved, not just the dict of its arrays
    metadata: Mapping[str, str]  # in its files
    custom: Any  # its custom metadata, a JSON value
    verifying: VerifyingReader | None  # what it reads with, if its files have checksums

    def identity(self) -> str:
        """A digest that distinguishes this checkpoint from others that were at the same path."""

    def readable(self, arrays: Sequence[SourceArray]) -> ReadableArrays | None:
        """Arrays of which regions can be read as stored; None where whole chunks are read."""

    def blocks(self, array: SourceArray, most_bytes: int) -> Iterator[Box]:
        """Boxes of an array that together read each byte once."""

    def read(self, blocks: Sequence[tuple[SourceArray, Box]]) -> list[np.ndarray]:
        """Reads some of these boxes, at once."""

    def chunk(self, array: SourceArray) -> tuple[int, ...] | None:
        """Shape of the smallest part that can be decoded; None where any elements can be read."""

    def close(self) -> None:
        """Closes all files."""


def chunk_bytes(reader: CheckpointReader, array: SourceArray) -> int:
    """Return the bytes that have to be decoded at once to read any element of an array."""
    chunk = reader.chunk(array)
    return 0 if chunk is None else math.prod(chunk) * array.dtype.itemsize


def check_chunks(
    reader: CheckpointReader, arrays: Iterable[SourceArray], memory_budget_bytes: int
) -> None:
    """Refuses chunks of which less than `CHUNKS_IN_BUDGET` fit into memory."""
    most = memory_budget_bytes // CHUNKS_IN_BUDGET
    sizes = {array.name: chunk_bytes(reader, array) for array in arrays}
    large = [name for name, size in sizes.items() if size > most]
    if large:
        needed = CHUNKS_IN_BUDGET * max(sizes.values())
        raise SafetensorsLayoutError(
            f"chunks are more than a quarter of the memory budget: {listed(map(repr, large))}",
            file=reader.path,
            tensor=large[0],
            expected=f"at most {most:,} bytes",
            found=f"{sizes[large[0]]:,} bytes",
            hint=f"Set memory_budget_bytes (--memory-budget-bytes) to {needed:,} or more.",
        )


class SafetensorsReader:
    """A safetensors checkpoint of either layout, or the arrays that `mapping` makes of one.

    With `is_flat` its tree is a flat dict by the names of the tensors, whatever was saved; of
    several names of a tensor, those that the mapping `named_by` takes. Without
    `options.verify` any bytes are read, to be compared; with it checksums are optional.
    """

    def __init__(
        self,
        path: str,
        options: ReadOptions,
        *,
        mapping: LeafMapping | None = None,
        is_flat: bool = False,
        named_by: LeafMapping | None = None,
    ) -> None:
        self._catalog = Catalog.open(path, retries=options.retries, cache=options.cache_folder)
        self.path, self.storage = self._catalog.path, self._catalog.storage
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._catalog.read_all_names()
            known = None if named_by is None else named_by.names_in(self._catalog)
            names = None if known is None else dict.fromkeys(known)
            self._sources = array_sources(self._catalog, mapping, names)
            self._open(options, mapping, is_flat)
            stack.pop_all()

    def _open(self, options: ReadOptions, mapping: LeafMapping | None, is_flat: bool) -> None:
        self.verifying = VerifyingReader.open(self.storage, self.path) if options.verify else None
        self._storage: RangeReader = self.verifying or self.storage
        self._reader = ArrayReader(
            storage=self._storage,
            profile=options.profile(self.storage.kind),
            memory_budget_bytes=options.memory_budget_bytes,
            check_values=options.verify,
        )
        manifest = None if mapping is not None else self._catalog.manifest()
        # What torch's DCP wrote in pieces has the names that Hugging Face's files have.
        self.kind: str = self._catalog.layout if self._catalog.doubt is None else "hf"
        self.is_recorded = manifest is not None and manifest.tree is not None
        self.metadata: Mapping[str, str] = self._catalog.metadata()
        self.custom = None if manifest is None else manifest.custom
        self.tree = self._tree(manifest, is_flat)

    def _tree(self, manifest: Manifest | None, is_flat: bool) -> Any:
        saved = None if manifest is None else manifest.tree
        if saved is not None and not is_flat:
            names = [leaf.tensor for leaf in leaves(saved) if isinstance(leaf, TensorLeaf)]
            self._catalog.entries(names)  # refuses what is not there
            tree = decode_treedef(
                saved,
                lambda leaf: leaf.value if isinstance(leaf, ValueLeaf) else self._array(leaf),
                ValueBox,
            )
            try:
                jax.tree.structure(tree)
            except ValueError as error:
                problem = "the recorded tree is not one that JAX can have"
                raise SafetensorsLayoutError(problem, file=self.path, found=error) from error
            return tree
        values = {} if manifest is None else manifest.values()
        saved_leaves = () if saved is None else leaves(saved)
        impls = {
            leaf.tensor: leaf.key_impl for leaf in saved_leaves if isinstance(leaf, TensorLeaf)
        }
        return values | {
            name: self._array(TensorLeaf(name, "numpy", key_impl=impls.get(name)))
            for name in self._sources
        }

    def _array(self, leaf: TensorLeaf) -> SourceArray:
        source = self._sources[leaf.tensor]
        check_holdable(source.shape, source.dtype, file=source.file, tensor=leaf.tensor)
        return SourceArray(
            leaf.tensor, leaf.tensor, source.shape, source.dtype, leaf.kind, leaf.key_impl
        )

    def identity(self) -> str:
        storage = self._catalog.storage
        entries = [s.entry for s in self._sources.values() if isinstance(s, StoredSource)]
        files = [(file, storage.identity(file)) for file in self._catalog.files]
        return hashlib.sha256("".join(map(repr, (entries, *files))).encode()).hexdigest()

    def readable(self, arrays: Sequence[SourceArray]) -> ReadableArrays:
        sources = {array.name: self._sources[array.stored] for array in arrays}
        return ReadableArrays(cast("dict[str, StoredSource]", sources), self._storage)

    def blocks(self, array: SourceArray, most_bytes: int) -> Iterator[Box]:
        group = storage_dtype(array.dtype, 0).group  # whole bytes, where a file packs elements
        return row_blocks(array.shape, 8 * array.dtype.itemsize, most_bytes, group)

    def read(self, blocks: Sequence[tuple[SourceArray, Box]]) -> list[np.ndarray]:
        regions = [
            ArrayRegion.of_box(array.name, self._sources[array.stored], box, array.dtype)
            for array, box in blocks
        ]
        return self._reader.read(regions)

    def chunk(self, array: SourceArray) -> None:
        return None

    def close(self) -> None:
        self._catalog.close()
