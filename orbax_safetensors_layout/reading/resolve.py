"""From what is wanted to what is read: the leaves of a tree and the tensors of a checkpoint."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import (
    DtypeMismatchError,
    MismatchError,
    MissingTensorError,
    ShapeMismatchError,
    UnexpectedTensorError,
)
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import Mapping, Subject, check_castable, check_mapping
from orbax_safetensors_layout.options import KIB, MIB
from orbax_safetensors_layout.plan import (
    ArraySource,
    LeafPlan,
    LeafRead,
    MappedSource,
    StoredSource,
    bind,
    sources_of,
)
from orbax_safetensors_layout.pytree import AbstractLeaf, AbstractTree, in_host_memory
from orbax_safetensors_layout.sharding import (
    AddressableShards,
    Placement,
    ProcessShards,
    is_abstract,
    sharding_of,
)

from .assemble import jax_holds

_BLOCKS_IN_BUDGET = 4  # of all boxes of a leaf: some are read while others are computed
_MOST_BLOCK_BYTES = 8 * MIB
_LEAST_BLOCK_BYTES = 4 * KIB
_MAX_RANK = 64  # numpy's, which is asked itself about larger ones


class Fidelity(enum.Enum):
    """What a cast of a value whose dtype is not the file's has to keep."""

    ROUND = "round"  # the caller asked for it
    EXACT = "exact"  # JAX imposes it: every value must survive


class _Fit(NamedTuple):
    """How stored values become a wanted leaf.

    Attributes:
        dtype: The dtype that the leaf will have.
        cast: What a cast to it has to keep.
        local: The boxes of the process.
    """

    dtype: np.dtype
    cast: Fidelity
    local: AddressableShards


class ResolvedLeaf(NamedTuple):
    """A wanted leaf and what it is made of.

    Attributes:
        number: Its number among the wanted leaves of the tree.
        want: What is wanted.
        name: The tensor, or the leaf of the mapping, that it is.
        origin: Where its values come from.
        dtype: The dtype that it will have.
        cast: What a cast to it has to keep.
        local: The boxes of it that this process needs.
    """

    number: int
    want: AbstractLeaf
    name: str
    origin: ArraySource
    dtype: np.dtype
    cast: Fidelity
    local: AddressableShards


class PlannedLeaf(NamedTuple):
    """Boxes of a wanted leaf, and how this process reads them.

    Attributes:
        leaf: The leaf.
        plan: The read of some of its boxes.
    """

    leaf: ResolvedLeaf
    plan: LeafPlan


def subject_of(leaf: ResolvedLeaf) -> Subject:
    """What is cast, for errors."""
    return Subject(leaf.name, leaf.origin.file, leaf.origin.dtype)


def host_leaves(catalog: Catalog, only: str | Sequence[str] | None) -> list[LeafRead]:
    """Whole tensors on the host."""
    entries = catalog.all_entries() if only is None else catalog.entries(catalog.select(only))
    for entry in entries.values():
        try:
            _check_holdable(entry.shape, entry.dtype.numpy)
        except ShapeMismatchError as problem:
            problem.file, problem.tensor = entry.file, entry.name
            raise
    leaves = [
        LeafRead.plain(name, entry, AddressableShards.whole(entry.shape), entry.dtype.numpy)
        for name, entry in entries.items()
    ]
    return _from_pieces(catalog, leaves)


def _from_pieces(catalog: Catalog, leaves: list[LeafRead]) -> list[LeafRead]:
    """The leaves as they are stored, where that is in pieces."""
    if catalog.layout == "hf":  # 60,000 leaves: a second of work for nothing
        return leaves
    boxes: dict[str, tuple[Box, ...]] = {}
    for leaf in leaves:
        known = boxes.get(leaf.name, ())
        boxes[leaf.name] = known + tuple(box for box in leaf.local.boxes if box not in known)
    found = catalog.locate(boxes)
    return [leaf._replace(sources=sources_of(found[leaf.name])) for leaf in leaves]


def adopts(wants: Iterable[AbstractLeaf | None]) -> bool:
    """Whether all arrays keep the buffers they are made of, as on the CPU backend."""
    placements = {want.placement for want in wants if want is not None}
    return all(_on_cpu(placement) for placement in placements if placement is not None)


