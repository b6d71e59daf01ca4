"""Leaves of a target, and how regions of them are read from arrays of a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import BoundExpr
from orbax_safetensors_layout.options import PROFILES
from orbax_safetensors_layout.plan import (
    ArraySource,
    MappedSource,
    ReadPlan,
    StoredSource,
    plan_reads,
    sources_of,
)
from orbax_safetensors_layout.pytree import AbstractLeaf
from orbax_safetensors_layout.reading import (
    Fidelity,
    Materializer,
    PlannedLeaf,
    ResolvedLeaf,
    read_leaves,
)
from orbax_safetensors_layout.sharding import AddressableShards
from orbax_safetensors_layout.storage import RangeReader


class TargetLeaf(NamedTuple):
    """One array of a target.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Dtype of the values that the target takes.
        made_of: The array of the source that it is, by name, or an expression over several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    made_of: str | BoundExpr

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source's arrays that it takes."""
        return (self.made_of,) if isinstance(self.made_of, str) else self.made_of.sources()


class LeafRegion(NamedTuple):
    """A box of a leaf.

    Attributes:
        leaf: The leaf.
        box: The box.
    """

    leaf: TargetLeaf
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.box.size * self.leaf.dtype.itemsize


def batches(regions: Sequence[LeafRegion], most_bytes: int) -> Iterator[list[LeafRegion]]:
    """Regions that are read together, up to so many bytes, or one."""
    batch: list[LeafRegion] = []
    held = 0
    for region in regions:
        if batch and held + region.nbytes > most_bytes:
            yield batch
            batch, held = [], 0
        batch.append(region)
        held += region.nbytes
    if batch:
        yield batch


class ReadableArrays(NamedTuple):
    """Arrays of a source of which any region can be read.

    Attributes:
        entries: Where each array is, by its name.
        storage: What reads it.
        pieces: The catalog of a checkpoint that is stored in pieces.
    """

    entries: Mapping[str, TensorEntry]
    storage: RangeReader
    pieces: Catalog | None = None


def read_regions(
    lease: ReadableArrays, regions: Sequence[LeafRegion], *, memory_budget_bytes: int
) -> list[np.ndarray]:
    """Values of some regions, in their order, each contiguous.

    Args:
        lease: What they are made of.
        regions: The regions.
        memory_budget_bytes: Host bytes that reads may hold besides the values.

    Raises:
        SafetensorsLayoutError: A read failed, or a value does not survive a cast.
    """
    values: dict[int, np.ndarray] = {}

    def take(leaf: ResolvedLeaf, _: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        (values[leaf.number],) = parts

    filling = Materializer(_planned(lease, regions), take)
    filling.begin()
    read_leaves(
        _plan(lease, filling, memory_budget_bytes),
        lease.storage,
        deliver=filling.deliver,
        convert=filling.convert,
    )
    return [
        np.ascontiguousarray(values[number]).reshape(region.box.shape)
        for number, region in enumerate(regions)
    ]


def bytes_to_read(lease: ReadableArrays, regions: Sequence[LeafRegion]) -> int:
    """Bytes that reading each of some regions by itself takes."""
    return sum(
        _plan(lease, Materializer(_planned(lease, [region]), _nowhere), region.nbytes)
        .cost()
        .read_bytes
        for region in regions
    )


def _plan(lease: ReadableArrays, filling: Materializer, memory_budget_bytes: int) -> ReadPlan:
    return plan_reads(
        filling.reads,
        profile=PROFILES[lease.storage.kind],
        memory_budget_bytes=memory_budget_bytes,
        adopt=False,
    )


def _nowhere(leaf: ResolvedLeaf, boxes: Sequence[int], parts: Sequence[np.ndarray]) -> None:
    """Of a plan that is not carried out."""


def _planned(lease: ReadableArrays, regions: Sequence[LeafRegion]) -> list[PlannedLeaf]:
    return [_planned_leaf(lease, number, *region) for number, region in enumerate(regions)]


def _planned_leaf(lease: ReadableArrays, number: int, leaf: TargetLeaf, box: Box) -> PlannedLeaf:
    local = AddressableShards((box,), (False,))
    want = AbstractLeaf(leaf.name, None, leaf.shape, leaf.dtype, None, None)
    origin: ArraySource
    if isinstance(leaf.made_of, str):
        entry = lease.entries[leaf.made_of]
        origin = StoredSource(entry)
        plan = origin.plan(leaf.name, local, leaf.dtype)
        if lease.pieces is not None and plan.read is not None:
            found = lease.pieces.locate({entry.name: (box,)})[entry.name]
            plan = plan._replace(read=plan.read._replace(sources=sources_of(found)))
    else:
        origin = MappedSource(leaf.made_of, lease.entries)
        plan = origin.plan(leaf.name, local, leaf.dtype)
    wanted = ResolvedLeaf(number, want, leaf.name, origin, leaf.dtype, Fidelity.ROUND, local)
    return PlannedLeaf(wanted, plan)
