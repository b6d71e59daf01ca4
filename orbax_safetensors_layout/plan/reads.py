"""The read plan of one process: O(pieces x shards x dimensions), no Python object per row."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.runtime import batches, seconds_text, size_text, text_table

from .axes import TileLayout
from .coalesce import RequestGroup, coalesced
from .cost import Cost, HostRate
from .exchange_rounds import Stage
from .leaf_reads import ComposedArray, LeafRead
from .planner import BUNDLES_IN_BUDGET, RegionPlanner
from .regions import ByteRegion, TileKey

_NOTHING = Cost()


class Batch(NamedTuple):
    """Regions of a file, by offset, that are read before those of the next batch."""

    file: str
    regions: tuple[ByteRegion, ...]
    max_gap_bytes: int  # the longest gap between regions that is read through


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The reads of one process, and the leaves that they fill."""

    leaves: tuple[LeafRead, ...]  # in the order of the abstract tree
    batches: tuple[Batch, ...]  # in this order; where arrays adopt their buffers each file once
    profile: StorageProfile  # the cost model that the requests were made with
    memory_budget_bytes: int  # bound on what is held beyond the arrays
    adopt: bool  # whether the arrays keep the buffers they are made of, as on the CPU backend
    exchange: Cost = _NOTHING  # what an exchange with other processes adds
    processes_per_host: int = 1  # that share the rate of its storage

    def groups(self) -> Iterable[RequestGroup]:
        """Return regions that are read together, in the order in which they are."""
        return vars(self).get("_known_groups") or self._groups()

    def _groups(self) -> Iterator[RequestGroup]:
        for batch in self.batches:
            yield from coalesced(*batch, self.profile, self._held_bytes, self.memory_budget_bytes)

    @functools.cached_property
    def _known_groups(self) -> tuple[RequestGroup, ...]:
        return tuple(self._groups())

    def _held_bytes(self, region: ByteRegion) -> int:
        leaf = self.leaves[region.leaf]
        if self.adopt:
            return read_bytes(leaf, region.layout) if region.layout.is_scratch else 0
        return held_bytes(leaf, region)

    def composed_bytes(self, array: ComposedArray | None) -> int:
        """Return what the budget counts of a composed array, in bytes; a part is kept for reads."""
        if array is None or self.adopt:
            return 0
        for_reads = self.memory_budget_bytes // BUNDLES_IN_BUDGET
        return min(array.nbytes, self.memory_budget_bytes - for_reads)

    @classmethod
    def joined(cls, plans: Sequence[ReadPlan]) -> ReadPlan:
        """Return plans that are run one after the other, as one."""
        if len(plans) == 1:
            return plans[0]
        leaves: list[LeafRead] = []
        in_turn: list[Batch] = []
        for plan in plans:
            first = len(leaves)
            leaves += plan.leaves
            for batch in plan.batches:
                regions = tuple(r._replace(leaf=first + r.leaf) for r in batch.regions)
                in_turn.append(batch._replace(regions=regions))
        return dataclasses.replace(
            plans[0],
            leaves=tuple(leaves),
            batches=tuple(in_turn),
            exchange=sum((plan.exchange for plan in plans), Cost()),
        )

    @property
    def needed_bytes(self) -> int:
        """Bytes that leaves need, without the gaps that are read through."""
        return sum(r.read.needed_bytes for batch in self.batches for r in batch.regions)

    @property
    def read_bytes(self) -> int:
        """Bytes requested from storage; the groups are kept for the reads."""
        return sum(group.cost()[0] for group in self._known_groups)

    @property
    def most_read_bytes(self) -> int:
        """A bound on them, which takes less time."""
        regions = ((region, batch) for batch in self.batches for region in batch.regions)
        return sum(region.read.storage_bytes + batch.max_gap_bytes for region, batch in regions)

    @property
    def most_held_bytes(self) -> int:
        """Host bytes that regions hold which are read together, at most."""
        held = (sum(map(self._held_bytes, group.regions)) for group in self.groups())
        return max(held, default=0)

    def cost(self) -> Cost:
        """Return the cost of the plan for this process."""
        needed = read = requests = held = most_held = 0
        staged = padded = False
        touched: set[int | str] = set()
        opened: set[TileKey] = set()
        composed: dict[ComposedArray, int] = {}  # and what of each the budget counts
        for group in self.groups():
            regions = group.regions
            group_read, group_requests = group.cost()
            read, requests = read + group_read, requests + group_requests
            pads = [r.read.blocking.pad_bytes for r in regions if not r.read.direct]
            staged, padded = staged or bool(pads), padded or any(pads)
            needed += sum(request.needed_bytes for request in group.requests)
            touched.update(self._tensor(region.leaf) for region in regions)
            if self.adopt and not any(region.layout.is_scratch for region in regions):
                continue
            fresh = {r.tile: r for r in regions if r.tile not in opened}
            opened.update(tile for tile, region in fresh.items() if region.parts > 1)
            group_held = sum(map(self._held_bytes, fresh.values()))
            held, most_held = held + group_held, max(most_held, group_held)
            arrays = {self.leaves[region.leaf].into for region in regions}
            composed.update((a, self.composed_bytes(a)) for a in arrays if a and not self.adopt)
        staging = staging_bytes(self.profile, padded=padded) if staged else 0
        beyond = max((array.nbytes - n for array, n in composed.items()), default=0)
        most_held += max(composed.values(), default=0)
        most_held = max(self.memory_budget_bytes, most_held) + beyond
        held += sum(array.nbytes for array in composed)
        own = Cost(
            tensors=len(touched),
            needed_bytes=needed,
            read_bytes=read,
            requests=requests,
            files=len({batch.file for batch in self.batches}),
            peak_host_bytes=staging + min(held, most_held),
        )
        return own + self.exchange

    def _tensor(self, number: int) -> int | str:
        """Return the same for reads of one tensor in blocks."""
        leaf = self.leaves[number]
        return number if leaf.into is None else leaf.sources[0].entry.name

    def _rate(self, bytes_per_second: float | None = None) -> HostRate:
        platform = "cpu" if self.adopt else ""
        of_host = self.processes_per_host
        given = self.profile, bytes_per_second
        return HostRate.of(*given, platform=platform, processes_per_host=of_host)

    def seconds(self, bytes_per_second: float | None = None) -> float:
        """Estimate the time of the process's share, where all processes of a host load at once.

        `bytes_per_second` is the rate of the host with all its streams; that of what all hosts
        share does not count. `str` of the plan names the others.
        """
        return self._rate(bytes_per_second).seconds(self.cost())

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yields half-open ranges (file, start, stop); long ones are read in several requests."""
        for group in self.groups():
            yield from group.ranges()

    def by_tensor(self) -> list[tuple[str, int, int]]:
        """(name, bytes needed, bytes read) of each leaf, each as if it were read alone."""
        needed, read = [0] * len(self.leaves), [0] * len(self.leaves)
        for batch in self.batches:
            for region in batch.regions:
                needed[region.leaf] += region.read.needed_bytes
                read[region.leaf] += region.read.storage_bytes
        return [(leaf.name, n, r) for leaf, n, r in zip(self.leaves, needed, read, strict=True)]

    def __str__(self) -> str:
        cost = self.cost()
        totals: dict[
            tuple[str, str, str], tuple[int, int]
        ] = {}  # of leaves that are read in blocks
        for leaf, (name, n, r) in zip(self.leaves, self.by_tensor(), strict=True):
            shape = leaf.shape if leaf.into is None else leaf.sources[0].entry.shape
            key = name, str(list(shape)), leaf.stored.code
            needed, read = totals.get(key, (0, 0))
            totals[key] = needed + n, read + r
        rows = [("tensor", "shape", "dtype", "needed", "read")]
        rows += [(*key, f"{n:,}", f"{r:,}") for key, (n, r) in totals.items()]
        return "\n".join([text_table(rows, 3), *self.figures(cost)])

    def figures(self, cost: Cost) -> tuple[str, str]:
        """Format the cost and the time of the plan."""
        rate, profile = self._rate(), self.profile
        own_rate = f"{size_text(rate.bytes_per_second)}/s a {rate.owners[0]}"
        text = (
            f"about {seconds_text(rate.seconds(cost))}: {seconds_text(profile.latency_seconds)}"
            f" a request, {profile.streams} at once, {own_rate}"
        )
        exchange = f"; exchange {rate.exchange_text()}" * bool(cost.exchanged_bytes)
        return str(cost), text + exchange


def exchange_cost(stages: Sequence[Stage], process: int) -> Cost:
    """Return what exchanges add to the cost of a process."""
    forms = {id(step.form): step.form for stage in stages for step in stage}
    counts = collections.Counter(id(step.form) for stage in stages for step in stage)
    return sum(
        (
            Cost(
                exchanged_bytes=counts[number] * form.received_bytes(process),
                gathered_bytes=counts[number] * slots * form.gathered_bytes,
                exchange_rounds=counts[number],
                exchange_programs=1,
            )
            for number, form in forms.items()
            if (slots := len(form.grid.slots(process)))
        ),
        Cost(),
    )


def plan_reads(
    leaves: Sequence[LeafRead],
    *,
    profile: StorageProfile,
    memory_budget_bytes: int,
    adopt: bool,
    in_order: bool = False,
    joins_gaps: bool = True,
) -> ReadPlan:
    """Plans the reads of one process; the options are those of `reading.ArrayReader`."""
    planner = RegionPlanner(profile, memory_budget_bytes, adopt=adopt)
    inputs = collections.Counter(leaf.block for leaf in leaves)
    whole: list[ByteRegion] = []
    parts: list[ByteRegion] = []
    for number, leaf in enumerate(leaves):
        if leaf.local.boxes and 0 not in leaf.shape:
            regions = planner.regions(number, leaf)
            alone = leaf.block is None or inputs[leaf.block] == 1
            for region in regions:
                near = region.parts == 1 if adopt else len(leaf.sources) == 1 and not leaf.into
                by_file = near and alone and not in_order
                by_file = by_file or (adopt and not leaf.uses_scratch)
                (whole if by_file else parts).append(region)
    # A tile that comes from many files holds its memory from its first region to its last. In the
    # order of the files all tiles would be open at once: so many are as fit a part of the budget.
    partners = _partners(leaves, parts, memory_budget_bytes, adopt=adopt)
    most_bytes = memory_budget_bytes // BUNDLES_IN_BUDGET
    bundles = [
        [region for _, regions in bundle for region in regions]
        for bundle in batches(partners, operator.itemgetter(0), most_bytes)
    ]
    if len(bundles) == 1 and not in_order:  # all of them may be open at once
        whole += bundles.pop()
    max_gap_bytes = profile.max_gap_bytes if joins_gaps else 0
    in_turn = [
        Batch(file, regions, max_gap_bytes)
        for together in (whole, *bundles)
        for file, regions in _by_file(leaves, together)
    ]
    return ReadPlan(tuple(leaves), tuple(in_turn), profile, memory_budget_bytes, adopt)


def staging_bytes(profile: StorageProfile, *, padded: bool) -> int:
    """Return host bytes of the staging buffers of all requests in flight."""
    staging = profile.concurrency * profile.staging_bytes
    # A cache line after each row of 512 bytes or more.
    return staging + (staging // 8 if padded else 0)


def held_bytes(leaf: LeafRead, region: ByteRegion) -> int:
    """Return host bytes that a region's tile holds until its arrays are on other devices."""
    is_cast = leaf.is_computed or leaf.dtype != leaf.stored.numpy
    elements = sum(box.size for box in region.layout.regions) if is_cast else 0
    return read_bytes(leaf, region.layout) + elements * leaf.dtype.itemsize