def _on_cpu(placement: Placement) -> bool:
    sharding = sharding_of(placement)
    if is_abstract(sharding):
        return False
    devices: Iterable[Any] = sharding.addressable_devices
    return all(device.platform == "cpu" for device in devices)


def resolve_leaves(
    catalog: Catalog,
    tree: AbstractTree,
    shards: ProcessShards,
    *,
    mapping: Mapping | None,
    strict: bool,
    devices: bool,
) -> list[ResolvedLeaf]:
    """The leaves of a wanted tree, matched to what the checkpoint has.

    Args:
        catalog: The checkpoint.
        tree: What is wanted.
        shards: Whose shards.
        mapping: What leaves are made of; None: each is the tensor of its name.
        strict: Refuse tensors that the tree does not name.
        devices: Refuse shardings without devices.
    """
    wants = [want for want in tree.wants if want is not None]
    catalog.prefer(shards.process_index)
    if mapping is None:
        names, origins = _plain_origins(catalog, wants)
        if strict:
            _refuse_unexpected(catalog, names, tree)
    else:
        names, origins = _mapped_origins(catalog, mapping, tree)
    problems: list[MismatchError] = []
    leaves: list[ResolvedLeaf] = []
    fits: dict[tuple[object, ...], _Fit] = {}  # leaves that are alike fit alike
    for want, name, origin in zip(wants, names, origins, strict=True):
        shape, stored = origin.shape, origin.dtype
        wanted = want.dtype or stored
        key = (shape, stored, want.shape, wanted, want.placement)
        fit = fits.get(key)
        if fit is None:
            try:
                _check_shape(want, origin)
                check_placeable(want, devices)
                dtype = wanted if want.placement is None else jax_dtype(wanted, want.placement)
                check_castable(stored, dtype)
                cast = Fidelity.ROUND if dtype == wanted else Fidelity.EXACT
                fit = fits[key] = _Fit(dtype, cast, _local_boxes(want, shape, shards))
            except MismatchError as problem:
                problem.file, problem.tensor = origin.file, want.name
                problems.append(problem)
                continue
        leaves.append(ResolvedLeaf(len(leaves), want, name, origin, *fit))
    if problems:
        raise MismatchError.collect(problems)
    return leaves


def plan_leaves(
    catalog: Catalog,
    portions: Sequence[tuple[ResolvedLeaf, AddressableShards]],
    memory_budget_bytes: int,
) -> list[PlannedLeaf]:
    """How boxes of leaves are read.

    Args:
        catalog: The checkpoint.
        portions: Leaves, and the boxes of each that the process reads.
        memory_budget_bytes: Bound on what is held beyond the arrays.
    """
    plans = []
    for leaf, boxes in portions:
        at_once = memory_budget_bytes // (_BLOCKS_IN_BUDGET * max(1, len(boxes.boxes)))
        block_bytes = min(_MOST_BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, at_once))
        plans.append(leaf.origin.plan(leaf.name, boxes, leaf.dtype, block_bytes))
    if all(isinstance(leaf.origin, StoredSource) for leaf, _ in portions):
        found = _from_pieces(catalog, [plan.read for plan in plans if plan.read is not None])
        plans = [plan._replace(read=read) for plan, read in zip(plans, found, strict=True)]
    return [PlannedLeaf(leaf, plan) for (leaf, _), plan in zip(portions, plans, strict=True)]


def _plain_origins(
    catalog: Catalog, wants: Sequence[AbstractLeaf]
) -> tuple[list[str], list[ArraySource]]:
    names = [_tensor_name(catalog, want) for want in wants]
    try:
        entries = catalog.entries(names)
    except MissingTensorError as error:
        if names == [""]:
            error.hint = "One leaf alone has no name: give {'name': leaf}, or patterns by `only=`."
        raise
    return names, [StoredSource(entries[name]) for name in names]


def _mapped_origins(
    catalog: Catalog, mapping: Mapping, tree: AbstractTree
) -> tuple[list[str], list[ArraySource]]:
    wants = [want for want in tree.wants if want is not None]
    names = [want.unboxed or want.name for want in wants]
    shapes = {name: want.shape for name, want in zip(names, wants, strict=True)}
    check_mapping(mapping)
    skipped = _skipped_leaves(mapping.leaf_names(catalog.names), tree) if tree.skipped else ()
    bound, entries = bind(catalog, mapping, {**dict.fromkeys(skipped), **shapes})
    return names, [MappedSource(bound.expressions[name], entries) for name in names]


