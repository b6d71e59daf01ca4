"""Plans the reads and the writes of every process of a cluster at once, and their costs.

Nothing is sampled; `test_fleet.py` holds the result equal to the `ReadPlan` of each process.

1. Tensors of one shape, dtype and spec are a `TensorClass`.
2. Processes whose shards are at equal places in all classes are one.
3. Large regions are read by themselves, so their cost depends on the class alone.
4. Small regions may share a request with their neighbours: each file is walked once by the rules of
   `coalesce.coalesced`, for all processes together, as vectors.

The costs of a save follow from the one write plan that all processes share.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import NewTensor, TensorEntry, lay_out, piece_file_prefix
from orbax_safetensors_layout.geometry import row_major_strides
from orbax_safetensors_layout.options import StorageProfile, WriteOptions
from orbax_safetensors_layout.sharding import GlobalShards, Ints, MeshShape, Partition, Spec

from .coalesce import MAX_GROUP_BUFFERS, Request, SmallRequest, requests_of
from .cost import Cost
from .leaf_reads import LeafRead
from .planner import RegionPlanner
from .reads import held_bytes, slab_bytes, staging_bytes
from .regions import ByteRegion
from .writes import LeafWrite, WritePlan, plan_writes


class ClusterTensor(NamedTuple):
    """One tensor that is loaded as it is stored, and its sharding."""

    entry: TensorEntry
    spec: Spec


class ShardClass(NamedTuple):
    """Processes that read each tensor of a class in the same way, but for the offset."""

    processes: Ints  # [n] the processes, counted among those that differ
    fetches: tuple[Request, ...]  # requests of the first process; `start` is relative to the tensor
    shift: Ints  # [n] bytes from the first process's requests to those of each
    held: tuple[int, ...]  # host bytes of the tiles of each request
    elements: int  # elements of the distinct shards of one process


class TensorClass(NamedTuple):
    """Tensors of one shape, dtype and spec."""

    tensors: int  # number of tensors
    first: ClusterTensor  # the first of them
    shapes: tuple[ShardClass, ...]  # the shards of processes
    shard_elements: int  # elements of one device's shard


_ClusterFile = tuple[str, list[tuple[TensorEntry, TensorClass]]]
"""A file, and its tensors by offset with their classes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The shares of all processes of one load."""

    leaves: tuple[ClusterTensor, ...]
    profile: StorageProfile
    kinds: tuple[TensorClass, ...]  # the classes of tensors
    kind_of: tuple[int, ...]  # for each tensor the number of its class
    files: tuple[_ClusterFile, ...]
    distinct: Ints  # for each process the number of its cost in `costs`
    costs: tuple[Cost, ...]  # the costs of processes that differ

    def cost(self, process: int) -> Cost:
        """Return the cost of one process, equal to its `ReadPlan.cost`."""
        return self.costs[int(self.distinct[process])]


def plan_cluster(
    leaves: Sequence[ClusterTensor],
    grid: MeshShape,
    *,
    profile: StorageProfile,
    memory_budget_bytes: int,
) -> ClusterPlan:
    """Plan the reads of all processes, for devices with memory of their own."""
    numbers: dict[tuple[object, ...], int] = {}
    representatives: list[ClusterTensor] = []
    kind_of = []
    for leaf in leaves:
        key = (leaf.entry.shape, leaf.entry.dtype.code, leaf.spec)
        kind_of.append(numbers.setdefault(key, len(numbers)))
        if len(numbers) > len(representatives):
            representatives.append(leaf)
    counts = collections.Counter(kind_of)  # in the order of `representatives`
    partitions = [
        Partition.of(leaf.entry.shape, leaf.spec, grid, packed=leaf.entry.dtype.packed)
        for leaf in representatives
    ]
    chosen, distinct = _distinct(partitions, grid.processes)
    slabs = slab_bytes(profile, memory_budget_bytes)
    planner = RegionPlanner(profile, memory_budget_bytes, slabs, slabs)
    kinds = tuple(
        TensorClass(
            count,
            leaf,
            tuple(_shapes(leaf, partition, chosen, planner, memory_budget_bytes)),
            partition.shard_elements,
        )
        for count, leaf, partition in zip(counts.values(), representatives, partitions, strict=True)
    )
    by_file: dict[str, list[tuple[TensorEntry, TensorClass]]] = {}
    for leaf, number in zip(leaves, kind_of, strict=True):
        by_file.setdefault(leaf.entry.file, []).append((leaf.entry, kinds[number]))
    for tensors in by_file.values():
        tensors.sort(key=lambda item: item[0].start)
    files = tuple(sorted(by_file.items()))
    costs = _read_costs(kinds, files, len(chosen), profile, memory_budget_bytes)
    return ClusterPlan(tuple(leaves), profile, kinds, tuple(kind_of), files, distinct, costs)


def _distinct(partitions: Sequence[Partition], processes: int) -> tuple[Ints, Ints]:
    """Return processes that differ in some partition, and for each process its number in them."""
    columns = [np.zeros((processes, 1), np.int64)]
    for partition in partitions:
        columns += [partition.likeness[:, None], partition.origin]
    _, chosen, inverse = np.unique(
        np.concatenate(columns, 1), axis=0, return_index=True, return_inverse=True
    )
    return chosen, inverse.reshape(-1)


def _shapes(
    leaf: ClusterTensor, partition: Partition, chosen: Ints, planner: RegionPlanner, most_held: int
) -> Iterator[ShardClass]:
    entry = leaf.entry
    if 0 in entry.shape:
        return
    classes = partition.likeness[chosen]
    parts = np.array(partition.shards.parts, np.int64)
    strides = np.array(row_major_strides(entry.shape), np.int64)
    for number in np.unique(classes):
        processes = np.flatnonzero(classes == number)
        first = int(chosen[processes[0]])
        local = partition.local(first)
        read = LeafRead.plain(entry.name, entry, local, entry.dtype.numpy)
        regions = sorted(planner.regions(0, read), key=lambda region: region.start)
        moved = [region._replace(start=region.start - entry.start) for region in regions]
        held = functools.partial(_held, read)
        fetches = tuple(requests_of(moved, held, most_held))
        shift = (partition.origin[chosen[processes]] - partition.origin[first]) * parts @ strides
        yield ShardClass(
            processes,
            fetches,
            shift * entry.dtype.bits // 8,
            tuple(sum(map(held, fetch.regions)) for fetch in fetches),
            local.elements,
        )


def _held(read: LeafRead, region: ByteRegion) -> int:
    return held_bytes(read, region.layout)


class _Small(NamedTuple):
    """A fetch that may share a request; by itself it takes `alone_requests` of `alone_bytes`."""

    request: SmallRequest
    alone_requests: int
    alone_bytes: int


def _read_costs(
    kinds: Sequence[TensorClass],
    cluster_files: Sequence[_ClusterFile],
    processes: int,
    profile: StorageProfile,
    memory_budget_bytes: int,
) -> tuple[Cost, ...]:
    """Return the costs of processes that differ, added up as vectors."""
    zeros = [np.zeros(processes, np.int64) for _ in range(7)]
    tensors, needed, read, requests, files, held, most_held = zeros
    staged, padded = np.zeros((2, processes), bool)
    small: dict[int, list[tuple[ShardClass, int, _Small]]] = {}
    for kind in kinds:  # the part of a class that does not depend on neighbours in a file
        small[id(kind)] = []
        for shape in kind.shapes:
            rows = shape.processes
            tensors[rows] += kind.tensors
            for number, (fetch, tile_bytes) in enumerate(
                zip(shape.fetches, shape.held, strict=True)
            ):
                needed[rows] += kind.tensors * fetch.needed_bytes
                held[rows] += kind.tensors * tile_bytes
                staged[rows] |= not fetch.read.direct
                padded[rows] |= not fetch.read.direct and bool(fetch.read.blocking.pad_bytes)
                alone_bytes, alone_requests = fetch.cost(profile)
                request = SmallRequest.of(fetch, profile)
                if request is not None:
                    alone = _Small(request, alone_requests, alone_bytes)
                    small[id(kind)].append((shape, number, alone))
                    continue
                read[rows] += kind.tensors * alone_bytes
                requests[rows] += kind.tensors * alone_requests
                most_held[rows] = np.maximum(most_held[rows], tile_bytes)
    for _, of_file in cluster_files:
        opened = np.zeros(processes, bool)
        group = _Groups(processes, profile.max_gap_bytes)
        for kind in {id(kind): kind for _, kind in of_file}.values():
            for shape in kind.shapes:
                opened[shape.processes] = True
        for entry, kind in of_file:
            for shape, number, alone in small[id(kind)]:
                group.add(entry.start, shape, number, alone)
        files += opened
        read += group.read
        requests += group.requests
        most_held = np.maximum(most_held, group.most_held)
    staging = np.where(
        padded, staging_bytes(profile, padded=True), staging_bytes(profile, padded=False)
    )
    peak = np.minimum(held, np.maximum(most_held, memory_budget_bytes)) + staging * staged
    columns = np.stack([tensors, needed, read, requests, files, peak], 1)
    return tuple(Cost(*row) for row in columns.tolist())


class _Groups:
    """`coalesce.coalesced` of one file for all processes."""

    def __init__(self, processes: int, max_gap_bytes: int) -> None:
        self._max_gap_bytes = max_gap_bytes
        self._processes = processes
        zeros = [np.zeros(processes, np.int64) for _ in range(10)]
        self.read, self.requests, self.most_held, *zeros = zeros
        self._first, self._end, self._limit, self._buffers, self._held, *zeros = zeros
        # Changes when a region that was alone is joined by another.
        self._more_requests, self._more_bytes = zeros
        self._shared = np.full(processes, -1)  # of the pending group; -1 where there is none

    def add(self, base: int, shape: ShardClass, number: int, small: _Small) -> None:
        """Adds fetch `number` of a class for a tensor at byte `base`."""
        fetch, request = shape.fetches[number], small.request
        shared = fetch.regions[0].layout.shared
        everyone = len(shape.processes) == self._processes
        rows: slice | Ints = slice(None) if everyone else shape.processes
        start = shape.shift + (base + fetch.start)
        stop = start + request.length
        gap = start - self._end[rows]
        limit = np.minimum(self._limit[rows], request.limit)
        join = (
            (self._shared[rows] == shared)
            & (gap >= 0)
            & (gap <= self._max_gap_bytes)
            & (stop - self._first[rows] <= limit)
            & (self._buffers[rows] + request.buffers <= MAX_GROUP_BUFFERS)
        )
        joined = gap + request.length + self._more_bytes[rows]
        self.read[rows] += np.where(join, joined, small.alone_bytes)
        self._more_bytes[rows] = np.where(join, 0, request.length - small.alone_bytes)
        self.requests[rows] += np.where(join, self._more_requests[rows], small.alone_requests)
        self._more_requests[rows] = np.where(join, 0, 1 - small.alone_requests)
        self._first[rows] = np.where(join, self._first[rows], start)
        self._limit[rows] = np.where(join, limit, request.limit)
        self._buffers[rows] = np.where(join, self._buffers[rows], 0) + request.buffers
        self._held[rows] = np.where(join, self._held[rows], 0) + shape.held[number]
        self.most_held[rows] = np.maximum(self.most_held[rows], self._held[rows])
        self._shared[rows] = shared
        self._end[rows] = stop


def plan_cluster_writes(
    leaves: Sequence[ClusterTensor], grid: MeshShape, options: WriteOptions
) -> tuple[Cost, ...]:
    """Return the cost of each process: its `WritePlan.cost`, but for the headers of pieces."""
    held: dict[tuple[tuple[int, ...], Spec], GlobalShards] = {}
    writes = []
    for entry, spec in leaves:
        key = (entry.shape, spec)
        if key not in held:
            held[key] = Partition.of(entry.shape, spec, grid).held()
        tensor = NewTensor(entry.name, entry.dtype, entry.shape)
        writes.append(LeafWrite(tensor, entry.dtype.numpy, held[key]))
    plan = plan_writes(writes, options=options, process_count=grid.processes)
    return _write_costs(plan, {"format": "pt", **options.metadata})


def _write_costs(plan: WritePlan, metadata: dict[str, str]) -> tuple[Cost, ...]:
    zeros = [np.zeros(plan.process_count, np.int64) for _ in range(5)]
    tensors, needed, read, written, files = zeros
    pieced = {} if plan.stored is None else plan.stored.tensors
    for name, owner, members in plan.files:
        files[owner] += 1
        written[owner] += lay_out(name, members, metadata).size
        gathered = sum(tensor.nbytes for tensor in members if tensor.name in pieced)
        read[owner] += gathered
        needed[owner] += sum(tensor.nbytes for tensor in members) - gathered
        tensors[owner] += sum(bool(tensor.nbytes) for tensor in members)
    if plan.stored is not None:
        process_of = {piece_file_prefix(process): process for process in range(plan.process_count)}
        prefixes = [name.rpartition("/")[2].rpartition("-of-")[0] for name in plan.stored.files]
        owners = [process_of[f"{prefix}-of-"] for prefix in prefixes]
        files[list(set(owners))] += 1
        # Of each class: elements and tensors of each process, per tensor.
        elements = np.zeros((len(plan.stored.classes), plan.process_count), np.int64)
        for number, boxes in enumerate(plan.stored.classes):
            for box in boxes:
                elements[number, owners[box.file]] += box.box.size
        for leaf in plan.leaves:
            stored = pieced.get(leaf.tensor.name)
            if stored is None:
                continue
            bits = 8 if leaf.tensor.dtype.packed else leaf.tensor.dtype.bits
            nbytes = elements[stored.number] * bits // 8
            needed += nbytes
            written += nbytes
            tensors += (nbytes > 0) & (not plan.files)
    columns = np.stack([tensors, needed, read, written, files], 1).tolist()
    return tuple(
        Cost(tensors=t, needed_bytes=n, read_bytes=r, written_bytes=w, files=f)
        for t, n, r, w, f in columns
    )
