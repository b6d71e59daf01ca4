"""Reads regions of arrays: array sources in, byte ranges planned and read, finished boxes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from orbax_safetensors_layout.options import Progress, StorageProfile
from orbax_safetensors_layout.plan import ArrayRegion, ReadPlan, RegionReads, plan_reads
from orbax_safetensors_layout.storage import RangeReader

from .materialize import Materializer, TakeBoxes
from .read import ReadStats, read_leaves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayReader:
    """Reads regions of arrays from a storage, under a memory budget.

    Attributes:
        storage: Reads byte ranges.
        profile: Its cost model.
        memory_budget_bytes: Bound on what is held beyond the values.
        adopt: Whether the values keep the memory that they are read into.
        in_order: Whether to read region by region, as far as the budget makes it sensible.
        joins_gaps: Whether bytes between two regions may be read; not where another process
            reads them.
        mmap: Take mapped pages of local files in place of reads, where these are aligned.
    """

    storage: RangeReader
    profile: StorageProfile
    memory_budget_bytes: int
    adopt: bool = False
    in_order: bool = False
    joins_gaps: bool = True
    mmap: bool = False

    def plan(self, reads: RegionReads) -> ReadPlan:
        """Plans the requests of some reads.

        Raises:
            SafetensorsLayoutError: The pieces of an array do not make it.
        """
        return plan_reads(
            reads.reads,
            profile=self.profile,
            memory_budget_bytes=self.memory_budget_bytes,
            adopt=self.adopt,
            in_order=self.in_order,
            joins_gaps=self.joins_gaps,
        )

    def run(
        self,
        reads: RegionReads,
        plan: ReadPlan,
        take: TakeBoxes,
        *,
        progress: Callable[[Progress], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> ReadStats:
        """Reads regions, in any order.

        Args:
            reads: What is read.
            plan: Its requests.
            take: Takes finished boxes, on the calling thread.
            progress: Told after each tile.
            check: Called now and then; raises where another process has failed.

        Raises:
            SafetensorsLayoutError: A read failed, or a value does not survive a cast.
        """
        values = Materializer(reads, take)
        values.begin()
        return read_leaves(
            plan,
            self.storage,
            deliver=values.deliver,
            convert=values.convert,
            mmap=self.mmap,
            progress=progress,
            check=check,
        )

    def read(self, regions: Sequence[ArrayRegion]) -> list[np.ndarray]:
        """The values of some regions of one box each, in their order.

        Raises:
            SafetensorsLayoutError: A read failed, or a value does not survive a cast.
        """
        values: dict[int, np.ndarray] = {}

        def take(numbers: Sequence[int], _: Sequence[int], parts: Sequence[np.ndarray]) -> None:
            values.update(dict.fromkeys(numbers, parts[0]))

        reads = RegionReads(regions, self.memory_budget_bytes)
        self.run(reads, self.plan(reads), take)
        return [values[number] for number in range(len(regions))]
