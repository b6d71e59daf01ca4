"""Two checkpoints, bit by bit, in blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.filling import Filling
from orbax_safetensors_layout.format.catalog import Catalog
from orbax_safetensors_layout.format.manifest import ValueLeaf, leaf_names
from orbax_safetensors_layout.geometry.box import Box
from orbax_safetensors_layout.mapping.rules import Mapping
from orbax_safetensors_layout.options import Progress, ReadOptions
from orbax_safetensors_layout.origins import Mapped, Origin, Plain, bind
from orbax_safetensors_layout.plan.leaves import LocalBoxes
from orbax_safetensors_layout.plan.reads import plan_reads
from orbax_safetensors_layout.transfer.gather import row_blocks
from orbax_safetensors_layout.transfer.read import read_leaves
from orbax_safetensors_layout.tree import Want
from orbax_safetensors_layout.units import MIB
from orbax_safetensors_layout.wants import Fidelity, WantedLeaf, planned_leaves

_BLOCK_BYTES = 32 * MIB
_BLOCKS_IN_BUDGET = 4  # one of either side, and as much to read it with
_GROUP = 8  # packed elements of a block fill whole bytes
_MOST_PLACES = 3


class Comparison(NamedTuple):
    """What a comparison has found.

    Attributes:
        differences: What differs, a line a tensor.
        tensors: How many were compared.
        nbytes: Their bytes.
    """

    differences: tuple[str, ...]
    tensors: int
    nbytes: int


class Block(NamedTuple):
    """Rows of a tensor."""

    name: str
    box: Box


def compare(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str],
    *,
    mapping: Mapping | None = None,
    options: ReadOptions,
    progress: Callable[[Progress], None] | None = None,
) -> Comparison:
    """Compares two checkpoints bit by bit; their files may be cut in any way.

    Args:
        path: A checkpoint.
        against: Another.
        mapping: What the tensors of `path` are made of in `against`.
        options: How to read.
        progress: Told after each block.

    Raises:
        MappingError: The mapping does not fit.
        FormatError: A file is malformed.
        StorageError: A read failed.
    """
    with Catalog.open(path) as one, Catalog.open(against) as other:
        here = Values(one, None, options)
        there = Values(other, mapping, options)
        differences = [*_names(here, there), *(_values(one, other) if mapping is None else ())]
        common = [name for name in here.origins if name in there.origins]
        alike = []
        for name in common:
            mine, theirs = here.kind(name), there.kind(name)
            if mine == theirs:
                alike.append(name)
            else:
                differences.append(f"'{name}' is {mine}, in the other {theirs}")
        total = sum(here.nbytes(name) for name in alike)
        done = 0
        places: dict[str, list[str]] = {}
        for blocks in here.batches(alike):
            pairs = zip(blocks, here.read(blocks), there.read(blocks), strict=True)
            for block, ours, others in pairs:
                done += ours.nbytes
                if not _same(ours, others):
                    places.setdefault(block.name, []).append(_place(block.box, ours, others))
            if progress is not None:
                progress(Progress(min(done, total), total, blocks[-1].name))
        for name, found in places.items():
            more = (
                f" and {len(found) - _MOST_PLACES} more blocks" if len(found) > _MOST_PLACES else ""
            )
            differences.append(f"'{name}' differs: {'; '.join(found[:_MOST_PLACES])}{more}")
    return Comparison(tuple(differences), len(alike), total)


class Values:
    """The tensors of a checkpoint, or the leaves that a mapping makes of them, by blocks.

    Args:
        catalog: The checkpoint.
        mapping: The mapping; None for the tensors as they stand.
        options: How to read.
    """

    def __init__(self, catalog: Catalog, mapping: Mapping | None, options: ReadOptions) -> None:
        self._catalog = catalog
        self._options = options
        self.origins: dict[str, Origin] = {}
        if mapping is None:
            self.origins.update(
                {name: Plain(entry) for name, entry in catalog.all_entries().items()}
            )
        else:
            bound, entries = bind(catalog, mapping, None)
            self.origins.update(
                {name: Mapped(made, entries) for name, made in bound.expressions.items()}
            )

    def kind(self, name: str) -> str:
        """Dtype and shape of a tensor."""
        origin = self.origins[name]
        return f"{origin.dtype.name} {list(origin.shape)}"

    def nbytes(self, name: str) -> int:
        """Bytes of its elements in memory."""
        origin = self.origins[name]
        return Box.whole(origin.shape).size * origin.dtype.itemsize

    def batches(self, names: Sequence[str]) -> Iterator[list[Block]]:
        """Blocks of some tensors, as many at once as the memory budget allows."""
        most = max(1, self._options.memory_budget_bytes // _BLOCKS_IN_BUDGET)
        batch: list[Block] = []
        held = 0
        for name in names:
            origin = self.origins[name]
            bits = 8 * origin.dtype.itemsize
            for box in row_blocks(origin.shape, bits, min(most, _BLOCK_BYTES), _GROUP):
                size = box.size * origin.dtype.itemsize
                if batch and held + size > min(most, 8 * _BLOCK_BYTES):
                    yield batch
                    batch, held = [], 0
                batch.append(Block(name, box))
                held += size
        if batch:
            yield batch

    def read(self, blocks: Sequence[Block]) -> list[np.ndarray]:
        """The values of some blocks, in their order."""
        leaves = []
        for number, (name, box) in enumerate(blocks):
            origin = self.origins[name]
            local = LocalBoxes((box,), (False,))
            want = Want(name, None, None, origin.dtype, None, None)
            leaves.append(
                WantedLeaf(number, want, name, origin, origin.dtype, Fidelity.ROUND, local)
            )
        values: dict[int, np.ndarray] = {}

        def take(leaf: WantedLeaf, _: Sequence[int], parts: Sequence[np.ndarray]) -> None:
            (values[leaf.number],) = parts

        filling = Filling(
            planned_leaves(self._catalog, [(leaf, leaf.local) for leaf in leaves]), take
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


def _names(here: Values, there: Values) -> Iterator[str]:
    for name in sorted(set(there.origins) - set(here.origins)):
        yield f"'{name}' is in the other checkpoint alone"
    for name in sorted(set(here.origins) - set(there.origins)):
        yield f"'{name}' is not in the other checkpoint"


def _values(one: Catalog, other: Catalog) -> Iterator[str]:
    """Differences of what was saved beside the tensors, where both have that."""
    manifests = [one.manifest(), other.manifest()]
    trees = [manifest.tree for manifest in manifests if manifest is not None and manifest.tree]
    if len(trees) < 2:
        return
    mine, theirs = (
        {name: repr(leaf.value) for name, leaf in leaf_names(tree) if isinstance(leaf, ValueLeaf)}
        for tree in trees
    )
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield f"the value '{name}' is {mine.get(name)}, in the other {theirs.get(name)}"


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _same(mine: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.array_equal(_bytes(mine), _bytes(theirs)))


def _place(box: Box, mine: np.ndarray, theirs: np.ndarray) -> str:
    """How many elements of a block differ, and the first."""
    shape = (mine.size, mine.dtype.itemsize)
    differs = (_bytes(mine).reshape(shape) != _bytes(theirs).reshape(shape)).any(1)
    first = np.unravel_index(int(differs.argmax()), mine.shape)
    index = [int(place) + start for place, start in zip(first, box.start, strict=True)]
    values = mine.reshape(-1)[differs.argmax()], theirs.reshape(-1)[differs.argmax()]
    return f"{int(differs.sum()):,} elements, the first at {index}: {values[0]} and {values[1]}"
