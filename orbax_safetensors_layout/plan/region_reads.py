"""Regions of arrays, plain, mapped or in pieces, and the reads of tensors that they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box
from orbax_safetensors_layout.mapping import Subject
from orbax_safetensors_layout.options import KIB, MIB
from orbax_safetensors_layout.sharding import AddressableShards

from .array_source import ArraySource, LeafPlan, StoredSource
from .leaf_reads import LeafRead, TensorPiece

_BLOCKS_IN_BUDGET = 4  # of all boxes of a region: some are read while others are computed
_MOST_BLOCK_BYTES = 8 * MIB
_LEAST_BLOCK_BYTES = 4 * KIB


class ArrayRegion(NamedTuple):
    """Boxes of one array that are read.

    Attributes:
        name: The array's name.
        source: Where its values come from.
        local: The boxes.
        dtype: The dtype that the values will have.
        is_exact: Whether a cast must keep every value.
    """

    name: str
    source: ArraySource
    local: AddressableShards
    dtype: np.dtype
    is_exact: bool = False

    @classmethod
    def of_box(cls, name: str, source: ArraySource, box: Box, dtype: np.dtype) -> ArrayRegion:
        """One box, for a reader of its own."""
        return cls(name, source, AddressableShards((box,), (False,)), dtype)

    @property
    def subject(self) -> Subject:
        """What is cast, for errors."""
        return Subject(self.name, self.source.file, self.source.dtype)

    @property
    def values_key(self) -> object:
        """Equal for arrays with the same values, as tied leaves; None where there are no others."""
        if isinstance(self.source, StoredSource):
            return None
        return id(self.source.bound), self.dtype, self.is_exact


class ReadPurpose(NamedTuple):
    """What a read is for: a region itself, or one input of a block that is composed.

    Attributes:
        region: Number of the region.
        block: Number of the block, if it is an input.
        number: Number of the input.
    """

    region: int
    block: int | None = None
    number: int = 0


class RegionReads:
    """The reads of tensors that some regions are made of.

    Args:
        regions: The regions.
        memory_budget_bytes: Bound on what is held beyond the values.

    Attributes:
        regions: The regions.
        plans: How each is read.
        alike: Numbers of regions with the same values, as of tied leaves, by the first of them.
            That one is read.
        reads: All reads.
        purposes: What each is for.

    Raises:
        FormatError: The header of a file with pieces is malformed.
        StorageError: The read of one failed.
    """

    def __init__(self, regions: Sequence[ArrayRegion], memory_budget_bytes: int) -> None:
        self.regions = regions
        self.plans = _plan_regions(regions, memory_budget_bytes)
        alike: dict[object, list[int]] = {}
        for number, (region, plan) in enumerate(zip(regions, self.plans, strict=True)):
            alike.setdefault(_likeness(region, plan) or number, []).append(number)
        self.alike = {numbers[0]: numbers for numbers in alike.values()}
        self.reads: list[LeafRead] = []
        self.purposes: list[ReadPurpose] = []
        for number in self.alike:
            plan = self.plans[number]
            if plan.read is not None:
                self.reads.append(plan.read)
                self.purposes.append(ReadPurpose(number))
            for at, block in enumerate(plan.blocks):
                unit = len(self.reads)
                self.reads += [read._replace(unit=unit) for read in block.inputs]
                self.purposes += [ReadPurpose(number, at, n) for n in range(len(block.inputs))]

    @property
    def needed_bytes(self) -> int:
        """Stored bytes of all reads."""
        return sum(read.needed_bytes for read in self.reads)


def _likeness(region: ArrayRegion, plan: LeafPlan) -> object:
    """Equal for regions of which one read gives the values; None where there is none like it.

    Of leaves that are read once for all processes, one process may read other boxes of each.
    """
    if region.values_key is None:
        return None
    boxes = [block.box for block in plan.blocks] if plan.read is None else plan.read.local.boxes
    return region.values_key, region.local, tuple(boxes)


def _plan_regions(regions: Sequence[ArrayRegion], memory_budget_bytes: int) -> list[LeafPlan]:
    plans = []
    for name, source, local, dtype, _ in regions:
        at_once = memory_budget_bytes // (_BLOCKS_IN_BUDGET * max(1, len(local.boxes)))
        block_bytes = min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, at_once))
        plans.append(source.plan(name, local, dtype, block_bytes))
    in_pieces: dict[Catalog, list[int]] = {}
    for number, region in enumerate(regions):
        if isinstance(region.source, StoredSource) and region.source.catalog is not None:
            in_pieces.setdefault(region.source.catalog, []).append(number)
    for catalog, numbers in in_pieces.items():
        boxes: dict[str, dict[Box, None]] = {}
        for read in _reads(plans, numbers):
            boxes.setdefault(read.name, {}).update(dict.fromkeys(read.local.boxes))
        found = catalog.locate({name: tuple(some) for name, some in boxes.items()})
        for number, read in zip(numbers, _reads(plans, numbers), strict=True):
            pieces: Iterable[tuple[Box, TensorEntry]] = found[read.name]
            if len(boxes[read.name]) > len(read.local.boxes):
                pieces = (p for p in pieces if any(map(p[0].intersect, read.local.boxes)))
            sources = (TensorPiece(entry, b, AffineView.row_major(b.shape)) for b, entry in pieces)
            plans[number] = LeafPlan(read._replace(sources=tuple(sources)))
    return plans


def _reads(plans: Sequence[LeafPlan], numbers: Sequence[int]) -> Iterator[LeafRead]:
    for number in numbers:
        read = plans[number].read
        assert read is not None
        yield read
