"""Regions of arrays, plain, mapped or in pieces, and the reads of tensors that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import explained
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import Subject
from orbax_safetensors_layout.options import KIB, MIB
from orbax_safetensors_layout.sharding import AddressableShards

from .array_source import ArraySource, LeafPlan, StoredSource
from .leaf_reads import ComposedArray, LeafRead
from .stored_tensors import LocatedPieces

_BLOCKS_IN_BUDGET = 4  # of all boxes of a region: some are read while others are computed
_MOST_BLOCK_BYTES = 8 * MIB
_LEAST_BLOCK_BYTES = 4 * KIB


class ArrayRegion(NamedTuple):
    """Boxes of one array that are read."""

    name: str
    source: ArraySource
    local: AddressableShards  # the boxes
    dtype: np.dtype  # the dtype that the values will have
    is_exact: bool = False  # whether a cast must keep every value

    @classmethod
    def of_box(cls, name: str, source: ArraySource, box: Box, dtype: np.dtype) -> ArrayRegion:
        return cls(name, source, AddressableShards.private((box,)), dtype)

    @property
    def subject(self) -> Subject:
        """The array that is cast, for errors."""
        return Subject(self.name, self.source.file, self.source.dtype)

    @property
    def values_key(self) -> object:
        """Equal for arrays with the same values, as tied leaves; None where there are no others."""
        if isinstance(self.source, StoredSource):
            return None
        return id(self.source.leaf.identity), self.dtype, self.is_exact


class ReadPurpose(NamedTuple):
    """The purpose of a read: a region itself, or one input of a block that is composed."""

    region: int
    block: int | None = None  # number of the block, if it is an input
    number: int = 0  # number of the input


class RegionReads:
    """The reads of tensors that some regions are made of."""

    def __init__(self, regions: Sequence[ArrayRegion], memory_budget_bytes: int) -> None:
        self.regions = regions
        self.plans = _plan_regions(regions, memory_budget_bytes)  # for each how it is read
        self.read_numbers: list[int] = []  # numbers of regions that are read
        self._equal: dict[
            int, list[int]
        ] = {}  # of more than one with the same values, by the first
        first_of: dict[object, int] = {}
        for number, (region, plan) in enumerate(zip(regions, self.plans, strict=True)):
            likeness = _likeness(region, plan)
            first = number if likeness is None else first_of.setdefault(likeness, number)
            if first == number:
                self.read_numbers.append(number)
            else:
                self._equal.setdefault(first, [first]).append(number)
        self.reads: list[LeafRead] = []
        self.purposes: list[ReadPurpose] = []  # of each read
        for number in self.read_numbers:
            plan = self.plans[number]
            if plan.read is not None:
                self.reads.append(plan.read)
                self.purposes.append(ReadPurpose(number))
                continue
            array = ComposedArray(regions[number].local.elements * regions[number].dtype.itemsize)
            for at, block in enumerate(plan.blocks):
                first = len(self.reads)
                self.reads += [read._replace(block=first, into=array) for read in block.inputs]
                self.purposes += [ReadPurpose(number, at, n) for n in range(len(block.inputs))]

    def equal(self, first: int) -> Sequence[int]:
        """Return the numbers of regions with the values of one that is read, as of tied leaves."""
        return self._equal.get(first, (first,))

    @property
    def needed_bytes(self) -> int:
        return sum(read.needed_bytes for read in self.reads)


def _likeness(region: ArrayRegion, plan: LeafPlan) -> object:
    """Return a key that is equal for regions whose values one read gives, or None."""
    values = region.values_key
    if values is None:
        return None
    # Of leaves that are read once for all processes, one process may read other boxes of each.
    boxes = [b.tile.box for b in plan.blocks] if plan.read is None else plan.read.local.boxes
    return values, region.local, tuple(boxes)


def _plan_regions(regions: Sequence[ArrayRegion], memory_budget_bytes: int) -> list[LeafPlan]:
    plans = []
    needs: dict[Catalog, list[tuple[str, Box]]] = {}
    for name, source, local, dtype, _ in regions:
        at_once = memory_budget_bytes // (_BLOCKS_IN_BUDGET * max(1, len(local.boxes)))
        block_bytes = min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, at_once))
        with explained(f"while planning leaf {name!r}", name):
            plan = source.plan(name, local, dtype, block_bytes)
        plans.append(plan)
        if source.catalog is not None:
            needs.setdefault(source.catalog, []).extend(source.needs(plan))
    pieces = {catalog: LocatedPieces(catalog, boxes) for catalog, boxes in needs.items()}
    return [
        plan
        if (catalog := region.source.catalog) is None
        else region.source.resolve_pieces(plan, pieces[catalog])
        for region, plan in zip(regions, plans, strict=True)
    ]
