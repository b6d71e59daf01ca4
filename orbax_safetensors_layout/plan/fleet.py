"""What a load costs every process of a cluster, worked out for all of them at once.

Nothing is sampled. Processes whose shards lie alike are one; what is left of them goes through the
tensors of each file together, as vectors. What is large is read by itself, so its cost depends on
its shape alone; only small regions, which may share a request with their neighbours in the file,
are looked at one after the other, by the rules of `groups.grouped`. `tests/test_fleet.py` holds
the result equal to the `ReadPlan` of each process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.geometry.affine import row_major_strides
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan.cost import Cost
from orbax_safetensors_layout.plan.grid import Cells, DeviceGrid, Spec
from orbax_safetensors_layout.plan.groups import MAX_GROUP_BUFFERS, SmallRequest
from orbax_safetensors_layout.plan.leaves import LeafRead, LocalBoxes
from orbax_safetensors_layout.plan.planner import RegionPlanner
from orbax_safetensors_layout.plan.reads import held_bytes, staging_bytes
from orbax_safetensors_layout.plan.regions import Region

Ints: TypeAlias = npt.NDArray[np.int64]


class FleetLeaf(NamedTuple):
    """One tensor that is loaded as it stands.

    Attributes:
        entry: The tensor.
        spec: How it is sharded.
    """

    entry: TensorEntry
    spec: Spec


class Shape(NamedTuple):
    """Regions that some processes have of each tensor of a kind.

    Attributes:
        processes: [n] the processes, counted among those that are not alike.
        regions: Those of the first of them; `start` counts from the tensor's first byte.
        shift: [n] bytes by which those of each process lie behind those of the first.
        held: Host bytes that each region's tile takes.
        elements: Elements of the distinct shards of one process.
    """

    processes: Ints
    regions: tuple[Region, ...]
    shift: Ints
    held: tuple[int, ...]
    elements: int


class Kind(NamedTuple):
    """Tensors of one shape, dtype and spec.

    Attributes:
        tensors: How many there are.
        first: The first of them.
        shapes: What the processes have of each.
        shard_elements: Elements of one device's shard.
    """

    tensors: int
    first: FleetLeaf
    shapes: tuple[Shape, ...]
    shard_elements: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """The shares of all processes of one load.

    Attributes:
        leaves: What is loaded.
        grid: The devices.
        profile: The cost model.
        kinds: The distinct kinds of leaves.
        kind_of: For each leaf the number of its kind.
        distinct: For each process the number of its like among those that differ.
        costs: The cost of each that differs.
    """

    leaves: tuple[FleetLeaf, ...]
    grid: DeviceGrid
    profile: StorageProfile
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    distinct: Ints
    costs: tuple[Cost, ...]

    def cost(self, process: int) -> Cost:
        """The cost of one process, as `ReadPlan.cost` has it."""
        return self.costs[int(self.distinct[process])]

    def files(self) -> Iterator[tuple[str, list[tuple[TensorEntry, Kind]]]]:
        """Each file with its tensors, by offset, and their kinds."""
        yield from _files(self.leaves, self.kind_of, self.kinds)


def plan_fleet(
    leaves: Sequence[FleetLeaf],
    grid: DeviceGrid,
    *,
    profile: StorageProfile,
    memory_budget_bytes: int,
) -> Fleet:
    """Plans the reads of all processes, for devices with memory of their own.

    Args:
        leaves: The tensors.
        grid: The devices and processes.
        profile: Cost model of the storage class.
        memory_budget_bytes: As for `plan_reads`.

    Raises:
        ValueError: A spec does not fit its tensor.
    """
    numbers: dict[tuple[object, ...], int] = {}
    counts: list[int] = []
    firsts: list[FleetLeaf] = []
    kind_of = []
    for leaf in leaves:
        key = (leaf.entry.shape, leaf.entry.dtype.code, leaf.spec)
        number = numbers.setdefault(key, len(numbers))
        if number == len(firsts):
            firsts.append(leaf)
            counts.append(0)
        counts[number] += 1
        kind_of.append(number)
    holdings = [_Holding.of(leaf, grid) for leaf in firsts]
    chosen, distinct = _distinct(holdings, grid.processes)
    planner = RegionPlanner(profile, memory_budget_bytes)
    kinds = tuple(
        Kind(count, leaf, tuple(_shapes(leaf, holding, chosen, planner)), holding.shard_elements)
        for count, leaf, holding in zip(counts, firsts, holdings, strict=True)
    )
    sums = _Sums(len(chosen), profile)
    for kind in kinds:
        sums.add_kind(kind)
    for _, tensors in _files(leaves, kind_of, kinds):
        sums.add_file(tensors)
    costs = sums.costs(memory_budget_bytes)
    return Fleet(tuple(leaves), grid, profile, kinds, tuple(kind_of), distinct, costs)


def _files(
    leaves: Sequence[FleetLeaf], kind_of: Sequence[int], kinds: Sequence[Kind]
) -> Iterator[tuple[str, list[tuple[TensorEntry, Kind]]]]:
    by_file: dict[str, list[tuple[TensorEntry, Kind]]] = {}
    for leaf, number in zip(leaves, kind_of, strict=True):
        by_file.setdefault(leaf.entry.file, []).append((leaf.entry, kinds[number]))
    for file, tensors in sorted(by_file.items()):
        yield file, sorted(tensors, key=lambda item: item[0].start)


class _Holding(NamedTuple):
    """What each process holds of an array.

    Attributes:
        cells: The parts.
        rows: [processes, devices of a process] number of each part that its devices hold, sorted.
        origin: [processes, dimensions] the lowest part along each dimension.
        alike: [processes] equal where the parts lie alike, seen from the origin.
        holders: [parts] how many processes hold each part.
        grid: Number of parts along each dimension.
    """

    cells: Cells
    rows: Ints
    origin: Ints
    alike: Ints
    holders: Ints
    grid: tuple[int, ...]

    @property
    def shard_elements(self) -> int:
        return self.cells.box([0] * len(self.cells.parts)).size

    @classmethod
    def of(cls, leaf: FleetLeaf, grid: DeviceGrid) -> _Holding:
        shape = leaf.entry.shape
        cells = grid.cells(leaf.spec, shape)
        counts = tuple(grid.ways(names) for names in leaf.spec)
        counts += (1,) * (len(shape) - len(counts))
        strides = np.array(row_major_strides(counts), np.int64)
        each = (grid.processes, grid.devices_per_process)
        rows = np.sort((cells.cells @ strides).reshape(each), axis=1)
        is_new = np.ones(rows.shape, bool)
        is_new[:, 1:] = rows[:, 1:] != rows[:, :-1]
        holders = np.bincount(rows[is_new])
        origin = cells.cells.reshape(*each, len(shape)).min(1)
        # Parts that share bytes with their neighbours do not look the same from everywhere.
        moved = 0 if leaf.entry.dtype.packed else (origin @ strides)[:, None]
        alike = _row_numbers(np.concatenate([rows - moved, holders[rows] > 1], 1))
        return cls(cells, rows, origin, alike, holders, counts)

    def local(self, process: int) -> LocalBoxes:
        ids = np.unique(self.rows[process])
        shared = tuple((self.holders[ids] > 1).tolist())
        if not self.grid:
            return LocalBoxes((self.cells.box(()),), shared)
        cells = np.stack(np.unravel_index(ids, self.grid), 1)
        return LocalBoxes(tuple(self.cells.box(cell) for cell in cells.tolist()), shared)


def _row_numbers(rows: Ints) -> Ints:
    """Equal numbers for equal rows."""
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _distinct(holdings: Sequence[_Holding], processes: int) -> tuple[Ints, Ints]:
    """Processes of which no two are alike in all, and for each process the one it is like."""
    columns = [np.zeros((processes, 1), np.int64)]
    for holding in holdings:
        columns += [holding.alike[:, None], holding.origin]
    _, chosen, inverse = np.unique(
        np.concatenate(columns, 1), axis=0, return_index=True, return_inverse=True
    )
    return chosen, inverse.reshape(-1)


def _shapes(
    leaf: FleetLeaf, holding: _Holding, chosen: Ints, planner: RegionPlanner
) -> Iterator[Shape]:
    entry = leaf.entry
    if 0 in entry.shape:
        return
    alike = holding.alike[chosen]
    parts = np.array(holding.cells.parts, np.int64)
    strides = np.array(row_major_strides(entry.shape), np.int64)
    for number in np.unique(alike):
        processes = np.flatnonzero(alike == number)
        first = int(chosen[processes[0]])
        local = holding.local(first)
        read = LeafRead.plain(entry.name, entry, local, entry.dtype.numpy)
        found = sorted(planner.regions(0, read), key=lambda region: region.start)
        shift = (holding.origin[chosen[processes]] - holding.origin[first]) * parts @ strides
        yield Shape(
            processes,
            tuple(region._replace(start=region.start - entry.start) for region in found),
            shift * entry.dtype.bits // 8,
            tuple(held_bytes(read, region.layout) for region in found),
            sum(box.size for box in local.boxes),
        )


class _Sums:
    """Costs of processes, as vectors."""

    def __init__(self, processes: int, profile: StorageProfile) -> None:
        self._profile = profile
        zeros = [np.zeros(processes, np.int64) for _ in range(7)]
        self._tensors, self._needed, self._read, self._requests, *zeros = zeros
        self._files, self._held, self._most_held = zeros
        self._staged = np.zeros(processes, bool)
        self._padded = np.zeros(processes, bool)
        self._small: dict[int, list[tuple[Shape, int, SmallRequest, int]]] = {}

    def add_kind(self, kind: Kind) -> None:
        """Adds all that does not depend on the neighbours in the file."""
        small = self._small[id(kind)] = []
        for shape in kind.shapes:
            mine = shape.processes
            self._tensors[mine] += kind.tensors
            for number, (region, held) in enumerate(zip(shape.regions, shape.held, strict=True)):
                read = region.read
                self._needed[mine] += kind.tensors * read.runs.total_bytes
                self._held[mine] += kind.tensors * held
                self._staged[mine] |= not read.direct
                self._padded[mine] |= not read.direct and bool(read.blocking.pad_bytes)
                requests = read.storage_requests(self._profile)
                request = SmallRequest.of(read, self._profile)
                if request is not None:
                    small.append((shape, number, request, requests))
                    continue
                self._read[mine] += kind.tensors * read.requests.total_bytes
                self._requests[mine] += kind.tensors * requests
                self._most_held[mine] = np.maximum(self._most_held[mine], held)

    def add_file(self, tensors: Sequence[tuple[TensorEntry, Kind]]) -> None:
        """Adds the small regions of a file, and the file."""
        opened = np.zeros(len(self._files), bool)
        for kind in {id(kind): kind for _, kind in tensors}.values():
            for shape in kind.shapes:
                opened[shape.processes] = True
        self._files += opened
        group = _Groups(len(opened), self._profile.max_gap_bytes)
        for entry, kind in tensors:
            for shape, number, request, requests in self._small[id(kind)]:
                group.add(entry.start, shape, number, request, requests)
        self._read += group.read
        self._requests += group.requests
        np.maximum(self._most_held, group.most_held, out=self._most_held)

    def costs(self, memory_budget_bytes: int) -> tuple[Cost, ...]:
        most = np.maximum(self._most_held, memory_budget_bytes)
        staging = staging_bytes(self._profile, padded=False)
        padded = staging_bytes(self._profile, padded=True)
        peak = np.minimum(self._held, most) + np.where(
            self._staged, np.where(self._padded, padded, staging), 0
        )
        columns = (self._tensors, self._needed, self._read, self._requests, self._files, peak)
        return tuple(Cost(*row) for row in np.stack(columns, 1).tolist())


class _Groups:
    """`groups.grouped` of one file for all processes."""

    def __init__(self, processes: int, max_gap_bytes: int) -> None:
        self._max_gap_bytes = max_gap_bytes
        self._processes = processes
        zeros = [np.zeros(processes, np.int64) for _ in range(9)]
        self.read, self.requests, self.most_held, *zeros = zeros
        self._first, self._end, self._limit, self._buffers, self._held, self._alone = zeros
        self._shared = np.full(processes, -1)  # of the pending group; -1 where there is none

    def add(
        self, base: int, shape: Shape, number: int, request: SmallRequest, requests: int
    ) -> None:
        """Adds a region of each of some processes.

        Args:
            base: First byte of the tensor.
            shape: The regions.
            number: Which of them.
            request: What it brings to a group.
            requests: Ranged reads that fetch it alone.
        """
        region = shape.regions[number]
        everyone = len(shape.processes) == self._processes
        mine: slice | Ints = slice(None) if everyone else shape.processes
        start = shape.shift + (base + region.start)
        stop = start + request.length
        gap = start - self._end[mine]
        join = (
            (self._shared[mine] == region.layout.shared)
            & (gap >= 0)
            & (gap <= self._max_gap_bytes)
            & (stop - self._first[mine] <= np.minimum(self._limit[mine], request.limit))
            & (self._buffers[mine] + request.buffers <= MAX_GROUP_BUFFERS)
        )
        self.read[mine] += request.length + np.where(join, gap, 0)
        self.requests[mine] += np.where(join, 1 - self._alone[mine], requests)
        self._alone[mine] = np.where(join, 1, requests)
        self._first[mine] = np.where(join, self._first[mine], start)
        limit = np.minimum(self._limit[mine], request.limit)
        self._limit[mine] = np.where(join, limit, request.limit)
        self._buffers[mine] = np.where(join, self._buffers[mine], 0) + request.buffers
        self._held[mine] = np.where(join, self._held[mine], 0) + shape.held[number]
        self.most_held[mine] = np.maximum(self.most_held[mine], self._held[mine])
        self._shared[mine] = region.layout.shared
        self._end[mine] = stop
