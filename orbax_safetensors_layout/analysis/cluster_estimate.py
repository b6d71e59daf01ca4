"""What a load costs a cluster that one need not have, from headers and sharding rules alone.

No device, no JAX. `forecast_tree` does the same for trees of abstract arrays, and for what is not
one tensor a leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from orbax_safetensors_layout.catalog import Catalog, find_quantization
from orbax_safetensors_layout.options import (
    ReadOptions,
    StorageProfile,
    WriteOptions,
    given_or_default,
)
from orbax_safetensors_layout.plan import (
    ClusterPlan,
    ClusterTensor,
    Cost,
    TensorClass,
    plan_cluster,
    plan_cluster_writes,
)
from orbax_safetensors_layout.sharding import (
    MeshShape,
    Misfit,
    Placed,
    ShardingRule,
    ShardingRules,
    Spec,
)

from .inspection import read_configuration

_NETWORK_BYTES_PER_SECOND = 25e9 / 8


class HostRate(NamedTuple):
    """What a time is estimated from.

    Attributes:
        request_seconds: Time of one request, without its bytes, and some are made at once.
        bytes_per_second: What a host reads or writes with all its streams.
    """

    request_seconds: float
    bytes_per_second: float

    @classmethod
    def of(cls, profile: StorageProfile, kind: str, bytes_per_second: float | None) -> Self:
        """The rate of a storage class.

        Args:
            profile: Its figures.
            kind: The class.
            bytes_per_second: What a host reaches. None takes one stream's rate for local files,
                whose streams share a disk, and else all streams' as far as a network of 25 Gbit/s
                carries them.
        """
        if bytes_per_second is None:
            stream = profile.bandwidth_bytes_per_second
            many = min(stream * profile.concurrency, _NETWORK_BYTES_PER_SECOND)
            bytes_per_second = stream if kind == "local" else many
        return cls(profile.latency_seconds / profile.concurrency, bytes_per_second)

    def seconds(self, cost: Cost) -> float:
        """An estimate of the time that a cost takes."""
        moved = cost.read_bytes + cost.written_bytes
        return cost.requests * self.request_seconds + moved / self.bytes_per_second


class LeafCost(NamedTuple):
    """What one leaf costs the process that it costs most, read by itself.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype's code.
        spec: Its sharding; None where it is not known as a spec.
        needed_bytes: Bytes of its shards.
        read_bytes: Bytes read for them.
        requests: Ranged reads.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    needed_bytes: int
    read_bytes: int
    requests: int

    def excess_seconds(self, rate: HostRate) -> float:
        """Time that is spent beyond reading the needed bytes in one go."""
        cost = Cost(read_bytes=self.read_bytes, requests=self.requests)
        return rate.seconds(cost) - self.needed_bytes / rate.bytes_per_second


