"""Plans the reads and the writes of every process of a cluster at once, and their costs.

Nothing is sampled; `tests/plan/test_cluster.py` holds it equal to the `ReadPlan` of each process.

1. Tensors of one shape, dtype and spec are a `TensorClass`.
2. Processes whose shards are at equal places in all classes are one.
3. Large regions are read by themselves, so their cost depends on the class alone.
4. Small regions may share a request with their neighbours: each file is walked once by the rules of
   `coalesce.coalesced`, for all processes together, as vectors.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import NewTensor, TensorEntry, lay_out, piece_file_prefix
from orbax_safetensors_layout.geometry import Ints, row_major_strides
from orbax_safetensors_layout.options import StorageProfile, WriteOptions
from orbax_safetensors_layout.sharding import GlobalShards, MeshShape, Partition, Placed, Spec

from .cluster_exchange import plan_cluster_exchange
from .coalesce import Request, SmallRequest, requests_of
from .cost import Cost, LeafCost
from .exchange_plan import ExchangePolicy
from .leaf_reads import LeafRead
from .planner import RegionPlanner
from .reads import held_bytes, staging_bytes
from .writes import LeafWrite, WritePlan, plan_writes


class ClusterTensor(NamedTuple):
    """One tensor that is loaded as it is stored, and its sharding."""

    entry: TensorEntry
    spec: Spec

    def in_shards(self, mesh: MeshShape) -> ClusterTensor:
        """Return the tensor as layout `sharded` stores it: all of a shard in one place."""
        entry, spec = self
        if entry.dtype.packed:
            return self
        ways = tuple(map(mesh.ways, spec))
        shard = (n // parts for n, parts in zip(entry.shape, ways, strict=False))
        return ClusterTensor(entry._replace(shape=(*ways, *shard, *entry.shape[len(ways) :])), spec)


class ClassRequest(NamedTuple):
    """A request that some processes make for each tensor of a class."""

    request: Request  # of the first process; `start` is relative to the tensor
    held_bytes: int  # host bytes of its tiles
    read_bytes: int  # where it is in no group
    requests: int  # likewise
    small: SmallRequest | None  # how it may be in a group, if it may


class ShardClass(NamedTuple):
    """Processes that read each tensor of a class in the same way, but for the offset."""

    processes: Ints  # [n] the processes, counted among those that differ
    requests: tuple[ClassRequest, ...]
    shift: Ints  # [n] bytes from the first process's requests to those of each
    elements: int  # elements of the distinct shards of one process


class TensorClass(NamedTuple):
    """Tensors of one shape, dtype and spec."""

    tensors: int  # number of tensors
    first: ClusterTensor  # the first of them
    shard_classes: tuple[ShardClass, ...]
    shard_bytes: int  # bytes of one device's shard

    @property
    def processes(self) -> Ints:
        """The processes that hold them, counted among those that differ."""
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *(shards.processes for shards in self.shard_classes)])


_ClusterFile = tuple[str, list[tuple[TensorEntry, TensorClass]]]
"""A file, and its tensors by offset with their classes."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The shares of all processes of one load."""

    leaves: tuple[ClusterTensor, ...]
    classes: tuple[TensorClass, ...]
    class_of: tuple[int, ...]  # for each leaf the number of its class
    files: tuple[_ClusterFile, ...]
    distinct: Ints  # for each process the number of its cost in `costs`
    costs: tuple[Cost, ...]  # the costs of processes that differ, without what is exchanged
    exchanged: frozenset[int]  # numbers of the classes that one process reads for all
    exchange_costs: tuple[Cost, ...]  # of all processes, if anything is exchanged

    def cost(self, process: int) -> Cost:
        """Return the cost of one process, equal to its `ReadPlan.cost` where each reads."""
        alone = self.costs[int(self.distinct[process])]
        return alone + self.exchange_costs[process] if self.exchange_costs else alone

    def holders(self, tensor_class: TensorClass) -> tuple[Ints, int]:
        """Return the processes that hold tensors of a class, as in `costs`, and their number."""
        of_costs = tensor_class.processes
        return of_costs, int(np.isin(self.distinct, of_costs).sum())


@dataclasses.dataclass(frozen=True)
class PlannedShares:
    """The shares of processes in a load."""

    parameters: int
    processes: tuple[int, ...]  # those that were planned
    costs: tuple[Cost, ...]  # theirs
    process_parameters: tuple[int, ...]
    leaf_costs: tuple[LeafCost, ...]
    shards: tuple[tuple[str, int], ...]  # each leaf, and the bytes of one device's shard
    placed: tuple[Placed, ...]  # leaves that rules shard
    cluster: ClusterPlan | None = None  # where all processes were planned at once
    leaves: tuple[ClusterTensor, ...] = ()  # as tensors, where `sharded` could store them


