"""Reads regions of arrays: array sources in, byte ranges planned and read, finished boxes out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from orbax_safetensors_layout.errors import explained
from orbax_safetensors_layout.geometry import AffineView, Box
from orbax_safetensors_layout.mapping import (
    AffinePiece,
    ValueOp,
    apply_ops,
    apply_view,
    assemble_box,
    cast_into,
    in_chunks,
)
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan import (
    ArrayRegion,
    ComposedBlock,
    LeafRead,
    ReadPlan,
    RegionReads,
    plan_reads,
)
from orbax_safetensors_layout.runtime import ProgressReport, Register, allocate
from orbax_safetensors_layout.storage import RangeReader

from .plan_reader import PlanReader, ReadStats, Wait
from .stored_values import check_booleans

TakeBoxes = Callable[[Sequence[int], Sequence[int], Sequence[np.ndarray]], Wait | None]
"""Takes numbers of regions with the same values, numbers of some of their boxes, and the values of
these. What it returns, if anything, is called before the memory of the values counts as free."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayReader:
    """Reads regions of arrays from a storage, under a memory budget."""

    storage: RangeReader
    profile: StorageProfile
    memory_budget_bytes: int  # bound on what is held beyond the values
    adopt: bool = False  # whether the values keep the memory that they are read into
    # Whether to read region by region, as far as the budget makes it sensible.
    in_order: bool = False
    check_values: bool = True  # refuse bytes that encode no value; not where bits are compared
    mmap: bool = False  # take mapped pages of local files where these are aligned
    register: Register | None = None  # for memory that values are transferred from

    def plan(self, reads: RegionReads, *, joins_gaps: bool = True) -> ReadPlan:
        """Plans the requests of some reads; raises where the pieces of an array do not make it.

        `joins_gaps` says whether bytes between two regions may be read, as nobody else reads them.
        """
        return plan_reads(
            reads.reads,
            profile=self.profile,
            memory_budget_bytes=self.memory_budget_bytes,
            adopt=self.adopt,
            in_order=self.in_order,
            joins_gaps=joins_gaps,
        )

    def run(
        self,
        reads: RegionReads,
        plan: ReadPlan,
        take: TakeBoxes,
        *,
        report: ProgressReport | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> ReadStats:
        """Reads regions, in any order; `take` gets finished boxes, on the calling thread.

        `check` is called now and then, to raise where another process has failed.
        """
        values = _Materializer(reads, take, check_values=self.check_values)
        values.complete_unread()
        return PlanReader(
            plan,
            self.storage,
            deliver=values.deliver,
            convert=values.convert,
            mmap=self.mmap,
            register=self.register,
            report=report,
            check=check,
        ).run()

    def read(self, regions: Sequence[ArrayRegion]) -> list[np.ndarray]:
        """The values of some regions of one box each, in their order."""
        values: dict[int, np.ndarray] = {}

        def take(numbers: Sequence[int], _: Sequence[int], parts: Sequence[np.ndarray]) -> None:
            values.update(dict.fromkeys(numbers, parts[0]))

        reads = RegionReads(regions, self.memory_budget_bytes)
        self.run(reads, self.plan(reads), take)
        return [values[number] for number in range(len(regions))]


class _Materializer:
    """Makes boxes of regions of finished reads, and gives them to `take`."""

    def __init__(self, reads: RegionReads, take: TakeBoxes, *, check_values: bool) -> None:
        self._reads = reads
        self._check_values = check_values
        self._take = take
        self._boxes: dict[int, dict[int, np.ndarray]] = {}
        self._blocks_left = {n: len(plan.blocks) for n, plan in enumerate(reads.plans)}
        self._arrays: dict[tuple[int, int], dict[int, np.ndarray]] = {}

    def complete_unread(self) -> None:
        for number in self._reads.read_numbers:
            plan = self._reads.plans[number]
            for block in plan.blocks:
                wait = None if block.inputs else self._compose(number, block, {})
                if wait is not None:  # no budget counts what is being transferred
                    wait()
            if plan.read is None and not plan.blocks:
                self._take(self._reads.equal(number), [], [])

    def convert(self, number: int, values: np.ndarray, out: np.ndarray) -> None:
        """Puts stored values of a read in their place, in the dtype of the region."""
        region_number = self._reads.purposes[number].region
        region = self._reads.regions[region_number]
        check_booleans([values], region.source.file, region.name)
        _put(region, self._reads.plans[region_number].ops, values, out)

    def deliver(
        self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        region_number, block_number, input_number = self._reads.purposes[number]
        if block_number is None:
            if self._check_values:
                region = self._reads.regions[region_number]
                check_booleans(parts, region.source.file, region.name)
            return self._take(self._reads.equal(region_number), boxes, parts)
        block = self._reads.plans[region_number].blocks[block_number]
        arrays = self._arrays.setdefault((region_number, block_number), {})
        (arrays[input_number],) = parts
        if len(arrays) < len(block.inputs):
            return None
        del self._arrays[region_number, block_number]
        return self._compose(region_number, block, arrays)

    def _compose(
        self, number: int, block: ComposedBlock, arrays: dict[int, np.ndarray]
    ) -> Wait | None:
        region = self._reads.regions[number]
        in_order = iter(range(len(arrays)))

        def read(piece: AffinePiece) -> np.ndarray:
            number = next(in_order)
            values = arrays.pop(number)
            check_booleans([values], region.source.file, region.name)
            return _of_view(values, block.inputs[number], piece.view)

        boxes = self._boxes.setdefault(number, {})
        places: list[tuple[Box, np.ndarray]] = []
        for member, part in zip(block.tile.members, block.tile.member_boxes(), strict=True):
            whole = region.local.boxes[member]
            if member not in boxes:
                memory = allocate(whole.size * region.dtype.itemsize)
                boxes[member] = memory.view(region.dtype).reshape(whole.shape)
            places.append((part, part.view_of(boxes[member], whole)))
        dtype, box = region.source.dtype, block.tile.box
        is_place = len(places) == 1 and dtype == region.dtype
        out = places[0][1] if is_place else np.empty(box.shape, dtype)
        with explained(f"In a function that makes leaf {region.name!r}.", region.name):
            assemble_box(block.pieces, box, dtype, read, out=out)
        for part, place in places:
            if not is_place:
                _put(region, (), part.view_of(out, box), place)
        self._blocks_left[number] -= 1
        if self._blocks_left[number]:
            return None
        del self._boxes[number]
        return self._take(self._reads.equal(number), [*boxes], [*boxes.values()])


def _of_view(values: np.ndarray, read: LeafRead, view: AffineView) -> np.ndarray:
    """Return the elements of a view of a tensor, of which a region was read that holds them."""
    if not read.stored.packed:
        return values  # the view itself
    box = read.local.boxes[0]
    if view.box_in(read.shape) is None:  # the region is of whole rows
        before = box.start[0] * math.prod(read.shape[1:])
        return apply_view(values.reshape(-1), view._replace(offset=view.offset - before))
    once = [n if stride else 1 for n, stride in zip(view.shape, view.strides, strict=True)]
    return np.broadcast_to(values.reshape(once), view.shape)


def _put(
    region: ArrayRegion, ops: tuple[ValueOp, ...], values: np.ndarray, out: np.ndarray
) -> None:
    """Puts values in their place, after some operations, in the dtype of the region."""
    for part, place in in_chunks(values, out):
        result = apply_ops(part, ops)
        if result.dtype == region.dtype:
            place[...] = result
        else:
            cast_into(place, result, exact=region.is_exact, subject=region.subject)
