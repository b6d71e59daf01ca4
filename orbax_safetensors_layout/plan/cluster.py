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

import numpy as np

from orbax_safetensors_layout.format import NewTensor, TensorEntry, lay_out, piece_file_prefix
from orbax_safetensors_layout.geometry import row_major_strides
from orbax_safetensors_layout.options import StorageProfile, WriteOptions
from orbax_safetensors_layout.sharding import GlobalShards, Ints, MeshShape, Partition, Spec

from .cluster_costs import ClusterTensor, CostVectors, ShardClass, TensorClass
from .coalesce import HeldBound, requests_of
from .cost import Cost
from .leaf_reads import LeafRead
from .planner import RegionPlanner
from .reads import held_bytes, slab_bytes
from .regions import ByteRegion
from .writes import LeafWrite, WritePlan, plan_writes


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The shares of all processes of one load.

    Attributes:
        leaves: The tensors.
        grid: The devices.
        profile: The cost model.
        kinds: The classes of tensors.
        kind_of: For each tensor the number of its class.
        distinct: For each process the number of its cost in `costs`.
        costs: The costs of processes that differ.
    """

    leaves: tuple[ClusterTensor, ...]
    grid: MeshShape
    profile: StorageProfile
    kinds: tuple[TensorClass, ...]
    kind_of: tuple[int, ...]
    distinct: Ints
    costs: tuple[Cost, ...]

    def cost(self, process: int) -> Cost:
        """Return the cost of one process, equal to its `ReadPlan.cost`."""
        return self.costs[int(self.distinct[process])]

    def files(self) -> Iterator[tuple[str, list[tuple[TensorEntry, TensorClass]]]]:
        """Yields each file with its tensors, by offset, and their classes."""
        yield from _files(self.leaves, self.kind_of, self.kinds)


def plan_cluster(
    leaves: Sequence[ClusterTensor],
    grid: MeshShape,
    *,
    profile: StorageProfile,
    memory_budget_bytes: int,
) -> ClusterPlan:
    """Plan the reads of all processes, for devices with memory of their own.

    Args:
        leaves: The tensors.
        grid: The devices and processes.
        profile: Cost model of the storage class.
        memory_budget_bytes: As for `plan_reads`.

    Raises:
        ValueError: A spec does not fit its tensor.
    """
    numbers: dict[tuple[object, ...], int] = {}
    firsts: list[ClusterTensor] = []
    kind_of = []
    for leaf in leaves:
        key = (leaf.entry.shape, leaf.entry.dtype.code, leaf.spec)
        kind_of.append(numbers.setdefault(key, len(numbers)))
        if len(numbers) > len(firsts):
            firsts.append(leaf)
    counts = collections.Counter(kind_of)  # in the order of `firsts`
    partitions = [_partition(leaf, grid) for leaf in firsts]
    chosen, distinct = _distinct(partitions, grid.processes)
    slabs = slab_bytes(profile, memory_budget_bytes)
    planner = RegionPlanner(profile, memory_budget_bytes, slabs)
    kinds = tuple(
        TensorClass(
            count,
            leaf,
            tuple(_shapes(leaf, partition, chosen, planner, memory_budget_bytes)),
            partition.shard_elements,
        )
        for count, leaf, partition in zip(counts.values(), firsts, partitions, strict=True)
    )
    sums = CostVectors(len(chosen), profile)
    for kind in kinds:
        sums.add_kind(kind)
    for _, tensors in _files(leaves, kind_of, kinds):
        sums.add_file(tensors)
    costs = sums.costs(memory_budget_bytes)
    return ClusterPlan(tuple(leaves), grid, profile, kinds, tuple(kind_of), distinct, costs)


def _files(
    leaves: Sequence[ClusterTensor], kind_of: Sequence[int], kinds: Sequence[TensorClass]
) -> Iterator[tuple[str, list[tuple[TensorEntry, TensorClass]]]]:
    by_file: dict[str, list[tuple[TensorEntry, TensorClass]]] = {}
    for leaf, number in zip(leaves, kind_of, strict=True):
        by_file.setdefault(leaf.entry.file, []).append((leaf.entry, kinds[number]))
    for file, tensors in sorted(by_file.items()):
        yield file, sorted(tensors, key=lambda item: item[0].start)


def _partition(leaf: ClusterTensor, grid: MeshShape) -> Partition:
    return Partition.of(leaf.entry.shape, leaf.spec, grid, packed=leaf.entry.dtype.packed)


def _distinct(partitions: Sequence[Partition], processes: int) -> tuple[Ints, Ints]:
    """Return processes that differ in some partition, and for each process its number in them."""
    columns = [np.zeros((processes, 1), np.int64)]
    for partition in partitions:
        columns += [partition.alike[:, None], partition.origin]
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
    classes = partition.alike[chosen]
    parts = np.array(partition.cells.parts, np.int64)
    strides = np.array(row_major_strides(entry.shape), np.int64)
    for number in np.unique(classes):
        processes = np.flatnonzero(classes == number)
        first = int(chosen[processes[0]])
        local = partition.local(first)
        read = LeafRead.plain(entry.name, entry, local, entry.dtype.numpy)
        regions = sorted(planner.regions(0, read), key=lambda region: region.start)
        moved = [region._replace(start=region.start - entry.start) for region in regions]
        fetches = tuple(requests_of(moved, HeldBound(functools.partial(_held, read), most_held)))
        shift = (partition.origin[chosen[processes]] - partition.origin[first]) * parts @ strides
        yield ShardClass(
            processes,
            fetches,
            shift * entry.dtype.bits // 8,
            tuple(sum(_held(read, region) for region in fetch.regions) for fetch in fetches),
            sum(box.size for box in local.boxes),
        )


def _held(read: LeafRead, region: ByteRegion) -> int:
    return held_bytes(read, region.layout)


def plan_cluster_writes(
    leaves: Sequence[ClusterTensor], grid: MeshShape, options: WriteOptions
) -> tuple[Cost, ...]:
    """Return the cost of each process: its `WritePlan.cost`, but for the headers of pieces.

    Raises:
        ValueError: A spec does not fit its tensor.
    """
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
        owners = _piece_owners(plan)
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


def _piece_owners(plan: WritePlan) -> list[int]:
    """Return the process that writes each file of pieces."""
    assert plan.stored is not None
    owners = {piece_file_prefix(process): process for process in range(plan.process_count)}
    prefixes = [name.rpartition("/")[2].rpartition("-of-")[0] for name in plan.stored.files]
    return [owners[f"{prefix}-of-"] for prefix in prefixes]
