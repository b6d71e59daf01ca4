"""Leaves of a target, and how regions of them are read from arrays of a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.filling import Filling
from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.format.piece_catalog import PieceCatalog
from orbax_safetensors_layout.geometry.box import Box
from orbax_safetensors_layout.mapping.bound import Bound
from orbax_safetensors_layout.options import PROFILES
from orbax_safetensors_layout.origins import LeafPlan, Mapped, Plain
from orbax_safetensors_layout.plan.leaves import LocalBoxes
from orbax_safetensors_layout.plan.reads import ReadPlan, plan_reads
from orbax_safetensors_layout.plan.sources import sources_of
from orbax_safetensors_layout.storage.base import RangeReader
from orbax_safetensors_layout.transfer.read import read_leaves
from orbax_safetensors_layout.tree import Want
from orbax_safetensors_layout.wants import Cast


class Leaf(NamedTuple):
    """One array of a target.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Dtype of the values that the target takes.
        made_of: The array of the source that it is, by name, or an expression over several.
        cast: What a cast of the source's values has to keep.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    made_of: str | Bound
    cast: Cast = Cast.ROUND

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source's arrays that it takes."""
        return (self.made_of,) if isinstance(self.made_of, str) else self.made_of.sources()


class Region(NamedTuple):
    """A box of a leaf.

    Attributes:
        leaf: The leaf.
        box: The box.
    """

    leaf: Leaf
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.box.size * self.leaf.dtype.itemsize


def batches(regions: Sequence[Region], most_bytes: int) -> Iterator[list[Region]]:
    """Regions that are read together, up to so many bytes, or one."""
    batch: list[Region] = []
    held = 0
    for region in regions:
        if batch and held + region.nbytes > most_bytes:
            yield batch
            batch, held = [], 0
        batch.append(region)
        held += region.nbytes
    if batch:
        yield batch


class Lease(NamedTuple):
    """Arrays of a source of which any region can be read.

    Attributes:
        entries: Where each array is, by its name.
        storage: What reads it.
        pieces: Where its pieces are, if it is stored in pieces.
    """

    entries: Mapping[str, TensorEntry]
    storage: RangeReader
    pieces: PieceCatalog | None = None


def read_regions(
    lease: Lease, regions: Sequence[Region], *, memory_budget_bytes: int
) -> list[np.ndarray]:
    """Values of some regions, in their order, each contiguous.

    Args:
        lease: What they are made of.
        regions: The regions.
        memory_budget_bytes: Host bytes that reads may hold besides the values.

    Raises:
        SafetensorsLayoutError: A read failed, or a value does not survive a cast.
    """
    filling = _filling(lease, regions)
    filling.begin()
    read_leaves(
        _plan(lease, filling, memory_budget_bytes),
        lease.storage,
        deliver=filling.deliver,
        convert=filling.convert,
    )
    return [np.ascontiguousarray(value).reshape(r.box.shape)
            for value, r in zip(filling.values(), regions, strict=True)]  # fmt: skip


def bytes_to_read(lease: Lease, regions: Sequence[Region]) -> int:
    """Bytes that reading each of some regions by itself takes."""
    return sum(
        _plan(lease, _filling(lease, [region]), region.nbytes).cost().read_bytes
        for region in regions
    )


def _plan(lease: Lease, filling: Filling, memory_budget_bytes: int) -> ReadPlan:
    return plan_reads(
        filling.reads,
        profile=PROFILES[lease.storage.kind],
        memory_budget_bytes=memory_budget_bytes,
        adopt=False,
    )


def _filling(lease: Lease, regions: Sequence[Region]) -> Filling:
    wants = [Want(leaf.name, None, leaf.shape, leaf.dtype, None, None) for leaf, _ in regions]
    plans = [_leaf_plan(lease, region) for region in regions]
    return Filling(wants, plans, [region.leaf.cast for region in regions])


def _leaf_plan(lease: Lease, region: Region) -> LeafPlan:
    leaf, box = region
    local = LocalBoxes((box,), (False,))
    if not isinstance(leaf.made_of, str):
        return Mapped(leaf.made_of, lease.entries).plan(leaf.name, local, leaf.dtype)
    entry = lease.entries[leaf.made_of]
    plan = Plain(entry).plan(leaf.name, local, leaf.dtype)
    if lease.pieces is None or plan.read is None:
        return plan
    found = lease.pieces.find({entry.name: (box,)})[entry.name]
    return plan._replace(read=plan.read._replace(sources=sources_of(found)))
