"""Resolves the leaves of an abstract tree to the arrays of a checkpoint."""

from __future__ import annotations

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
from orbax_safetensors_layout.mapping import Mapping, check_castable, check_mapping
from orbax_safetensors_layout.plan import ArrayRegion, ArraySource, array_sources
from orbax_safetensors_layout.pytree import AbstractLeaf, AbstractTree, in_host_memory
from orbax_safetensors_layout.sharding import (
    AddressableShards,
    Placement,
    ProcessShards,
    is_abstract,
    sharding_of,
)

from .assemble import jax_holds

_MAX_RANK = 64  # numpy's, which is asked itself about larger ones


class _Fit(NamedTuple):
    """What leaves of one shape, dtype and placement have in common; see `ArrayRegion`."""

    local: AddressableShards
    dtype: np.dtype
    is_exact: bool


class ResolvedLeaf(NamedTuple):
    """A leaf of an abstract tree, and the array of the checkpoint that it is.

    Attributes:
        number: Its number among the wanted leaves of the tree.
        want: What the caller wants.
        region: What is read: the boxes of this process. A cast that JAX imposes is exact.
    """

    number: int
    want: AbstractLeaf
    region: ArrayRegion


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
    """Resolves the leaves of an abstract tree to arrays of a checkpoint.

    Args:
        catalog: The checkpoint.
        tree: The abstract tree.
        shards: Whose shards.
        mapping: What makes the leaves; None where each is the tensor of its name.
        strict: Refuse tensors that the tree does not name.
        devices: Refuse shardings without devices.
    """
    wants = [want for want in tree.wants if want is not None]
    catalog.prefer(shards.process_index)
    if mapping is None:
        names = [_tensor_name(catalog, want) for want in wants]
        sources = _tensors(catalog, names)
        if strict:
            _refuse_unexpected(catalog, names, tree)
    else:
        names = [want.unboxed or want.name for want in wants]
        sources = _mapped(catalog, mapping, tree, names)
    problems: list[MismatchError] = []
    leaves: list[ResolvedLeaf] = []
    fits: dict[tuple[object, ...], _Fit] = {}
    for want, name in zip(wants, names, strict=True):
        source = sources[name]
        shape, stored = source.shape, source.dtype
        wanted = want.dtype or stored
        key = (shape, stored, want.shape, wanted, want.placement)
        fit = fits.get(key)
        if fit is None:
            try:
                _check_shape(want, source)
                check_placeable(want, devices)
                dtype = wanted if want.placement is None else jax_dtype(wanted, want.placement)
                check_castable(stored, dtype)
                local = _local_boxes(want, shape, shards)
                fit = fits[key] = _Fit(local, dtype, is_exact=dtype != wanted)
            except MismatchError as problem:
                problem.file, problem.tensor = source.file, want.name
                problems.append(problem)
                continue
        leaves.append(ResolvedLeaf(len(leaves), want, ArrayRegion(name, source, *fit)))
    if problems:
        raise MismatchError.collect(problems)
    return leaves


def _tensors(catalog: Catalog, names: Sequence[str]) -> dict[str, ArraySource]:
    try:
        return array_sources(catalog, None, dict.fromkeys(names))
    except MissingTensorError as error:
        if names == [""]:
            error.hint = "One leaf alone has no name: give {'name': leaf}, or patterns by `only=`."
        raise


def _mapped(
    catalog: Catalog, mapping: Mapping, tree: AbstractTree, names: Sequence[str]
) -> dict[str, ArraySource]:
    wants = (want for want in tree.wants if want is not None)
    shapes = {name: want.shape for name, want in zip(names, wants, strict=True)}
    check_mapping(mapping)
    skipped = _skipped_leaves(mapping.leaf_names(catalog.names), tree) if tree.skipped else ()
    return array_sources(catalog, mapping, {**dict.fromkeys(skipped), **shapes})


def _skipped_leaves(leaves: Iterable[str], tree: AbstractTree) -> Iterator[str]:
    """The leaves at and below the placeholders of a tree."""
    below = tuple(f"{name}." for name in tree.skipped)
    return (leaf for leaf in leaves if leaf in tree.skipped or leaf.startswith(below))


def _check_shape(want: AbstractLeaf, source: ArraySource) -> None:
    shape = source.shape
    if want.shape is not None and want.shape != shape:
        raise ShapeMismatchError(
            "Shape mismatch",
            expected=f"{want.shape} (the abstract tree)",
            found=f"{shape} (the file)",
        )
    _check_holdable(shape, source.dtype)


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
    """Refuses a sharding without devices, where there have to be some, and what JAX cannot place.

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