def plan_cluster(
    leaves: Sequence[ClusterTensor],
    mesh: MeshShape,
    *,
    profile: StorageProfile,
    memory_budget_bytes: int,
    exchange: ExchangePolicy | None = None,
    joins_gaps: bool = True,
) -> ClusterPlan:
    """Plan the reads of all processes, for devices with memory of their own.

    With `exchange` what several need is read once, as it says; `joins_gaps` as in `plan_reads`.
    """
    keys = [(leaf.entry.shape, leaf.entry.dtype.code, leaf.spec) for leaf in leaves]
    counts = collections.Counter(keys)  # in the order of the first tensors
    numbers = {key: number for number, key in enumerate(counts)}
    first_of = dict(zip(reversed(keys), reversed(leaves), strict=True))
    partitions = [
        Partition.of(shape, spec, mesh, packed=first_of[shape, code, spec].entry.dtype.packed)
        for shape, code, spec in counts
    ]
    chosen, distinct = _distinct(partitions, mesh.processes)
    planner = RegionPlanner(profile, memory_budget_bytes, adopt=False)
    classes = []
    for (key, count), partition in zip(counts.items(), partitions, strict=True):
        first = first_of[key]
        shards = _shard_classes(first, partition, chosen, planner, profile, memory_budget_bytes)
        shard_bytes = -(-math.prod(partition.shape) * first.entry.dtype.bits // 8)
        classes.append(TensorClass(count, first, tuple(shards), shard_bytes))
    by_file: dict[str, list[tuple[TensorEntry, TensorClass]]] = {}
    for leaf, key in zip(leaves, keys, strict=True):
        by_file.setdefault(leaf.entry.file, []).append((leaf.entry, classes[numbers[key]]))
    for tensors in by_file.values():
        tensors.sort(key=lambda item: item[0].start)
    files = tuple(sorted(by_file.items()))
    class_of = tuple(numbers[key] for key in keys)
    exchanged: set[int] = set()
    exchange_costs: tuple[Cost, ...] = ()
    if exchange is not None:
        replicas = [partition.replicas() for partition in partitions]
        exchanged, exchange_costs = plan_cluster_exchange(
            [leaf.entry for leaf in leaves],
            class_of,
            replicas,
            exchange,
            [np.isin(distinct, of_class.processes) for of_class in classes],
            profile.request_bytes,
        )
    alone = [of_class for n, of_class in enumerate(classes) if n not in exchanged]
    kept = {id(of_class) for of_class in alone}
    rest = [(file, [pair for pair in pairs if id(pair[1]) in kept]) for file, pairs in files]
    gap = profile.max_gap_bytes if joins_gaps else 0
    costs = _read_costs(alone, rest, len(chosen), gap, profile, memory_budget_bytes)
    return ClusterPlan(
        tuple(leaves),
        tuple(classes),
        class_of,
        files,
        distinct,
        costs,
        frozenset(exchanged),
        exchange_costs,
    )


def _distinct(partitions: Sequence[Partition], processes: int) -> tuple[Ints, Ints]:
    """Return processes that differ in some partition, and for each process its number in them."""
    columns = [np.zeros((processes, 1), np.int64)]
    for partition in partitions:
        columns += [partition.likeness[:, None], partition.origin]
    _, chosen, inverse = np.unique(
        np.concatenate(columns, 1), axis=0, return_index=True, return_inverse=True
    )
    return chosen, inverse.reshape(-1)


def _shard_classes(
    leaf: ClusterTensor,
    partition: Partition,
    chosen: Ints,
    planner: RegionPlanner,
    profile: StorageProfile,
    most_held: int,
) -> Iterator[ShardClass]:
    entry = leaf.entry
    if 0 in entry.shape:
        return
    likeness = partition.likeness[chosen]
    strides = np.array(row_major_strides(entry.shape), np.int64)
    for number in np.unique(likeness):
        processes = np.flatnonzero(likeness == number)
        first = int(chosen[processes[0]])
        local = partition.local(first)
        read = LeafRead.plain(entry.name, entry, local, entry.dtype.numpy)
        regions = sorted(planner.regions(0, read), key=lambda region: region.start)
        moved = [region._replace(start=region.start - entry.start) for region in regions]
        held = functools.partial(held_bytes, read)
        requests = tuple(
            ClassRequest(
                request,
                sum(map(held, request.regions)),
                *request.cost(),
                SmallRequest.of(request, profile),
            )
            for request in requests_of(moved, held, most_held)
        )
        steps = partition.origin[chosen[processes]] - partition.origin[first]
        shift = steps * np.array(partition.shape, np.int64) @ strides * entry.dtype.bits // 8
        yield ShardClass(processes, requests, shift, local.elements)


def _read_costs(
    classes: Sequence[TensorClass],
    cluster_files: Sequence[_ClusterFile],
    processes: int,
    max_gap_bytes: int,
    profile: StorageProfile,
    memory_budget_bytes: int,
) -> tuple[Cost, ...]:
    """Return the costs of processes that differ, added up as vectors."""
    tensors, needed, read, requests, files, held, most_held = np.zeros((7, processes), np.int64)
    staged, padded = np.zeros((2, processes), bool)
    for tensor_class in classes:  # the part of a class that does not depend on neighbours in a file
        count = tensor_class.tensors
        for shards in tensor_class.shard_classes:
            rows = shards.processes
            tensors[rows] += count
            for alone in shards.requests:
                plan = alone.request.read
                needed[rows] += count * alone.request.needed_bytes
                held[rows] += count * alone.held_bytes
                staged[rows] |= not plan.direct
                padded[rows] |= not plan.direct and bool(plan.blocking.pad_bytes)
                if alone.small is None:
                    read[rows] += count * alone.read_bytes
                    requests[rows] += count * alone.requests
                    most_held[rows] = np.maximum(most_held[rows], alone.held_bytes)
    for _, of_file in cluster_files:
        opened = np.zeros(processes, bool)
        groups = _Groups(processes, max_gap_bytes)
        for tensor_class in {id(of_tensor): of_tensor for _, of_tensor in of_file}.values():
            opened[tensor_class.processes] = True
        for entry, tensor_class in of_file:
            for shards in tensor_class.shard_classes:
                for alone in shards.requests:
                    if alone.small is not None:
                        groups.add(entry.start, shards, alone, alone.small)
        files += opened
        read += groups.read
        requests += groups.requests
        most_held = np.maximum(most_held, groups.most_held)
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
        self.read, self.requests, self.most_held = np.zeros((3, processes), np.int64)
        # The pending group of each process: whether its tiles are `_shared`; -1 without one.
        self._shared = np.full(processes, -1)
        self._first, self._end, self._limit = np.zeros((3, processes), np.int64)
        self._buffers, self._held = np.zeros((2, processes), np.int64)
        # Changes when a region that was alone is joined by another.
        self._more_requests, self._more_bytes = np.zeros((2, processes), np.int64)

    def add(self, base: int, shards: ShardClass, alone: ClassRequest, small: SmallRequest) -> None:
        """Adds a request of a class for a tensor at byte `base`."""
        shared = alone.request.regions[0].layout.shared
        everyone = len(shards.processes) == self._processes
        rows: slice | Ints = slice(None) if everyone else shards.processes
        start = shards.shift + (base + alone.request.start)
        end = start + small.length
        gap, span = start - self._end[rows], end - self._first[rows]
        limit = np.minimum(self._limit[rows], small.limit)
        join = small.may_join(gap, span, limit, self._buffers[rows], self._max_gap_bytes)
        join &= self._shared[rows] == shared
        joined = gap + small.length + self._more_bytes[rows]
        self.read[rows] += np.where(join, joined, alone.read_bytes)
        self._more_bytes[rows] = np.where(join, 0, small.length - alone.read_bytes)
        self.requests[rows] += np.where(join, self._more_requests[rows], alone.requests)
        self._more_requests[rows] = np.where(join, 0, 1 - alone.requests)
        self._first[rows] = np.where(join, self._first[rows], start)
        self._limit[rows] = np.where(join, limit, small.limit)
        self._buffers[rows] = np.where(join, self._buffers[rows], 0) + small.buffers
        self._held[rows] = np.where(join, self._held[rows], 0) + alone.held_bytes
        self.most_held[rows] = np.maximum(self.most_held[rows], self._held[rows])
        self._shared[rows] = shared
        self._end[rows] = end


def plan_cluster_writes(
    leaves: Sequence[ClusterTensor], mesh: MeshShape, options: WriteOptions
) -> tuple[Cost, ...]:
    """Return the cost of each process: its `WritePlan.cost`, but for the headers of pieces."""
    held: dict[tuple[tuple[int, ...], Spec], GlobalShards] = {}
    writes = []
    for entry, spec in leaves:
        key = (entry.shape, spec)
        if key not in held:
            held[key] = Partition.of(entry.shape, spec, mesh).held()
        tensor = NewTensor(entry.name, entry.dtype, entry.shape)
        writes.append(LeafWrite(tensor, entry.dtype.numpy, held[key]))
    plan = plan_writes(writes, options=options, process_count=mesh.processes)
    return _write_costs(plan, {"format": "pt", **options.metadata})


def _write_costs(plan: WritePlan, metadata: dict[str, str]) -> tuple[Cost, ...]:
    tensors, needed, read, written, files = np.zeros((5, plan.process_count), np.int64)
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
        files[owners] += 1
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
