"""The load pipeline, top to bottom: catalog, wants, plan, read, assemble. Start here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from orbax_safetensors_layout.errors import (
    DtypeMismatchError,
    MismatchError,
    ShapeMismatchError,
    UnexpectedTensorError,
)
from orbax_safetensors_layout.format.catalog import Catalog
from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.plan.reads import LeafRead, LocalBoxes, ReadPlan, plan_reads
from orbax_safetensors_layout.plan.shards import (
    Placement,
    ProcessShards,
    is_abstract,
    sharding_of,
)
from orbax_safetensors_layout.transfer.assemble import Assembler, jax_holds
from orbax_safetensors_layout.transfer.casting import cast, check_castable, python_scalar
from orbax_safetensors_layout.transfer.progress import progress_callback
from orbax_safetensors_layout.transfer.read import Deliver, ReadStats, read_leaves
from orbax_safetensors_layout.tree import Want, WantedTree

PathLike = str | os.PathLike[str]
_MAX_RANK = 64  # numpy's


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One tensor of a checkpoint.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        file: The file it is in.
        nbytes: Its bytes in the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: str
    nbytes: int


def load(
    path: PathLike,
    abstract: Any = None,
    *,
    only: str | Sequence[str] | None = None,
    options: ReadOptions | None = None,
) -> Any:
    """Loads a safetensors checkpoint; each process reads the bytes of its own shards.

    There is no communication between processes, no collective and no XLA compilation. Leaves are
    matched to tensors by their dotted key paths, so a nested tree and the flat dict of its dotted
    names load the same tensors.

    Args:
        path: A `.safetensors` file, or a folder of them with or without an index file.
        abstract: The tree that is wanted; see `orbax_safetensors_layout.tree.WantedTree`. Where
            a leaf's dtype is not the file's, values are cast; a cast to integers that do not
            hold the values, or of a 64-bit value that JAX can not hold because x64 is off, is an
            error. Leaves that are jax arrays and name no sharding are replicated on all devices.
            Without a tree, a flat dict of numpy arrays comes back.
        only: Without an abstract tree: glob patterns of the tensors to load
            (`"model.layers.{0..15}.*"`).
        options: How to read.

    Returns:
        The tree, with arrays in place of its leaves.

    Raises:
        CheckpointNotFoundError: Nothing stands at `path`.
        FormatError: A file is malformed.
        MismatchError: Tensors are missing, unexpected (with `ReadOptions.strict`), or of another
            shape or dtype; all problems of one kind are reported together.
        StorageError: A read failed.

    Example:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> folder = tempfile.mkdtemp()
        >>> tensors = {"layer.weight": np.arange(4.0, dtype=np.float32)}
        >>> safetensors.numpy.save_file(tensors, f"{folder}/model.safetensors")
        >>> load(folder)
        {'layer.weight': array([0., 1., 2., 3.], dtype=float32)}
        >>> load(folder, {"layer": {"weight": jax.ShapeDtypeStruct((4,), np.float32)}})
        {'layer': {'weight': Array([0., 1., 2., 3.], dtype=float32)}}
    """
    options = options or ReadOptions()
    with Catalog.open(path) as catalog:
        if abstract is None:
            values, stats = _read_host(catalog, only, options)
        else:
            values, stats = _read_tree(catalog, abstract, only, options)
    _record(stats)
    return values


def metadata(path: PathLike) -> dict[str, TensorMetadata]:
    """Name, shape, dtype, file and size of every tensor of a checkpoint, from the headers alone.

    Raises:
        CheckpointNotFoundError: Nothing stands at `path`.
        FormatError: A header or the index is malformed.
    """
    with Catalog.open(path) as catalog:
        return {
            name: TensorMetadata(entry.shape, entry.dtype.numpy, entry.file, entry.nbytes)
            for name, entry in catalog.all_entries().items()
        }


def plan_load(
    path: PathLike,
    abstract: Any = None,
    *,
    only: str | Sequence[str] | None = None,
    options: ReadOptions | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> ReadPlan:
    """What `load` would read, from the headers alone.

    Args:
        path: As for `load`.
        abstract: As for `load`. Shardings may be `NamedSharding`s over an `AbstractMesh`, for a
            cluster that one does not have: devices are numbered in row-major order of the mesh
            and divided among the processes in equal blocks.
        only: As for `load`.
        options: As for `load`.
        process_index: The process whose plan is wanted; by default this one.
        process_count: For an `AbstractMesh`: the number of processes; by default
            `jax.process_count()`.

    Raises:
        ValueError: There is no process of that index.
    """
    options = options or ReadOptions()
    with Catalog.open(path) as catalog:
        if abstract is None:
            return _plan(catalog, _host_leaves(catalog, only), options, adopt=True)
        _refuse_only(only)
        tree = WantedTree.parse(abstract)
        shards = ProcessShards(process_index, process_count)
        leaves, _ = _leaf_reads(catalog, tree, shards, strict=options.strict, devices=False)
        return _plan(catalog, leaves, options, adopt=_adopt(tree.wants))


def _read_host(
    catalog: Catalog, only: str | Sequence[str] | None, options: ReadOptions
) -> tuple[dict[str, np.ndarray], ReadStats]:
    """Whole tensors as a flat dict of numpy arrays."""
    leaves = _host_leaves(catalog, only)
    values: dict[int, np.ndarray] = {}

    def deliver(number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        (values[number],) = parts

    plan = _plan(catalog, leaves, options, adopt=True)
    stats = _read(plan, catalog, options, deliver, [False] * len(leaves))
    return {leaf.name: values[number] for number, leaf in enumerate(leaves)}, stats


def _host_leaves(catalog: Catalog, only: str | Sequence[str] | None) -> list[LeafRead]:
    entries = catalog.all_entries() if only is None else catalog.entries(catalog.select(only))
    for entry in entries.values():
        _check_rank(entry)
    return [
        LeafRead(name, entry, LocalBoxes.whole(entry.shape), entry.dtype.numpy)
        for name, entry in entries.items()
    ]


def _read_tree(
    catalog: Catalog, abstract: Any, only: str | Sequence[str] | None, options: ReadOptions
) -> tuple[Any, ReadStats]:
    """The abstract tree with its leaves filled."""
    _refuse_only(only)
    tree = WantedTree.parse(abstract)
    leaves, exact = _leaf_reads(catalog, tree, ProcessShards(), strict=options.strict, devices=True)
    wants = [want for want in tree.wants if want is not None]
    assembler = Assembler()
    values: list[Any] = [None] * len(wants)
    shards: dict[int, dict[Any, jax.Array]] = {}

    def deliver(
        number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Callable[[], object] | None:
        placement, leaf = wants[number].placement, leaves[number]
        if placement is None:
            values[number] = _host_value(wants[number], leaf, parts[0])
            return None
        shape = leaf.entry.shape
        by_box = dict(zip(boxes, parts, strict=True))
        if len(by_box) == len(leaf.local.boxes):
            in_order = [by_box[box] for box in range(len(by_box))]
            array = assembler.array(shape, leaf.dtype, placement, leaf.local, in_order)
            values[number] = array
            return array.block_until_ready
        some = assembler.shards(shape, placement, leaf.local, by_box)
        mine = shards.setdefault(number, {})
        mine.update(some)
        if len(mine) == len(sharding_of(placement).addressable_devices):
            values[number] = assembler.join(shape, leaf.dtype, placement, shards.pop(number))
        return lambda: [shard.block_until_ready() for shard in some.values()]

    plan = _plan(catalog, leaves, options, adopt=_adopt(wants))
    stats = _read(plan, catalog, options, deliver, exact)
    filled = iter(values)
    return tree.fill(
        [
            leaf if want is None else next(filled)
            for leaf, want in zip(tree.leaves, tree.wants, strict=True)
        ]
    ), stats


def _refuse_only(only: str | Sequence[str] | None) -> None:
    if only is not None:
        raise ValueError(
            "`only` names tensors where there is no abstract tree; with one, leave out the leaves"
            " that are not wanted or put `...` in their place."
        )


def _host_value(want: Want, leaf: LeafRead, value: np.ndarray) -> Any:
    return value if want.scalar is None else python_scalar(value, want.scalar, leaf)


def _adopt(wants: Iterable[Want | None]) -> bool:
    """Whether all arrays keep the buffers they are made of, as on the CPU backend."""
    placements = {id(want.placement): want.placement for want in wants if want is not None}
    return all(_on_cpu(placement) for placement in placements.values() if placement is not None)


def _on_cpu(placement: Placement) -> bool:
    sharding = sharding_of(placement)
    if is_abstract(sharding):
        return False
    devices: Iterable[Any] = sharding.addressable_devices
    return all(device.platform == "cpu" for device in devices)


def _plan(
    catalog: Catalog, leaves: Sequence[LeafRead], options: ReadOptions, *, adopt: bool
) -> ReadPlan:
    return plan_reads(
        leaves,
        profile=options.profile(catalog.storage.kind),
        memory_budget_bytes=options.memory_budget_bytes,
        adopt=adopt,
    )


def _read(
    plan: ReadPlan, catalog: Catalog, options: ReadOptions, deliver: Deliver, exact: Sequence[bool]
) -> ReadStats:
    def convert(number: int, value: np.ndarray) -> np.ndarray:
        leaf = plan.leaves[number]
        return cast(value, leaf.dtype, exact=exact[number], leaf=leaf)

    with _explicit_transfer(), progress_callback(options.progress) as progress:
        return read_leaves(
            plan,
            catalog.storage,
            deliver=deliver,
            convert=convert,
            mmap=options.mmap,
            progress=progress,
        )


def _explicit_transfer() -> contextlib.AbstractContextManager[None]:
    """Loading is an explicit transfer: a guard against implicit ones is not meant for it."""
    config: Any = jax.config
    modes = (config.jax_transfer_guard_host_to_device, config.jax_transfer_guard)
    if any(mode in ("disallow_explicit", "log_explicit") for mode in modes):
        return contextlib.nullcontext()
    allowed: contextlib.AbstractContextManager[None] = jax.transfer_guard_host_to_device("allow")
    return allowed


def _leaf_reads(
    catalog: Catalog, tree: WantedTree, shards: ProcessShards, *, strict: bool, devices: bool
) -> tuple[list[LeafRead], list[bool]]:
    """The reads of a wanted tree, and for each whether its cast must keep every value.

    Args:
        catalog: The checkpoint.
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
    exact: list[bool] = []
    dtypes: dict[tuple[np.dtype, int], np.dtype] = {}
    for want, name in zip(wants, names, strict=True):
        entry = entries[name]
        try:
            if want.shape is not None and want.shape != entry.shape:
                raise _shape_mismatch(want, entry)
            _check_rank(entry)
            _check_placeable(want, devices)
            wanted = want.dtype or entry.dtype.numpy
            dtype = dtypes.get((wanted, id(want.placement)))
            if dtype is None:
                dtype = wanted if want.placement is None else _jax_dtype(wanted, want.placement)
                dtypes[wanted, id(want.placement)] = dtype
            check_castable(entry, want.name, dtype)
            local = _local_boxes(want, entry, shards)
        except MismatchError as problem:
            problem.file, problem.tensor = entry.file, want.name
            problems.append(problem)
            continue
        leaves.append(LeafRead(name, entry, local, dtype))
        exact.append(dtype != wanted)
    if problems:
        _raise_all(problems)
    return leaves, exact


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


def _record(stats: ReadStats) -> None:
    """Reports the load as Orbax's own reader does, so that existing dashboards see it."""
    prefix = "/jax/orbax/read/safetensors/"
    jax.monitoring.record_scalar(prefix + "bytes_read", float(stats.bytes_read))
    jax.monitoring.record_scalar(prefix + "num_reads", float(stats.num_reads))
    jax.monitoring.record_scalar(prefix + "storage_reads", float(stats.storage_reads))
    logging.vlog(1, "Loaded safetensors: %s", stats)