def _skipped_leaves(leaves: Iterable[str], tree: AbstractTree) -> Iterator[str]:
    """The leaves at and below the placeholders of a tree."""
    below = tuple(f"{name}." for name in tree.skipped)
    return (leaf for leaf in leaves if leaf in tree.skipped or leaf.startswith(below))


def _check_shape(want: AbstractLeaf, origin: ArraySource) -> None:
    shape = origin.shape
    if want.shape is not None and want.shape != shape:
        raise ShapeMismatchError(
            "Shape mismatch",
            expected=f"{want.shape} (the abstract tree)",
            found=f"{shape} (the file)",
        )
    _check_holdable(shape, origin.dtype)


def jax_dtype(dtype: np.dtype, placement: Placement) -> np.dtype:
    """What JAX makes of a dtype: the same, or 32 bits of 64 where x64 is off."""
    canonical: np.dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))
    sharding = sharding_of(placement)
    devices: Iterable[Any] = () if is_abstract(sharding) else sharding.addressable_devices
    if not all(jax_holds(canonical, device) for device in itertools.islice(devices, 1)):
        raise DtypeMismatchError(
            f"jax {jax.__version__} has no arrays of this dtype",
            expected=f"a dtype of jax {jax.__version__}",
            found=canonical,
            hint="Ask for another dtype in the abstract tree, or for a numpy array.",
        )
    return canonical


def check_placeable(want: AbstractLeaf, devices: bool) -> None:
    """Refuses a sharding without devices, where there have to be some, and what JAX can not place.

    Raises:
        MismatchError: The sharding is over an abstract mesh, or a layout is for host memory.
    """
    placement = want.placement
    if (
        isinstance(placement, Format)
        and in_host_memory(sharding_of(placement))
        and _on_cpu(placement)
    ):
        raise MismatchError(
            "JAX has no arrays of a device layout in another memory of a CPU",
            expected="a layout in the memory of the device, or a sharding alone",
            found=placement,
            hint="Leave out the layout, or the memory kind.",
        )
    if devices and want.placement is not None and is_abstract(sharding_of(want.placement)):
        raise MismatchError(
            "the sharding names no devices",
            expected="a sharding over a mesh of devices",
            found=sharding_of(want.placement),
            hint="Put jax.sharding.NamedSharding(mesh, spec) with a concrete mesh in the tree, or"
            " load inside `with jax.set_mesh(mesh)`. A plan (plan_load) needs no devices.",
        )


def _check_holdable(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Checks that numpy has arrays of a shape: an empty one may have extents of any size."""
    if len(shape) <= _MAX_RANK and 0 not in shape:
        return
    try:
        np.empty(shape, dtype)
    except (ValueError, OverflowError) as error:
        raise ShapeMismatchError(
            "numpy can not hold the tensor",
            expected=f"at most {_MAX_RANK} dimensions, whose extents but zeros have a product of"
            " less than 2**63 bytes",
            found=f"{len(shape)} dimensions, the largest {max(shape)}",
        ) from error


def _local_boxes(
    want: AbstractLeaf, shape: tuple[int, ...], shards: ProcessShards
) -> AddressableShards:
    if want.placement is None:
        return shards.whole(shape)
    return shards.boxes(sharding_of(want.placement), shape)


def _tensor_name(catalog: Catalog, want: AbstractLeaf) -> str:
    if want.unboxed is not None and want.name not in catalog:
        return want.unboxed
    return want.name


def _refuse_unexpected(catalog: Catalog, names: list[str], tree: AbstractTree) -> None:
    unexpected = [
        name
        for name in sorted(set(catalog.names) - set(names))
        if tree.skipped.isdisjoint(_with_prefixes(name))
    ]
    if unexpected:
        message = "the checkpoint has a tensor that the abstract tree does not name"
        raise UnexpectedTensorError.collect(
            [UnexpectedTensorError(message, file=catalog.path, tensor=name) for name in unexpected],
            hint="Put `...` where a tensor is not wanted, or load with ReadOptions(strict=False).",
        )


def _with_prefixes(name: str) -> list[str]:
    """A name, and the names of all that it is below."""
    return list(itertools.accumulate(name.split("."), lambda above, part: f"{above}.{part}"))
