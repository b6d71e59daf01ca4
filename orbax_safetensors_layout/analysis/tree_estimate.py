"""Plans the load of any abstract tree; of many processes some, at even distances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.format import TensorEntry, dtype_from_numpy
from orbax_safetensors_layout.load import plan_catalog
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
from orbax_safetensors_layout.pytree import dotted_name, unboxed_name
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.sharding import (
    MeshShape,
    Placed,
    ProcessShards,
    ShardingRule,
    ShardingRules,
    Spec,
    spec_of,
)

_LEAST_PROCESSES = 4
_MOST_LEAVES = 1 << 18  # of all processes that are planned: a second for each 10,000

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax


class _Leaf(NamedTuple):
    """A leaf of the tree, with its sharding, and the rule of that unless the tree says it."""

    name: str
    struct: Any
    spec: Spec
    placed: Placed | None

    def shard_bytes(self, mesh: MeshShape) -> int:
        elements = math.prod(self.struct.shape) // math.prod(map(mesh.ways, self.spec))
        nbytes: int = elements * np.dtype(self.struct.dtype).itemsize
        return nbytes


def plan_tree(
    catalog: Catalog,
    mesh: MeshShape,
    rules: Sequence[ShardingRule],
    mapping: Mapping | None,
    abstract: Any,
    options: ReadOptions,
    most_processes: int,
) -> PlannedShares:
    """Plans the shares of some processes; `rules` shard leaves without a sharding."""
    if abstract is None:
        abstract = {
            name: _struct(tensor.shape, tensor.dtype)
            for name, tensor in array_sources(catalog, mapping).items()
        }
    leaves, tree = _placed(abstract, ShardingRules(rules, mesh), mesh)
    by_leaves = max(_LEAST_PROCESSES, _MOST_LEAVES // max(1, len(leaves)))
    count = min(mesh.processes, most_processes, by_leaves)
    processes = tuple(number * mesh.processes // count for number in range(count))
    costs: list[Cost] = []
    held: list[int] = []
    worst: dict[str, LeafCost] = {}
    specs = {leaf.name: leaf.spec for leaf in leaves}
    with frozen_heap():
        for process in processes:  # one plan in memory at a time
            shards = ProcessShards(process, mesh.processes)
            plan = plan_catalog(catalog, tree, shards, mapping=mapping, options=options)
            costs.append(plan.cost())
            held.append(sum(leaf.local.elements for leaf in plan.leaves))
            _add_leaf_costs(worst, plan, specs)
    return PlannedShares(
        parameters=sum(math.prod(leaf.struct.shape) for leaf in leaves),
        processes=processes,
        costs=tuple(costs),
        process_parameters=tuple(held),
        leaf_costs=tuple(worst.values()),
        shards=tuple((leaf.name, leaf.shard_bytes(mesh)) for leaf in leaves),
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
    """Return the leaves, and the tree with a sharding at each."""
    abstract_mesh = AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes))
    pairs, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = []
    for path, leaf in pairs:
        name = unboxed_name(path) or dotted_name(path)
        shape = getattr(leaf, "shape", None)
        if shape is None:
            raise MismatchError(
                "a leaf of the abstract tree has no shape", tensor=name, found=repr(leaf)
            )
        sharding = getattr(leaf, "sharding", None)
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
        parts = PartitionSpec(*(names or None for names in spec))  # type: ignore[no-untyped-call]
        struct = _struct(shape, leaf.dtype, sharding=NamedSharding(abstract_mesh, parts))
        leaves.append(_Leaf(name, struct, spec, placed))
    return leaves, jax.tree.unflatten(treedef, [leaf.struct for leaf in leaves])


def _as_tensors(leaves: Sequence[_Leaf]) -> Iterator[ClusterTensor]:
    """Yields the leaves as if each were a tensor of one file."""
    start = 0
    for name, struct, spec, _ in leaves:
        dtype = dtype_from_numpy(np.dtype(struct.dtype))
        stop = start + -(-math.prod(struct.shape) * dtype.bits // 8)
        yield ClusterTensor(TensorEntry(name, dtype, tuple(struct.shape), "", start, stop), spec)
        start = stop


def _add_leaf_costs(worst: dict[str, LeafCost], plan: ReadPlan, specs: dict[str, Spec]) -> None:
    """Keeps for each leaf the cost to the process that it costs most."""
    requests = [0] * len(plan.leaves)
    for _, regions in plan.batches:
        for region in regions:
            requests[region.leaf] += region.read.storage_requests(plan.profile)
    for leaf, (name, needed, read), count in zip(
        plan.leaves, plan.by_tensor(), requests, strict=True
    ):
        if name not in worst or worst[name].read_bytes < read:
            spec = specs.get(name)
            code = leaf.stored.code
            worst[name] = LeafCost(name, leaf.shape, code, spec, needed, read, count)