def read_bytes(leaf: LeafRead, layout: TileLayout) -> int:
    """Return host bytes of a tile as it is in the file, and of elements that are decoded."""
    decoded = leaf.stored.packed or leaf.stored.one_a_byte
    unpacked = sum(box.size for box in layout.regions) if decoded else 0
    return layout.memory_bytes + unpacked


def _by_file(
    leaves: Sequence[LeafRead], regions: Sequence[ByteRegion]
) -> Iterator[tuple[str, tuple[ByteRegion, ...]]]:
    by_file: dict[str, list[ByteRegion]] = {}
    for region in regions:
        file = leaves[region.leaf].sources[region.source].entry.file
        by_file.setdefault(file, []).append(region)
    for file, of_file in sorted(by_file.items()):
        yield file, tuple(sorted(of_file, key=operator.attrgetter("start")))


def _partners(
    leaves: Sequence[LeafRead], regions: Sequence[ByteRegion], budget: int, *, adopt: bool
) -> list[tuple[int, list[ByteRegion]]]:
    """Return tiles, and arrays that are composed of several, with the bytes that they hold.

    They are together where the same requests serve them.
    """

    def holder(region: ByteRegion) -> ComposedArray | TileKey:
        into = None if adopt else leaves[region.leaf].into
        return into or region.tile

    partners: list[tuple[int, list[ByteRegion]]] = []
    starts: dict[tuple[str, int], list[tuple[int, int]]] = {}  # by file and geometry
    for key, of_tile in itertools.groupby(regions, key=holder):
        first, *_ = tile = list(of_tile)
        more = held_bytes(leaves[first.leaf], first)
        more += key.nbytes if isinstance(key, ComposedArray) else 0
        file = leaves[first.leaf].sources[first.source].entry.file
        near = starts.setdefault((file, id(first.read)), [])
        at = bisect.bisect(near, (first.start, 0))
        for start, number in near[max(0, at - 1) : at + 1]:
            held, tiles = partners[number]
            if first.read.interlaces(abs(start - first.start)) and held + more <= budget:
                tiles += tile
                partners[number] = held + more, tiles
                break
        else:
            near.insert(at, (first.start, len(partners)))
            partners.append((more, tile))
    return partners