class RuleUse(NamedTuple):
    """How many leaves a rule places; the rule None is for those that none matches."""

    rule: ShardingRule | None
    leaves: int

    @classmethod
    def tally(cls, rules: Sequence[ShardingRule], placed: Iterable[Placed]) -> tuple[Self, ...]:
        """The use of all rules."""
        uses = collections.Counter(placing.rule for placing in placed)
        numbers = [*range(len(rules)), *([None] if None in uses else [])]
        return tuple(cls(None if n is None else rules[n], uses[n]) for n in numbers)


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterEstimate:
    """What a load costs.

    Attributes:
        path: The checkpoint.
        grid: The devices and processes.
        profile: The storage's figures.
        rate: What times are estimated from.
        storage: The storage class.
        parameters: Of the model.
        checkpoint_bytes: Of all its tensors.
        checkpoint_files: How many files it has.
        leaf_count: How many leaves are loaded.
        processes: The processes that were planned.
        costs: The cost of each.
        process_parameters: The parameters that each holds.
        device_bytes: Bytes of all shards of one device, the most of any.
        largest: The largest shard of one device: its leaf and its bytes.
        leaf_costs: The leaves.
        rules: What the rules were good for.
        misfits: Leaves that cannot be sharded as the rules say.
        fleet: Where the costs come from, where all processes were planned at once.
        saves: The layout of the files that are written, where it is a save; None for a load.
    """

    path: str
    grid: MeshShape
    profile: StorageProfile
    rate: HostRate
    storage: str
    parameters: int
    checkpoint_bytes: int
    checkpoint_files: int
    leaf_count: int
    processes: tuple[int, ...]
    costs: tuple[Cost, ...]
    process_parameters: tuple[int, ...]
    device_bytes: int
    largest: tuple[str, int]
    leaf_costs: tuple[LeafCost, ...]
    rules: tuple[RuleUse, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    fleet: ClusterPlan | None = None
    saves: str | None = None

    @property
    def unused_rules(self) -> list[ShardingRule]:
        """The rules that place no leaf."""
        return [rule for rule, leaves in self.rules if rule is not None and not leaves]

    @property
    def is_complete(self) -> bool:
        """Whether every process was planned."""
        return len(self.processes) == self.grid.processes

    def seconds(self) -> list[float]:
        """The estimated time of each process."""
        return [self.rate.seconds(cost) for cost in self.costs]

    def costliest(self, count: int) -> list[LeafCost]:
        """The leaves that cost most beyond their bytes, the worst first."""
        found = [leaf for leaf in self.leaf_costs if leaf.excess_seconds(self.rate) > 0]
        return sorted(found, key=lambda leaf: -leaf.excess_seconds(self.rate))[:count]


def estimate(
    path: str | os.PathLike[str],
    grid: MeshShape,
    rules: Sequence[ShardingRule],
    *,
    options: ReadOptions | None = None,
    host_bandwidth: float | None = None,
) -> ClusterEstimate:
    """What loading every tensor of a checkpoint costs every process.

    Args:
        path: The checkpoint.
        grid: The devices and processes.
        rules: How the tensors are sharded.
        options: As for `load`; their cost model is the estimate's, too.
        host_bandwidth: Bytes per second that a host reaches; see `HostRate.of`.

    Raises:
        ValueError: A rule does not fit the mesh.
        CheckpointNotFoundError: There is nothing at `path`.
        FormatError: A file is malformed.
    """
    options = given_or_default(options, ReadOptions)
    placer = ShardingRules(rules, grid)
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
        kind, files, place = catalog.storage.kind, len(catalog.files), catalog.path
    placed = {name: placer.place(name, entry.shape) for name, entry in entries.items()}
    quantization = find_quantization(entries, read_configuration(path)[0])
    special = {} if quantization is None else quantization.parameters
    parameters = {name: special.get(name, math.prod(e.shape)) for name, e in entries.items()}
    profile = options.profile(kind)
    fleet = plan_cluster(
        [ClusterTensor(entry, placed[name].spec) for name, entry in entries.items()],
        grid,
        profile=profile,
        memory_budget_bytes=options.memory_budget_bytes,
    )
    return ClusterEstimate(
        path=place,
        grid=grid,
        profile=profile,
        rate=HostRate.of(profile, kind, host_bandwidth),
        storage=kind,
        parameters=sum(parameters.values()),
        checkpoint_bytes=sum(entry.nbytes for entry in entries.values()),
        checkpoint_files=files,
        leaf_count=len(entries),
        processes=tuple(range(grid.processes)),
        costs=tuple(fleet.cost(process) for process in range(grid.processes)),
        process_parameters=_process_parameters(fleet, parameters),
        device_bytes=sum(kind.tensors * _shard_bytes(kind) for kind in fleet.kinds),
        largest=_largest(fleet.kinds),
        leaf_costs=_leaf_costs(fleet),
        rules=RuleUse.tally(rules, placed.values()),
        misfits=tuple(placing.misfit for placing in placed.values() if placing.misfit),
        fleet=fleet,
    )


def estimate_save(found: ClusterEstimate, options: WriteOptions) -> ClusterEstimate:
    """What saving the tensors of a load again costs, from where they then are.

    Args:
        found: The load.
        options: How they are written.

    Raises:
        ValueError: The load is not of tensors as stored.
    """
    if found.fleet is None:
        raise ValueError("saves are planned of tensors as they stand, without a mapping or pieces")
    costs = plan_cluster_writes(found.fleet.leaves, found.grid, options)
    return dataclasses.replace(found, costs=costs, leaf_costs=(), fleet=None, saves=options.layout)


def _shard_bytes(kind: TensorClass) -> int:
    return -(-kind.shard_elements * kind.first.entry.dtype.bits // 8)


def _largest(kinds: Sequence[TensorClass]) -> tuple[str, int]:
    found = max(kinds, key=_shard_bytes, default=None)
    return ("", 0) if found is None else (found.first.entry.name, _shard_bytes(found))


def _process_parameters(fleet: ClusterPlan, parameters: dict[str, int]) -> tuple[int, ...]:
    totals = [0] * len(fleet.kinds)
    for leaf, number in zip(fleet.leaves, fleet.kind_of, strict=True):
        totals[number] += parameters[leaf.entry.name]
    held = [0] * len(fleet.costs)
    for kind, total in zip(fleet.kinds, totals, strict=True):
        size = math.prod(kind.first.entry.shape)
        for shape in kind.shapes:
            share = total * shape.elements // size
            for process in shape.processes.tolist():
                held[process] += share
    return tuple(held[number] for number in fleet.distinct.tolist())


def _leaf_costs(fleet: ClusterPlan) -> tuple[LeafCost, ...]:
    worst = []
    for kind in fleet.kinds:
        found = [(0, 0, 0)]
        for shape in kind.shapes:
            costs = [fetch.cost(fleet.profile) for fetch in shape.fetches]
            needed = sum(r.read.runs.total_bytes for f in shape.fetches for r in f.regions)
            found.append((sum(n for n, _ in costs), sum(n for _, n in costs), needed))
        worst.append(max(found))
    return tuple(
        LeafCost(
            leaf.entry.name,
            leaf.entry.shape,
            leaf.entry.dtype.code,
            leaf.spec,
            worst[number][2],
            worst[number][0],
            worst[number][1],
        )
        for leaf, number in zip(fleet.leaves, fleet.kind_of, strict=True)
    )
