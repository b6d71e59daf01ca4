"""Estimates the cost of a load for a hypothetical cluster, from headers alone.

Tensors as stored need no JAX; any other abstract tree is planned by `tree_estimate.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from orbax_safetensors_layout.catalog import Catalog, find_quantization, resolve_checkpoint
from orbax_safetensors_layout.errors import InvalidArgumentError
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.mapping import Mapping
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
    ExchangePolicy,
    HostRate,
    LeafCost,
    PlannedShares,
    plan_cluster,
    plan_cluster_writes,
)
from orbax_safetensors_layout.sharding import (
    MeshShape,
    Misfit,
    Placed,
    ShardingRule,
    ShardingRules,
)

from .inspection import read_configuration

RuleUses: TypeAlias = tuple[tuple[ShardingRule | None, int], ...]
"""Rules, None for leaves that none matches, and how many leaves each places."""


def _rule_uses(rules: Sequence[ShardingRule], placed: Iterable[Placed]) -> RuleUses:
    """Return the use of all rules."""
    uses = collections.Counter(placing.rule for placing in placed)
    used = tuple((rule, uses[number]) for number, rule in enumerate(rules))
    return (*used, (None, uses[None])) if None in uses else used


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterEstimate(PlannedShares):
    """The cost of a load, or of a save, to a cluster."""

    path: str
    mesh: MeshShape
    profile: StorageProfile
    rate: HostRate
    storage: str
    checkpoint_bytes: int
    checkpoint_files: int
    device_bytes: int  # of all shards of one device, the most of any
    largest: tuple[str, int]  # leaf and bytes of the largest of these shards
    rules: RuleUses
    misfits: tuple[Misfit, ...]
    saves: str | None = None  # layout of the files of a save
    is_orbax: bool = False  # whether Orbax reads it, in chunks of its own format
    # Of a load of the same leaves in layout `sharded`, where this one reads or exchanges more.
    sharded_costs: tuple[Cost, ...] = ()
    exchanged_costs: tuple[Cost, ...] = ()  # with `replicated="auto"`, of a load with `"each"`

    @property
    def unused_rules(self) -> list[ShardingRule]:
        return [rule for rule, leaves in self.rules if rule is not None and not leaves]

    @property
    def is_complete(self) -> bool:
        return len(self.processes) == self.mesh.processes

    def seconds(self, costs: Sequence[Cost] = ()) -> list[float]:
        """Return the time of each process, by default of the load itself."""
        costs = costs or self.costs
        moved_bytes = sum(cost.read_bytes + cost.written_bytes for cost in costs)
        all_bytes = moved_bytes / len(costs) * self.mesh.processes
        return [self.rate.seconds(cost, all_bytes) for cost in costs]

    def costliest(self, count: int) -> list[LeafCost]:
        """Return the leaves that cost most beyond their bytes, the worst first."""
        excess = {leaf: self.rate.excess_seconds(leaf) for leaf in self.leaf_costs}
        costly = [leaf for leaf in self.leaf_costs if excess[leaf] > 0]
        return sorted(costly, key=lambda leaf: -excess[leaf])[:count]


def estimate(
    path: str | os.PathLike[str],
    mesh: MeshShape,
    rules: Sequence[ShardingRule],
    *,
    mapping: Mapping | None = None,
    abstract: Any = None,
    options: ReadOptions | None = None,
    most_processes: int = 16,
) -> ClusterEstimate:
    """Estimates the cost of all tensors to each process, or of a tree to `most_processes`.

    What Orbax saved in its own format is planned as Orbax reads it. `rules` shard tensors, and
    leaves without a sharding.
    """
    options = given_or_default(options, ReadOptions)
    exchanged_costs: tuple[Cost, ...] = ()
    ref = resolve_checkpoint(path)
    if ref.is_orbax:
        if mapping is not None or abstract is not None:
            raise InvalidArgumentError(
                "a checkpoint of Orbax is planned without a mapping or a tree"
            )
        from .chunk_estimate import plan_orbax

        place, kind, profile = ref.path, "local", options.profile("local")
        shares, nbytes, files = plan_orbax(ref.path, mesh, rules)
    else:
        with Catalog.open(path, retries=options.retries, cache=options.cache_folder) as catalog:
            entries, place, kind = catalog.all_entries(), catalog.path, catalog.storage.kind
            profile, files = options.profile(kind), len(catalog.files)
            nbytes = sum(entry.nbytes for entry in entries.values())
            if mapping is None and abstract is None and catalog.layout == "hf":
                plan = functools.partial(
                    _plan_tensors, catalog, entries, mesh, rules, profile, kind
                )
            else:
                from .tree_estimate import plan_tree

                fixed = catalog, mesh, rules, mapping, abstract, most_processes
                plan = functools.partial(plan_tree, *fixed)
            shares = plan(options)
            if options.replicated == "each":
                exchanged_costs = plan(dataclasses.replace(options, replicated="auto")).costs
    return ClusterEstimate(
        **vars(shares),
        path=place,
        mesh=mesh,
        profile=profile,
        rate=HostRate.of(profile, processes_per_host=mesh.processes_per_host),
        storage=kind,
        checkpoint_bytes=nbytes,
        checkpoint_files=files,
        device_bytes=sum(nbytes for _, nbytes in shares.shards),
        largest=max(shares.shards, key=lambda shard: shard[1], default=("", 0)),
        rules=_rule_uses(rules, shares.placed),
        misfits=tuple(placing.misfit for placing in shares.placed if placing.misfit),
        is_orbax=ref.is_orbax,
        sharded_costs=_sharded_costs(shares, mesh, profile, kind, options),
        exchanged_costs=exchanged_costs,
    )


def estimate_save(load: ClusterEstimate, options: WriteOptions) -> ClusterEstimate:
    """Estimates the cost of saving the tensors of a load again, from where they then are."""
    if load.cluster is None:
        raise InvalidArgumentError(
            "a save is planned for whole tensors, without a mapping or abstract tree"
        )
    costs = plan_cluster_writes(load.cluster.leaves, load.mesh, options)
    return dataclasses.replace(
        load,
        costs=costs,
        leaf_costs=(),
        cluster=None,
        saves=options.layout,
        sharded_costs=(),
        exchanged_costs=(),
    )


def _sharded_costs(
    shares: PlannedShares, mesh: MeshShape, profile: StorageProfile, kind: str, options: ReadOptions
) -> tuple[Cost, ...]:
    """Return the costs of a load from shards of the mesh; none where nothing is to be saved."""
    total = sum(shares.costs, Cost())
    is_over = total.read_bytes > total.needed_bytes or total.exchanged_bytes
    if not shares.leaves or not is_over:
        return ()
    leaves = [leaf.in_shards(mesh) for leaf in shares.leaves]
    # Each process has files of its own.
    plan = _plan_cluster(leaves, mesh, profile, kind, options, joins_gaps=False)
    return tuple(map(plan.cost, shares.processes))


def _plan_cluster(
    leaves: Sequence[ClusterTensor],
    mesh: MeshShape,
    profile: StorageProfile,
    kind: str,
    options: ReadOptions,
    *,
    joins_gaps: bool = True,
) -> ClusterPlan:
    exchange = None
    if options.replicated != "each":
        exchange = ExchangePolicy.of(options, kind, "", mesh.processes_per_host)
    planned = functools.partial(
        plan_cluster,
        leaves,
        mesh,
        memory_budget_bytes=options.memory_budget_bytes,
        exchange=exchange,
        joins_gaps=joins_gaps and options.replicated != "read_once",
    )
    plan = planned(profile=profile)
    # Requests of a load are as long as suits what its process reads.
    costs = map(plan.cost, range(mesh.processes))
    most = max(min(cost.needed_bytes, cost.read_bytes) for cost in costs)
    suited = options.profile(kind, most)
    return plan if suited == profile else planned(profile=suited)


def _plan_tensors(
    catalog: Catalog,
    entries: dict[str, TensorEntry],
    mesh: MeshShape,
    rules: Sequence[ShardingRule],
    profile: StorageProfile,
    kind: str,
    options: ReadOptions,
) -> PlannedShares:
    placer = ShardingRules(rules, mesh)
    placed = [placer.place(name, entry.shape) for name, entry in entries.items()]
    quantization = find_quantization(entries, read_configuration(catalog)[0])
    special = {} if quantization is None else quantization.parameters
    parameters = {name: special.get(name, math.prod(e.shape)) for name, e in entries.items()}
    leaves = [ClusterTensor(e, p.spec) for e, p in zip(entries.values(), placed, strict=True)]
    cluster = _plan_cluster(leaves, mesh, profile, kind, options)
    numbers = zip(entries, cluster.class_of, strict=True)
    return PlannedShares(
        parameters=sum(parameters.values()),
        processes=tuple(range(mesh.processes)),
        costs=tuple(map(cluster.cost, range(mesh.processes))),
        process_parameters=_process_parameters(cluster, parameters),
        leaf_costs=_leaf_costs(cluster),
        shards=tuple((name, cluster.classes[number].shard_bytes) for name, number in numbers),
        leaves=cluster.leaves,
        placed=tuple(placed),
        cluster=cluster,
    )


def _process_parameters(cluster: ClusterPlan, parameters: dict[str, int]) -> tuple[int, ...]:
    totals = [0] * len(cluster.classes)
    for leaf, number in zip(cluster.leaves, cluster.class_of, strict=True):
        totals[number] += parameters[leaf.entry.name]
    held = [0] * len(cluster.costs)
    for tensor_class, total in zip(cluster.classes, totals, strict=True):
        size = math.prod(tensor_class.first.entry.shape)
        for shards in tensor_class.shard_classes:
            share = total * shards.elements // size
            for process in shards.processes.tolist():
                held[process] += share
    return tuple(held[number] for number in cluster.distinct.tolist())


def _leaf_costs(cluster: ClusterPlan) -> tuple[LeafCost, ...]:
    worst = []
    for number, tensor_class in enumerate(cluster.classes):
        (entry, spec), costs = tensor_class.first, []
        for shards in tensor_class.shard_classes:
            read = sum(alone.read_bytes for alone in shards.requests)
            count = sum(alone.requests for alone in shards.requests)
            regions = [region for alone in shards.requests for region in alone.request.regions]
            needed = sum(region.read.needed_bytes for region in regions)
            costs.append((read, count, needed))
        read, count, needed = max(costs, default=(0, 0, 0))
        if number in cluster.exchanged:
            read, count = entry.nbytes // cluster.holders(tensor_class)[1], 1
        worst.append((entry.shape, entry.dtype.code, spec, needed, read, count))
    members = zip(cluster.leaves, cluster.class_of, strict=True)
    return tuple(LeafCost(leaf.entry.name, *worst[number]) for leaf, number in members)
