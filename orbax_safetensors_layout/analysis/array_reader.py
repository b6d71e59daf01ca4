"""The two sides of a comparison: what holds arrays by name, of which boxes can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from orbax_safetensors_layout.adapters import open_reader
from orbax_safetensors_layout.catalog import Catalog, CheckpointRef
from orbax_safetensors_layout.conversion import (
    CheckpointReader,
    SourceArray,
    arrays_of,
    rerooted,
    values_of,
)
from orbax_safetensors_layout.errors import MappingError, StorageError
from orbax_safetensors_layout.format import ValueLeaf, leaf_names
from orbax_safetensors_layout.geometry import Box, chunk_parts, row_blocks
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.mapping import TensorSpec
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.plan import ArraySource, MappedSource, StoredSource, bind, plan_reads
from orbax_safetensors_layout.pytree import AbstractLeaf
from orbax_safetensors_layout.reading import (
    Fidelity,
    Materializer,
    ResolvedLeaf,
    plan_leaves,
    read_leaves,
)
from orbax_safetensors_layout.sharding import AddressableShards

BLOCKS_IN_BUDGET = 4
"""Blocks of which a memory budget has room: one of either side, and as much to read it with."""

_GROUP = 8  # packed elements of a block fill whole bytes


class ArrayBox(NamedTuple):
    """A box of an array, by the array's name."""

    name: str
    box: Box


class ArrayReader(Protocol):
    """A checkpoint that is compared with another.

    Attributes:
        path: Where it is.
        arrays: Its arrays by name.
        values: Texts of what it holds besides, by name; None where it is not said.
    """

    path: str
    arrays: Mapping[str, TensorSpec]
    values: Mapping[str, str] | None

    def chunk_bytes(self, name: str) -> int:
        """What has to be in memory at once to read any of an array, besides what is asked for."""
        ...

    def blocks(self, name: str, most_bytes: int) -> Iterator[Box]:
        """Boxes of an array that together read each byte once."""
        ...

    def read(self, blocks: Sequence[ArrayBox]) -> list[np.ndarray]:
        """The values of some boxes, in their order."""
        ...


class CatalogReader:
    """The tensors of a safetensors checkpoint, or the leaves that a mapping makes of them.

    Args:
        catalog: The checkpoint.
        mapping: The mapping; None for the tensors as they stand in the files.
        options: How to read.

    Raises:
        MappingError: The mapping does not fit.
    """

    def __init__(self, catalog: Catalog, mapping: LeafMapping | None, options: ReadOptions) -> None:
        self._catalog = catalog
        self._options = options
        self._origins: dict[str, ArraySource] = {}
        self.path = catalog.path
        self.values: Mapping[str, str] | None = None if mapping is not None else self._recorded()
        if mapping is None:
            self._origins.update(
                {name: StoredSource(entry) for name, entry in catalog.all_entries().items()}
            )
        else:
            bound, entries = bind(catalog, mapping, None)
            self._origins.update(
                {name: MappedSource(made, entries) for name, made in bound.expressions.items()}
            )
        self.arrays: Mapping[str, TensorSpec] = {
            name: TensorSpec(origin.shape, origin.dtype) for name, origin in self._origins.items()
        }

    def _recorded(self) -> Mapping[str, str] | None:
        manifest = self._catalog.manifest()
        if manifest is None or manifest.tree is None:
            return None
        return {
            name: repr(leaf.value)
            for name, leaf in leaf_names(manifest.tree)
            if isinstance(leaf, ValueLeaf)
        }

    def chunk_bytes(self, name: str) -> int:
        """Nothing."""
        return 0

    def blocks(self, name: str, most_bytes: int) -> Iterator[Box]:
        """Rows."""
        shape, dtype = self.arrays[name]
        return row_blocks(shape, 8 * dtype.itemsize, most_bytes, _GROUP)

    def read(self, blocks: Sequence[ArrayBox]) -> list[np.ndarray]:
        """The values of some boxes, in their order."""
        leaves = []
        for number, (name, box) in enumerate(blocks):
            origin = self._origins[name]
            local = AddressableShards((box,), (False,))
            want = AbstractLeaf(name, None, None, origin.dtype, None, None)
            leaves.append(
                ResolvedLeaf(number, want, name, origin, origin.dtype, Fidelity.ROUND, local)
            )
        values: dict[int, np.ndarray] = {}

        def take(leaf: ResolvedLeaf, _: Sequence[int], parts: Sequence[np.ndarray]) -> None:
            (values[leaf.number],) = parts

        filling = Materializer(
            plan_leaves(
                self._catalog,
                [(leaf, leaf.local) for leaf in leaves],
                self._options.memory_budget_bytes,
            ),
            take,
        )
        reads = plan_reads(
            filling.reads,
            profile=self._options.profile(self._catalog.storage.kind),
            memory_budget_bytes=self._options.memory_budget_bytes,
            adopt=True,
        )
        filling.begin()
        read_leaves(reads, self._catalog.storage, deliver=filling.deliver, convert=filling.convert)
        return [values[number] for number in range(len(blocks))]


