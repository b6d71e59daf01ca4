"""Plans the arrays of a target from names, shapes and dtypes, before anything is read."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from orbax_safetensors_layout.errors import MismatchError, SafetensorsLayoutError, listed
from orbax_safetensors_layout.mapping import (
    BoundExpr,
    Mapping as LeafMapping,
    TensorSpecs,
    check_mapping,
    saved_tensors,
)
from orbax_safetensors_layout.pytree import abstract_array, nested_dicts, prng
from orbax_safetensors_layout.sharding import (
    MeshShape,
    Misfit,
    ShardingRule,
    ShardingRules,
    Spec,
    abstract_sharding,
)

from .checkpoint_reader import SourceArray, arrays_of, values_of
from .target import TargetArray


def plain_tree(tree: Any) -> Any:
    """Return the tree of a target whose arrays are those of a source's tree."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, SourceArray):
            return leaf
        if leaf.key_impl is not None:
            prng.keys_of(leaf.shape, leaf.dtype, leaf.key_impl, file=None, tensor=leaf.name)
        return TargetArray(leaf.name, leaf.shape, leaf.dtype, leaf.kind, leaf.name, leaf.key_impl)

    return jax.tree.map(plain, tree)


def target_expressions(
    tree: Any, mapping: LeafMapping | None, *, inverse: bool
) -> dict[str, BoundExpr]:
    """Return the arrays of a target, by name, over those of a source's tree.

    With `inverse` they are tensors that the mapping takes; without a mapping the source's own.
    """
    specs = TensorSpecs({n: (array.shape, array.dtype) for n, array in arrays_of(tree).items()})
    if mapping is not None:
        check_mapping(mapping)
        if not inverse:
            return mapping.bind(specs).expressions
    return saved_tensors(mapping, specs, values_of(tree))


def mapped_tree(
    expressions: Mapping[str, BoundExpr], values: Mapping[str, Any], *, is_flat: bool
) -> dict[str, Any]:
    """Return the tree of a target with these leaves: nested dicts, a model, or a flat one."""
    arrays = {
        name: TargetArray(name, expr.shape, expr.dtype, "jax", expr)
        for name, expr in expressions.items()
    }
    return arrays if is_flat else nested_dicts({**arrays, **values})


class Topology:
    """The devices that a target is cut for; arrays that no rule matches are replicated."""

    def __init__(self, mesh: MeshShape, rules: Sequence[ShardingRule] = ()) -> None:
        self.mesh = mesh
        self._rules = ShardingRules(rules, mesh)
        self._misfits: list[Misfit] = []
        self._used: set[int] = set()

    def shard(self, array: TargetArray) -> tuple[int, ...]:
        """Return the shape of a shard of an array."""
        parts = list(array.shape)
        for axis, names in enumerate(self._spec(array)):
            parts[axis] //= self.mesh.ways(names)
        return tuple(parts)

    def sharding(self, array: TargetArray) -> NamedSharding:
        """Return the sharding of an array, over a mesh without devices."""
        return abstract_sharding(self.mesh, self._spec(array))

    def _spec(self, array: TargetArray) -> Spec:
        placed = self._rules.place(array.name, array.shape)
        if placed.rule is not None:
            self._used.add(placed.rule)
        if placed.misfit is not None:
            self._misfits.append(placed.misfit)
        return placed.spec

    @property
    def unused_rules(self) -> list[ShardingRule]:
        """The rules that no array has used so far."""
        return [rule for number, rule in enumerate(self._rules.rules) if number not in self._used]

    def raise_misfits(self) -> None:
        """Refuses arrays that cannot be sharded as their rules say; names all."""
        problem = "the array cannot be sharded as its rule says"
        errors = [
            MismatchError(problem, tensor=name, found=f"shape {shape}: {reason}")
            for name, shape, _, reason in self._misfits
        ]
        if errors:
            hint = "Give these a rule of their own, before the others."
            raise MismatchError.collect(errors, hint=hint)


def arrays_in(tree: Any) -> list[TargetArray]:
    """Return the arrays of a target's tree, no two of which may have one name."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, TargetArray)]
    counts = collections.Counter(array.name for array in arrays)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise SafetensorsLayoutError(
            f"two arrays have one name: {listed(map(repr, repeated))}", tensor=repeated[0]
        )
    return arrays


def stand_ins(tree: Any, topology: Topology | None) -> Any:
    """Return a target's tree with arrays of its shapes and dtypes, without values."""

    @functools.lru_cache
    def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, TargetArray):
            return leaf
        sharding = None if topology is None else topology.sharding(leaf)
        impl = leaf.key_impl
        if impl is not None:
            keys = prng.keys_of(leaf.shape, leaf.dtype, impl, file=None, tensor=leaf.name)
            return abstract_array(keys.shape, keys.dtype, sharding=sharding)
        if sharding is not None or leaf.kind == "jax":
            return abstract_array(leaf.shape, leaf.dtype, sharding=sharding)
        return zeros(leaf.shape, leaf.dtype)

    structs = jax.tree.map(stand_in, tree)
    if topology is not None:
        topology.raise_misfits()
    return structs
