"""Plans the load of any abstract tree, for some of many processes, at even distances."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.format import TensorEntry, storage_dtype
from orbax_safetensors_layout.load import LoadRequest, plan_each
from orbax_safetensors_layout.mapping import Mapping
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.plan import (
    ClusterTensor,
    Cost,
    LeafCost,
    PlannedShares,
    ReadPlan,
    array_sources,
)
from orbax_safetensors_layout.pytree import (
    AbstractTree,
    abstract_array,
    named_leaves,
    prng,
)
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.sharding import (
    MeshShape,
    Placed,
    ProcessShards,
    ShardingRule,
    ShardingRules,
    Spec,
    abstract_sharding,
    spec_of,
)

_LEAST_PROCESSES = 4
_MOST_LEAVES = 1 << 18  # of all processes that are planned: a second for each 10,000


class _Leaf(NamedTuple):
    """An array of the tree, keys as their data; with the rule, where the tree says no sharding."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Spec
    placed: Placed | None
    is_host: bool = False  # a numpy array, which each process has whole

    def shard_bytes(self, mesh: MeshShape) -> int:
        elements = math.prod(self.shape) // math.prod(map(mesh.ways, self.spec))
        return elements * self.dtype.itemsize


def plan_tree(
    catalog: Catalog,
    mesh: MeshShape,
    rules: Sequence[ShardingRule],
    mapping: Mapping | None,
    abstract: Any,
    most_processes: int,
    options: ReadOptions,
) -> PlannedShares:
    """Plans the shares of some processes; `rules` shard leaves without a sharding."""
    if abstract is None:
        abstract = {
            name: abstract_array(tensor.shape, tensor.dtype)
            for name, tensor in array_sources(catalog, mapping).items()
        }
    leaves, tree = _placed(abstract, ShardingRules(rules, mesh), mesh)
    request = LoadRequest(AbstractTree.parse(tree), mapping, None, options)
    by_leaves = max(_LEAST_PROCESSES, _MOST_LEAVES // max(1, len(leaves)))
    count = min(mesh.processes, most_processes, by_leaves)
    processes = tuple(number * mesh.processes // count for number in range(count))
    costs: list[Cost] = []
    held: list[int] = []
    worst: dict[str, LeafCost] = {}
    specs = {leaf.name: leaf.spec for leaf in leaves}
    with frozen_heap():
        of_host = mesh.processes_per_host
        shards = (
            ProcessShards(process, mesh.processes, processes_per_host=of_host)
            for process in processes
        )
        for plan in plan_each(catalog, request, shards):  # one in memory at a time
            costs.append(plan.cost())
            held.append(sum(leaf.local.elements for leaf in plan.leaves))
            _add_leaf_costs(worst, plan, specs)
    return PlannedShares(
        parameters=sum(math.prod(leaf.shape) for leaf in leaves),
        processes=processes,
        costs=tuple(costs),
        process_parameters=tuple(held),
        leaf_costs=tuple(worst.values()),
        shards=tuple((leaf.name, leaf.shard_bytes(mesh)) for leaf in leaves if not leaf.is_host),
        leaves=tuple(_as_tensors(leaves)),
        placed=tuple(leaf.placed for leaf in leaves if leaf.placed is not None),
    )


def mesh_of(abstract: Any) -> dict[str, int] | None:
    """Return name and size of the axes of the mesh that a tree is sharded over, if it is."""
    for leaf in jax.tree.leaves(abstract):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return dict(sharding.mesh.shape)
    return None


def _placed(abstract: Any, rules: ShardingRules, mesh: MeshShape) -> tuple[list[_Leaf], Any]:
    """Return the arrays, and the tree with a sharding at each."""
    pairs, treedef = named_leaves(abstract)
    leaves, structs = [], []
    shared = functools.cache(functools.partial(abstract_sharding, mesh))

    for name, leaf in pairs:
        shape = getattr(leaf, "shape", None)
        if shape is None:  # a value that every process reads for itself
            structs.append(leaf)
            continue
        if not hasattr(leaf, "sharding"):
            structs.append(leaf)
            nowhere: Spec = ((),) * len(shape)
            leaves.append(_Leaf(name, tuple(shape), np.dtype(leaf.dtype), nowhere, None, True))
            continue
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            spec, placed = spec_of(sharding), None
            if dict(sharding.mesh.shape) != dict(mesh.axes):
                raise MismatchError(
                    "a leaf is sharded over another mesh",
                    tensor=name,
                    expected=dict(mesh.axes),
                    found=dict(sharding.mesh.shape),
                )
        else:
            placed = rules.place(name, tuple(shape))
            spec = placed.spec
        structs.append(abstract_array(shape, leaf.dtype, sharding=shared(spec)))
        data = prng.data(leaf) if prng.is_key(leaf) else leaf
        leaves.append(_Leaf(name, tuple(data.shape), np.dtype(data.dtype), spec, placed))
    return leaves, jax.tree.unflatten(treedef, structs)


def _as_tensors(leaves: Sequence[_Leaf]) -> Iterator[ClusterTensor]:
    """Yields the leaves as if each were a tensor of one file."""
    start = 0
    for name, shape, values, spec, *_ in leaves:
        size = math.prod(shape)
        dtype = storage_dtype(values, size, tensor=name)
        stop = start + size * dtype.bits // 8
        yield ClusterTensor(TensorEntry(name, dtype, shape, "", start, stop), spec)
        start = stop


def _add_leaf_costs(worst: dict[str, LeafCost], plan: ReadPlan, specs: dict[str, Spec]) -> None:
    """Keeps for each leaf the cost to the process that it costs most."""
    requests = [0] * len(plan.leaves)
    for batch in plan.batches:
        for region in batch.regions:
            requests[region.leaf] += region.read.storage_requests
    for leaf, (name, needed, read), count in zip(
        plan.leaves, plan.by_tensor(), requests, strict=True
    ):
        if name not in worst or worst[name].read_bytes < read:
            spec = specs.get(name)
            code = leaf.stored.code
            worst[name] = LeafCost(name, leaf.shape, code, spec, needed, read, count)
