"""What a target will hold, worked out from names, shapes and dtypes before anything is read."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orbax_safetensors_layout.errors import (
    MappingError,
    MismatchError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.format import NO_SAVE_ID, Manifest, TensorKind
from orbax_safetensors_layout.mapping import BoundExpr, TensorSpec
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.pytree import dotted_name, prng
from orbax_safetensors_layout.sharding import (
    MeshShape,
    Misfit,
    ProcessShards,
    ShardingRule,
    ShardingRules,
    Spec,
)
from orbax_safetensors_layout.writing import PreparedTree

from .checkpoint_reader import (
    CheckpointReader,
    SourceArray,
    arrays_of,
)
from .files import FilesTarget, values_dtype
from .target import TargetLeaf

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax


@dataclasses.dataclass(frozen=True, slots=True)
class TargetArray:
    """An array of a target, as a leaf of its tree.

    Attributes:
        name: Its dotted name.
        shape: Its shape; of typed PRNG keys, their data's.
        dtype: Dtype of its values.
        kind: What it is to be when it is restored.
        made_of: The source's array that it is, by name, or an expression over several.
        key_impl: Name of the implementation of typed PRNG keys.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: TensorKind
    made_of: str | BoundExpr
    key_impl: str | None = None

    def leaf(self, dtype: np.dtype) -> TargetLeaf:
        """The array as a leaf whose values have some dtype."""
        return TargetLeaf(self.name, self.shape, dtype, self.made_of)

    def stand_in(self, sharding: Any) -> Any:
        """An array without values, for what looks at shapes, dtypes and shardings alone."""
        if self.key_impl is not None:
            name = self.key_impl
            keys = jax.eval_shape(
                lambda data: prng.wrap(data, name), _struct(self.shape, self.dtype)
            )
            return _struct(keys.shape, keys.dtype, sharding=sharding)
        if sharding is not None or self.kind == "jax":
            return _struct(self.shape, self.dtype, sharding=sharding)
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)


def plain_tree(tree: Any) -> Any:
    """The tree of a target whose arrays are the source's.

    Args:
        tree: The source's tree, or a part of it.
    """
    return jax.tree.map(_plain, tree)


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, SourceArray):
        return leaf
    return TargetArray(leaf.name, leaf.shape, leaf.dtype, leaf.kind, leaf.name, leaf.key_impl)


def mapped_tree(tree: Any, mapping: LeafMapping, *, inverse: bool) -> dict[str, Any]:
    """The tree of a target whose arrays a mapping makes of the source's.

    Args:
        tree: The source's tree, or a part of it.
        mapping: The mapping of loading.
        inverse: The source is a model, and the target has the tensors that the mapping takes.

    Returns:
        A flat dict for tensors, nested dicts for a model.

    Raises:
        MappingError: It does not fit, or the tree has leaves that are not arrays; tells everything.
    """
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    values = [dotted_name(path) for path, leaf in paths if not isinstance(leaf, SourceArray)]
    if values:
        raise MappingError(
            f"a mapping makes arrays of arrays; these leaves are none: {values[:10]}",
            hint="Say which part of the tree is the parameters with subtree= (--subtree).",
        )
    facts = {name: TensorSpec(array.shape, array.dtype) for name, array in arrays_of(tree).items()}
    bound = mapping.inverse().bind(facts) if inverse else mapping.bind(facts)
    made = {
        name: TargetArray(name, found.shape, found.dtype, "jax", found)
        for name, found in bound.expressions.items()
    }
    return dict(made) if inverse else _nested(made)


def _nested(made: Mapping[str, TargetArray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in made.items():
        *folders, last = name.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = array
    return tree


class Topology:
    """The devices that a target is cut for.

    Args:
        grid: The mesh.
        rules: How arrays are sharded; what none matches is replicated.
    """

    def __init__(self, grid: MeshShape, rules: Sequence[ShardingRule] = ()) -> None:
        self.grid = grid
        self._rules = ShardingRules(rules, grid)
        self._mesh = AbstractMesh(tuple(grid.axes.values()), tuple(grid.axes))
        self._misfits: list[Misfit] = []
        self._used: set[int] = set()

    def shard(self, array: TargetArray) -> tuple[int, ...]:
        """Shape of a shard of an array."""
        parts = list(array.shape)
        for axis, names in enumerate(self._spec(array)):
            parts[axis] //= self.grid.ways(names)
        return tuple(parts)

    def sharding(self, array: TargetArray) -> NamedSharding:
        """The sharding of an array, over a mesh without devices."""
        spec = [names or None for names in self._spec(array)]
        made: PartitionSpec = PartitionSpec(*spec)  # type: ignore[no-untyped-call]
        return NamedSharding(self._mesh, made)

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
        rules = self._rules.rules
        return [rule for number, rule in enumerate(rules) if number not in self._used]

    def raise_misfits(self) -> None:
        """Refuses arrays that cannot be sharded as their rules say; names all.

        Raises:
            MismatchError: There are some.
        """
        if self._misfits:
            raise MismatchError.collect(
                [
                    MismatchError(
                        "the array can not be sharded as its rule says",
                        tensor=misfit.name,
                        found=f"shape {misfit.shape}: {misfit.reason}",
                    )
                    for misfit in self._misfits
                ],
                hint="Give these a rule of their own, before the others.",
            )


def arrays_in(tree: Any) -> list[TargetArray]:
    """The arrays of a target's tree.

    Raises:
        SafetensorsLayoutError: Two have one name; names all.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, TargetArray)]
    names = [array.name for array in arrays]
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise SafetensorsLayoutError(f"two arrays have one name: {twice[:10]}", tensor=twice[0])
    return arrays


def files_target(
    tree: Any,
    source: CheckpointReader,
    options: WriteOptions,
    topology: Topology | None,
    *,
    is_tree: bool,
    identity: str,
    sidecar_files: Mapping[str, bytes],
) -> FilesTarget:
    """A target of safetensors files.

    Args:
        tree: Its tree.
        source: The source, for its metadata.
        options: Layout, dtype, size of files, metadata.
        topology: What layout `sharded` is cut for; None for whole tensors.
        is_tree: Record the tree beside the files, not just in layout `sharded`.
        identity: Digest of what is converted, and how.
        sidecar_files: Side files, by name.

    Raises:
        SafetensorsLayoutError: Leaves that cannot be held; names all.
    """
    processes = 1 if topology is None else topology.grid.processes
    cut = topology if options.layout == "sharded" else None

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, TargetArray):
            return leaf
        return leaf.stand_in(None if cut is None else cut.sharding(leaf))

    parsed = PreparedTree.parse(
        jax.tree.map(stand_in, tree), options=options, shards=ProcessShards(0, processes)
    )
    if cut is not None:
        cut.raise_misfits()
    arrays = {array.name: array for array in arrays_in(tree)}
    leaves = [arrays[written.tensor.name].leaf(values_dtype(written)) for written in parsed.leaves]
    manifest = Manifest("hf", parsed.node, parsed.shardings, dict(options.metadata), source.custom)
    return FilesTarget(
        leaves,
        parsed.leaves,
        options,
        processes=processes,
        save_id=identity[: len(NO_SAVE_ID)],
        manifest=manifest if is_tree or options.layout == "sharded" else None,
        sidecar_files=sidecar_files,
    )
