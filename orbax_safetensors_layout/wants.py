"""From what is wanted to what is read: the leaves of a tree and the tensors of a checkpoint."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from orbax_safetensors_layout.errors import (
    DtypeMismatchError,
    MismatchError,
    ShapeMismatchError,
    UnexpectedTensorError,
)
from orbax_safetensors_layout.format.catalog import Catalog
from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.geometry.box import Box
from orbax_safetensors_layout.plan.leaves import LeafRead, LocalBoxes
from orbax_safetensors_layout.plan.shards import (
    Placement,
    ProcessShards,
    is_abstract,
    sharding_of,
)
from orbax_safetensors_layout.plan.sources import sources_of
from orbax_safetensors_layout.recorded import Recorded
from orbax_safetensors_layout.transfer.assemble import jax_holds
from orbax_safetensors_layout.transfer.casting import check_castable
from orbax_safetensors_layout.tree import Want, WantedTree

_MAX_RANK = 64  # numpy's


class Cast(enum.Enum):
    """What becomes of a value whose dtype is not the file's."""

    ROUND = "round"  # the caller asked for it
    EXACT = "exact"  # JAX imposes it: every value must survive
    RAW = "raw"  # the file has the bits, one element a byte


def host_leaves(catalog: Catalog, only: str | Sequence[str] | None) -> list[LeafRead]:
    """Whole tensors on the host."""
    entries = catalog.all_entries() if only is None else catalog.entries(catalog.select(only))
    for entry in entries.values():
        _check_rank(entry)
    leaves = [
        LeafRead.plain(name, entry, LocalBoxes.whole(entry.shape), entry.dtype.numpy)
        for name, entry in entries.items()
    ]
    return _from_pieces(catalog, leaves)


def _from_pieces(catalog: Catalog, leaves: list[LeafRead]) -> list[LeafRead]:
    """The leaves as they are stored, where that is in pieces."""
    if catalog.pieces is None:
        return leaves
    boxes: dict[str, tuple[Box, ...]] = {}
    for leaf in leaves:
        known = boxes.get(leaf.name, ())
        boxes[leaf.name] = known + tuple(box for box in leaf.local.boxes if box not in known)
    found = catalog.pieces.find(boxes)
    return [leaf._replace(sources=sources_of(found[leaf.name])) for leaf in leaves]


def adopts(wants: Iterable[Want | None]) -> bool:
    """Whether all arrays keep the buffers they are made of, as on the CPU backend."""
    placements = {id(want.placement): want.placement for want in wants if want is not None}
    return all(_on_cpu(placement) for placement in placements.values() if placement is not None)


def _on_cpu(placement: Placement) -> bool:
    sharding = sharding_of(placement)
    if is_abstract(sharding):
        return False
    devices: Iterable[Any] = sharding.addressable_devices
    return all(device.platform == "cpu" for device in devices)


def leaf_reads(
    catalog: Catalog,
    recorded: Recorded,
    tree: WantedTree,
    shards: ProcessShards,
    *,
    strict: bool,
    devices: bool,
) -> tuple[list[LeafRead], list[Cast]]:
    """The reads of a wanted tree, and for each what a cast has to keep.

    Args:
        catalog: The checkpoint.
        recorded: What was recorded about its leaves.
        tree: What is wanted.
        shards: Whose shards.
        strict: Refuse tensors that the tree does not name.
        devices: Refuse shardings without devices.
    """
    wants = [want for want in tree.wants if want is not None]
    names = [_tensor_name(catalog, want) for want in wants]
    entries = catalog.entries(names)
    if strict:
        _refuse_unexpected(catalog, names, tree)
    problems: list[MismatchError] = []
    leaves: list[LeafRead] = []
    casts: list[Cast] = []
    dtypes: dict[tuple[np.dtype, int], np.dtype] = {}
    for want, name in zip(wants, names, strict=True):
        entry = entries[name]
        try:
            if want.shape is not None and want.shape != entry.shape:
                raise _shape_mismatch(want, entry)
            _check_rank(entry)
            _check_placeable(want, devices)
            wanted = want.dtype or recorded.dtype(name) or entry.dtype.numpy
            dtype = dtypes.get((wanted, id(want.placement)))
            if dtype is None:
                dtype = wanted if want.placement is None else _jax_dtype(wanted, want.placement)
                dtypes[wanted, id(want.placement)] = dtype
            is_raw = entry.dtype.code == "U8" and recorded.is_raw(name, dtype)
            if not is_raw:
                check_castable(entry.dtype.numpy, dtype)
            local = _local_boxes(want, entry, shards)
        except MismatchError as problem:
            problem.file, problem.tensor = entry.file, want.name
            problems.append(problem)
            continue
        leaves.append(LeafRead.plain(name, entry, local, dtype))
        casts.append(Cast.RAW if is_raw else Cast.ROUND if dtype == wanted else Cast.EXACT)
    if problems:
        _raise_all(problems)
    if catalog.pieces is not None:
        catalog.pieces.prefer(shards.process_index)
    return _from_pieces(catalog, leaves), casts


def _jax_dtype(dtype: np.dtype, placement: Placement) -> np.dtype:
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


def _check_placeable(want: Want, devices: bool) -> None:
    if devices and want.placement is not None and is_abstract(sharding_of(want.placement)):
        raise MismatchError(
            "the sharding names no devices",
            expected="a sharding over a mesh of devices",
            found=sharding_of(want.placement),
            hint="Put jax.sharding.NamedSharding(mesh, spec) with a concrete mesh in the tree, or"
            " load inside `with jax.set_mesh(mesh)`. A plan (plan_load) needs no devices.",
        )


def _check_rank(entry: TensorEntry) -> None:
    if len(entry.shape) > _MAX_RANK:
        raise ShapeMismatchError(
            "numpy can not hold the tensor",
            file=entry.file,
            tensor=entry.name,
            expected=f"at most {_MAX_RANK} dimensions",
            found=f"{len(entry.shape)} dimensions",
        )


def _local_boxes(want: Want, entry: TensorEntry, shards: ProcessShards) -> LocalBoxes:
    if want.placement is None:
        return shards.whole(entry.shape)
    return shards.boxes(sharding_of(want.placement), entry.shape)


def _tensor_name(catalog: Catalog, want: Want) -> str:
    if want.unboxed is not None and want.name not in catalog:
        return want.unboxed
    return want.name


def _shape_mismatch(want: Want, entry: TensorEntry) -> ShapeMismatchError:
    return ShapeMismatchError(
        "Shape mismatch",
        file=entry.file,
        tensor=want.name,
        expected=f"{want.shape} (the abstract tree)",
        found=f"{entry.shape} (the file)",
    )


def _refuse_unexpected(catalog: Catalog, names: list[str], tree: WantedTree) -> None:
    covered = tuple(f"{name}." for name in tree.skipped)
    unexpected = [
        name
        for name in sorted(set(catalog.names) - set(names) - tree.skipped)
        if not name.startswith(covered)
    ]
    if unexpected:
        message = "the checkpoint has a tensor that the abstract tree does not name"
        raise UnexpectedTensorError.collect(
            [UnexpectedTensorError(message, file=catalog.path, tensor=name) for name in unexpected],
            hint="Put `...` where a tensor is not wanted, or load with ReadOptions(strict=False).",
        )


def _raise_all(problems: list[MismatchError]) -> None:
    """One error for all problems; of their common class where they have one."""
    kinds = {type(problem) for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else MismatchError
    raise kind.collect(problems)
