"""Estimates the cost of a load for a hypothetical cluster, from headers alone, without JAX."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, TypeAlias

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

_NETWORK_BYTES_PER_SECOND = 25e9 / 8  # all streams' rate, by default at most


class HostRate(NamedTuple):
    """The rate of a host: of one request, without its bytes, some at once, and of all streams."""

    request_seconds: float
    bytes_per_second: float

    @classmethod
    def of(cls, profile: StorageProfile, kind: str, bytes_per_second: float | None) -> Self:
        """Return the rate of a storage class, by default a guess: local streams share a disk."""
        if bytes_per_second is None:
            stream = profile.bandwidth_bytes_per_second
            many = min(stream * profile.concurrency, _NETWORK_BYTES_PER_SECOND)
            bytes_per_second = stream if kind == "local" else many
        return cls(profile.latency_seconds / profile.concurrency, bytes_per_second)

    def seconds(self, cost: Cost) -> float:
        moved = cost.read_bytes + cost.written_bytes
        return cost.requests * self.request_seconds + moved / self.bytes_per_second


class LeafCost(NamedTuple):
    """The cost of one leaf, read by itself, to the process that it costs most."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    needed_bytes: int  # of its shards
    read_bytes: int
    requests: int

    def excess_seconds(self, rate: HostRate) -> float:
        """Return the time that is spent beyond reading the needed bytes in one go."""
        cost = Cost(read_bytes=self.read_bytes, requests=self.requests)
        return rate.seconds(cost) - self.needed_bytes / rate.bytes_per_second


RuleUses: TypeAlias = tuple[tuple[ShardingRule | None, int], ...]
"""Rules, None for leaves that none matches, and how many leaves each places."""


def rule_uses(rules: Sequence[ShardingRule], placed: Iterable[Placed]) -> RuleUses:
    """Return the use of all rules."""
    uses = collections.Counter(placing.rule for placing in placed)
    used = tuple((rule, uses[number]) for number, rule in enumerate(rules))
    return (*used, (None, uses[None])) if None in uses else used


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterEstimate:
    """The cost of a load, or of a save, to a cluster."""

    path: str
    grid: MeshShape
    profile: StorageProfile
    rate: HostRate
    storage: str
    parameters: int
    checkpoint_bytes: int
    checkpoint_files: int
    leaf_count: int
    processes: tuple[int, ...]  # those that were planned
    costs: tuple[Cost, ...]  # theirs
    process_parameters: tuple[int, ...]
    device_bytes: int  # of all shards of one device, the most of any
    largest: tuple[str, int]  # leaf and bytes of the largest of these shards
    leaf_costs: tuple[LeafCost, ...]
    rules: RuleUses = ()
    misfits: tuple[Misfit, ...] = ()
    cluster: ClusterPlan | None = None  # where all processes were planned at once
    saves: str | None = None  # layout of the files of a save

    @property
    def unused_rules(self) -> list[ShardingRule]:
        return [rule for rule, leaves in self.rules if rule is not None and not leaves]

    @property
    def is_complete(self) -> bool:
        return len(self.processes) == self.grid.processes

    def seconds(self) -> list[float]:
        return [self.rate.seconds(cost) for cost in self.costs]

    def costliest(self, count: int) -> list[LeafCost]:
        """Return the leaves that cost most beyond their bytes, the worst first."""
        excess = {leaf: leaf.excess_seconds(self.rate) for leaf in self.leaf_costs}
        costly = [leaf for leaf in self.leaf_costs if excess[leaf] > 0]
        return sorted(costly, key=lambda leaf: -excess[leaf])[:count]


def estimate(
    path: str | os.PathLike[str],
    grid: MeshShape,
    rules: Sequence[ShardingRule],
    *,
    options: ReadOptions | None = None,
    host_bandwidth: float | None = None,
) -> ClusterEstimate:
    """Estimates the cost of all tensors to each process; for `host_bandwidth` see `HostRate.of`."""
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
    cluster = plan_cluster(
        [ClusterTensor(entry, placed[name].spec) for name, entry in entries.items()],
        grid,
        profile=profile,
        memory_budget_bytes=options.memory_budget_bytes,
    )
    shards = [(kind.first.entry.name, kind.shard_bytes) for kind in cluster.kinds]
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
        costs=tuple(cluster.cost(process) for process in range(grid.processes)),
        process_parameters=_process_parameters(cluster, parameters),
        device_bytes=sum(kind.tensors * kind.shard_bytes for kind in cluster.kinds),
        largest=max(shards, key=lambda shard: shard[1], default=("", 0)),
        leaf_costs=_leaf_costs(cluster),
        rules=rule_uses(rules, placed.values()),
        misfits=tuple(placing.misfit for placing in placed.values() if placing.misfit),
        cluster=cluster,
    )


def estimate_save(load: ClusterEstimate, options: WriteOptions) -> ClusterEstimate:
    """Estimates the cost of saving the tensors of a load again, from where they then are."""
    if load.cluster is None:
        raise ValueError("saves are planned of tensors as stored, without a mapping or pieces")
    costs = plan_cluster_writes(load.cluster.leaves, load.grid, options)
    return dataclasses.replace(load, costs=costs, leaf_costs=(), cluster=None, saves=options.layout)


def _process_parameters(cluster: ClusterPlan, parameters: dict[str, int]) -> tuple[int, ...]:
    totals = [0] * len(cluster.kinds)
    for leaf, number in zip(cluster.leaves, cluster.kind_of, strict=True):
        totals[number] += parameters[leaf.entry.name]
    held = [0] * len(cluster.costs)
    for kind, total in zip(cluster.kinds, totals, strict=True):
        size = math.prod(kind.first.entry.shape)
        for shape in kind.shapes:
            share = total * shape.elements // size
            for process in shape.processes.tolist():
                held[process] += share
    return tuple(held[number] for number in cluster.distinct.tolist())


def _leaf_costs(cluster: ClusterPlan) -> tuple[LeafCost, ...]:
    worst = []
    for kind in cluster.kinds:
        (entry, spec), costs = kind.first, []
        for shape in kind.shapes:
            read = sum(request.read_bytes for request in shape.requests)
            requests = sum(request.requests for request in shape.requests)
            regions = [region for request in shape.requests for region in request.fetch.regions]
            needed = sum(region.read.runs.total_bytes for region in regions)
            costs.append((read, requests, needed))
        read, requests, needed = max(costs, default=(0, 0, 0))
        worst.append((entry.shape, entry.dtype.code, spec, needed, read, requests))
    members = zip(cluster.leaves, cluster.kind_of, strict=True)
    return tuple(LeafCost(leaf.entry.name, *worst[number]) for leaf, number in members)