class TreeReader:
    """The tree of a checkpoint of either kind, as a conversion takes it.

    Args:
        source: The checkpoint.
        options: How much memory to take.
        subtree: Dotted name of a part of it; None for all.

    Raises:
        MissingTensorError: There is no such part.
    """

    def __init__(
        self, source: CheckpointReader, options: ReadOptions, subtree: str | None = None
    ) -> None:
        tree = rerooted(source.tree, subtree)
        self._source = source
        self._most_bytes = options.memory_budget_bytes // BLOCKS_IN_BUDGET
        self._arrays = arrays_of(tree)
        self.path = source.path
        self.arrays: Mapping[str, TensorSpec] = {
            name: TensorSpec(array.shape, array.dtype) for name, array in self._arrays.items()
        }
        self.values: Mapping[str, str] | None = None
        if source.is_recorded:
            self.values = {name: repr(value) for name, value in values_of(tree).items()}

    def chunk_bytes(self, name: str) -> int:
        """A chunk, where whole chunks are decoded."""
        return self._source.largest_chunk_bytes(self._arrays[name])

    def blocks(self, name: str, most_bytes: int) -> Iterator[Box]:
        """As the source reads best."""
        return self._source.blocks(self._arrays[name], most_bytes)

    def read(self, blocks: Sequence[ArrayBox]) -> list[np.ndarray]:
        """The values of some boxes, in their order; of chunks those that there is room for."""
        wanted = [(self._arrays[name], box) for name, box in blocks]
        if sum(self._decoded_bytes(array, box) for array, box in wanted) <= self._most_bytes:
            return self._source.read(wanted)
        return [self._read_in_parts(array, box) for array, box in wanted]

    def _decoded_bytes(self, array: SourceArray, box: Box) -> int:
        """Bytes of the chunks that a box overlaps."""
        chunk = self._source.chunk(array)
        if chunk is None:
            return 0
        return len([*chunk_parts(box, chunk)]) * self._source.largest_chunk_bytes(array)

    def _read_in_parts(self, array: SourceArray, box: Box) -> np.ndarray:
        chunk = self._source.chunk(array)
        assert chunk is not None
        parts = [*chunk_parts(box, chunk)]
        room = max(1, self._most_bytes // max(1, self._source.largest_chunk_bytes(array)))
        values = np.empty(box.shape, array.dtype)
        for first in range(0, len(parts), room):
            some = parts[first : first + room]
            for part, found in zip(
                some, self._source.read([(array, part) for part in some]), strict=True
            ):
                values[part.within(box).slices] = found
        return values


@contextlib.contextmanager
def opened(
    location: CheckpointRef, options: ReadOptions, tell: Callable[[StorageError], None]
) -> Iterator[TreeReader]:
    """Opens the tree of a checkpoint that Orbax saved.

    Args:
        location: The checkpoint.
        options: How to read.
        tell: Told of arrays that can not be opened, which are then left out.
    """
    source = open_reader(location, options.memory_budget_bytes, tell)
    with contextlib.closing(source):
        yield TreeReader(source, options)


@contextlib.contextmanager
def both_opened(
    one: CheckpointRef,
    other: CheckpointRef,
    options: ReadOptions,
    *,
    mapping: LeafMapping | None,
    subtree: str | None,
) -> Iterator[tuple[ArrayReader, ArrayReader]]:
    """Opens two checkpoints to be compared: as files, or as trees where one is more than files.

    Args:
        one: A checkpoint.
        other: Another.
        options: How to read.
        mapping: What the arrays of `one` are made of in `other`.
        subtree: Dotted name of the part of the tree of `one` that counts.

    Raises:
        MappingError: The mapping does not fit, or `other` is what Orbax saved.
        MissingTensorError: There is no such part.
    """
    trees = one.is_orbax or other.is_orbax or subtree is not None
    if mapping is not None and other.is_orbax:
        raise MappingError(
            "a mapping takes the tensors of a safetensors checkpoint",
            file=other.path,
            found="a checkpoint of Orbax",
            hint="Exchange the two: PATH is the model, and --against what it is made of.",
        )
    with contextlib.ExitStack() as stack:

        def side(
            location: CheckpointRef, mapping: LeafMapping | None, subtree: str | None
        ) -> ArrayReader:
            if trees and mapping is None:
                source = open_reader(location, options.memory_budget_bytes)
                return TreeReader(stack.enter_context(contextlib.closing(source)), options, subtree)
            catalog = stack.enter_context(Catalog.open(location.path, retries=options.retries))
            return CatalogReader(catalog, mapping, options)

        yield side(one, None, subtree), side(other, mapping, None)
