"""Resolves the leaves of an abstract tree to the arrays of a checkpoint."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format

from orbax_safetensors_layout.catalog import Catalog, added_prefixes
from orbax_safetensors_layout.errors import (
    DtypeMismatchError,
    MismatchError,
    MissingTensorError,
    ShapeMismatchError,
    UnexpectedTensorError,
    listed,
    wildcard_pattern,
)
from orbax_safetensors_layout.geometry import MAX_RANK
from orbax_safetensors_layout.mapping import (
    AskedCast,
    Mapping,
    check_castable,
    check_left_out,
    check_mapping,
    decoding_hint,
    refuse_casts_of_codes,
)
from orbax_safetensors_layout.plan import ArrayRegion, ArraySource, MappedSource, array_sources
from orbax_safetensors_layout.pytree import AbstractLeaf, AbstractTree, in_host_memory, prng
from orbax_safetensors_layout.runtime import Register
from orbax_safetensors_layout.sharding import (
    AddressableShards,
    Placement,
    ProcessShards,
    is_abstract,
    sharding_of,
)

from ._jax import host_registration

_MOST_KINDS = 5  # of names that an error lists
_SHAPE_HINT = (
    "Ask for the file's shapes, which osl.metadata(path) has, or give a mapping that makes others"
    " of them: rule('w', tensor('w').transpose()) in an osl.Mapping."
)


class SourcedLeaf(NamedTuple):
    """A leaf of an abstract tree, and name and source of the array of the checkpoint."""

    abstract: AbstractLeaf
    name: str
    source: ArraySource


class ResolvedLeaf(NamedTuple):
    """A leaf of an abstract tree, and the part of its array that a process needs."""

    number: int  # its number among the abstract leaves of the tree
    abstract: AbstractLeaf
    region: ArrayRegion  # what is read: the boxes of this process. A cast that JAX imposes is exact


def adopts(parsed: Iterable[AbstractLeaf | None]) -> bool:
    """Whether all arrays keep the buffers they are made of, as on the CPU backend."""
    memories = {abstract.placement for abstract in parsed if abstract is not None}
    return all(_on_cpu(placement) for placement in memories if placement is not None)


def registration(parsed: Iterable[AbstractLeaf | None]) -> Register | None:
    """Return what registers host memory for transfers; None where not all are on CUDA devices.

    A numpy array would keep the memory registered for as long as it lives.
    """
    leaves = [abstract for abstract in parsed if abstract is not None]
    placements = {leaf.placement for leaf in leaves if leaf.scalar is None}
    devices: set[Any] = set()
    for placement in placements:
        sharding = None if placement is None else sharding_of(placement)
        if (
            sharding is None
            or is_abstract(sharding)
            or sharding.memory_kind not in (None, "device")
        ):
            return None
        devices |= sharding.addressable_devices
    if not devices or not all(str(device).startswith("cuda:") for device in devices):
        return None
    return host_registration(devices.pop().client)


def _on_cpu(placement: Placement) -> bool:
    sharding = sharding_of(placement)
    if is_abstract(sharding):
        return False
    devices: Iterable[Any] = sharding.addressable_devices
    return all(device.platform == "cpu" for device in devices)


def resolve_leaves(
    sourced: Sequence[SourcedLeaf], shards: ProcessShards, *, devices: bool
) -> list[ResolvedLeaf]:
    """Resolves leaves to what a process needs of them; `devices` refuses shardings without any."""
    problems: list[MismatchError] = []
    leaves: list[ResolvedLeaf] = []
    # For leaves of one shape, dtype and placement the last three fields of `ArrayRegion`.
    fits: dict[tuple[object, ...], tuple[AddressableShards, np.dtype, bool]] = {}
    for abstract, name, source in sourced:
        shape, stored = source.shape, source.dtype
        asked = abstract.dtype or stored
        key = (shape, stored, abstract.shape, asked, abstract.placement, abstract.key_impl)
        fit = fits.get(key)
        if fit is None:
            try:
                _check_shape(abstract, source)
                if abstract.key_impl is not None:
                    prng.keys_of(shape, asked, abstract.key_impl, file=source.file, tensor=name)
                check_placeable(abstract, devices)
                if abstract.placement is None:
                    dtype, local = asked, shards.whole(shape)
                    check_castable(stored, dtype)
                else:
                    dtype = jax_dtype(asked, abstract.placement)
                    check_castable(stored, dtype)
                    local = shards.boxes(sharding_of(abstract.placement), shape)
                fit = fits[key] = local, dtype, dtype != asked
            except MismatchError as problem:
                problem.file, problem.tensor = source.file, name
                problems.append(problem)
                continue
        leaves.append(ResolvedLeaf(len(leaves), abstract, ArrayRegion(name, source, *fit)))
    if problems:
        raise MismatchError.collect(problems)
    return leaves


def source_leaves(
    catalog: Catalog, tree: AbstractTree, mapping: Mapping | None, *, strict: bool
) -> list[SourcedLeaf]:
    """Finds the arrays of a checkpoint that the leaves of an abstract tree are.

    Without a mapping each is the tensor of its name; `strict` refuses tensors that the tree does
    not name. A mapping says itself which tensors may be left.
    """
    parsed = [abstract for abstract in tree.parsed if abstract is not None]
    if tree.skipped:
        stored = {catalog.stored_name(name) or name for name in tree.skipped}
        tree = tree._replace(skipped=tree.skipped | stored)
    if mapping is None:
        names = [stored_name(catalog, abstract) for abstract in parsed]
        try:
            asked = {name: leaf.shape for name, leaf in zip(names, parsed, strict=True)}
            sources = array_sources(catalog, None, asked)
        except MissingTensorError as error:
            if names == [""]:
                error.hint = (
                    "One leaf alone has no name: give {'name': leaf}, or patterns by `only=`."
                )
                raise
            raise _not_found(error, catalog, names) from None
        if strict:
            _refuse_unexpected(catalog, names, tree)
    else:
        check_mapping(mapping)
        names = mapping.names_of([abstract.unboxed or abstract.name for abstract in parsed])
        shapes: dict[str, tuple[int, ...] | None] = {
            leaf: None
            for leaf in (mapping.leaf_names(mapping.names_in(catalog)) if tree.skipped else ())
            if _is_left_out(leaf, tree)
        }
        shapes.update((name, abstract.shape) for name, abstract in zip(names, parsed, strict=True))
        sources = array_sources(catalog, mapping, shapes)
        for leaf, source in sources.items():
            if leaf not in names and isinstance(source, MappedSource):
                check_left_out(leaf, source.bound)
    pairs = zip(parsed, names, strict=True)
    leaves = [SourcedLeaf(abstract, name, sources[name]) for abstract, name in pairs]
    _refuse_casts_of_codes(catalog, leaves)
    return leaves


def _refuse_casts_of_codes(catalog: Catalog, leaves: Sequence[SourcedLeaf]) -> None:
    def casts() -> Iterator[AskedCast]:
        for abstract, _, source in leaves:
            if abstract.dtype is None or abstract.dtype == source.dtype:
                continue
            names = source.tensor_names()
            for name, entry in catalog.entries(names).items():
                if entry.dtype.numpy == source.dtype:  # else a mapping says what it becomes
                    is_decoded = any(other.startswith(f"{name}.") for other in names)
                    yield AskedCast(name, entry.shape, source.dtype, abstract.dtype, is_decoded)

    def hint(cast: AskedCast) -> str:
        return (
            f"{decoding_hint(catalog.path, cast.name)}If these are values, ask for"
            f" {cast.source} and cast what is loaded, or say so in a mapping: osl.rule(LEAF,"
            f" osl.tensor({cast.name!r}).cast({cast.dtype.name!r}))."
        )

    def dtype_of(name: str) -> np.dtype:
        return catalog.entries([name])[name].dtype.numpy

    refuse_casts_of_codes(casts(), catalog.listed(), dtype_of, hint, catalog.path)


def _not_found(
    error: MissingTensorError, catalog: Catalog, names: Sequence[str]
) -> MissingTensorError:
    """Return the error with what to do where most of a tree's names are not the checkpoint's.

    Of many kinds of such names it has one sentence.
    """
    missing = [name for name in names if name not in catalog]
    stored, asked, kinds = (
        dict.fromkeys(map(wildcard_pattern, group)) for group in (catalog.names, names, missing)
    )
    has_others = len(kinds) > _MOST_KINDS and 2 * len(kinds) > len(asked)
    if not stored or (len(missing) < len(names) and not has_others):
        return error
    hint = _prefix_hint(catalog.names, names) or (
        f"The checkpoint has {listed(map(repr, stored), 3)}. A mapping says what leaves are made"
        " of: `mapping=` (or `osl.using(mapping=)` around Orbax's calls) takes"
        " osl.families.mapping(path) or an osl.Mapping."
    )
    if not has_others:
        error.hint = " ".join(filter(None, (error.hint, hint)))
        return error
    return MissingTensorError(
        f"{len(missing):,} of the {len(names):,} leaves have names that no tensor has:"
        f" {listed(map(repr, kinds), _MOST_KINDS)}",
        file=catalog.path,
        tensor=missing[0],
        hint=hint,
    )


def _prefix_hint(stored: Sequence[str], names: Sequence[str]) -> str | None:
    """Return what to do where all names have a prefix too much, or lack one."""
    if prefixes := added_prefixes(names, set(stored)):
        keys = (prefix.split(".")[:-1] for prefix in prefixes)
        trees = ("tree" + "".join(f"[{key!r}]" for key in path) for path in keys)
        without = listed(map(repr, prefixes), 5)
        return (
            f"The checkpoint has the names without {without}: leave it out, as"
            f" {listed(trees, 5, ' or ')} does."
        )
    if prefixes := added_prefixes(stored, set(names)):
        inner_first = (reversed(prefix.split(".")[:-1]) for prefix in prefixes)
        trees = (
            functools.reduce(lambda tree, key: f"{{{key!r}: {tree}}}", path, "tree")
            for path in inner_first
        )
        return (
            f"The checkpoint has the names with {listed(map(repr, prefixes), 5, ' or ')} before"
            f" them: give {listed(trees, 5, ' or ')}."
        )
    return None


def stored_name(catalog: Catalog, abstract: AbstractLeaf) -> str:
    """Return the name that a leaf is stored under, with or without the levels of its boxes."""
    name, unboxed = abstract.name, abstract.unboxed or abstract.name
    return catalog.stored_name(name) or catalog.stored_name(unboxed) or unboxed


def _check_shape(abstract: AbstractLeaf, source: ArraySource) -> None:
    shape = source.shape
    if abstract.shape is not None and abstract.shape != shape:
        doubt = None if source.catalog is None else source.catalog.doubt
        raise ShapeMismatchError(
            "Shape mismatch",
            expected=f"{abstract.shape} (the abstract tree)",
            found=f"{shape} (the file)",
            hint=_SHAPE_HINT if doubt is None else doubt.hint,
        )
    check_holdable(shape, source.dtype)


def jax_dtype(dtype: np.dtype, placement: Placement) -> np.dtype:
    """Return the dtype that JAX makes of one: the same, or 32 bits of 64 where x64 is off."""
    canonical: np.dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))
    sharding = sharding_of(placement)
    devices: Iterable[Any] = () if is_abstract(sharding) else sharding.addressable_devices
    if not all(_jax_holds(canonical, device) for device in itertools.islice(devices, 1)):
        raise DtypeMismatchError(
            f"jax {jax.__version__} has no arrays of this dtype",
            expected=f"a dtype of jax {jax.__version__}",
            found=canonical,
            hint="Ask for a numpy array, or cast in a mapping: osl.tensor(NAME).cast('float32').",
        )
    return canonical


@functools.cache
def _jax_holds(dtype: np.dtype, device: Any) -> bool:
    """Whether this version of JAX has arrays of a dtype (`float6_*`: since 0.12)."""
    if not dtype.name.startswith("float6"):
        return True
    try:
        jax.device_put(np.zeros(1, dtype), device)
    except (TypeError, RuntimeError):
        return False
    return True


def check_placeable(abstract: AbstractLeaf, devices: bool) -> None:
    """Refuses what JAX cannot place, and shardings without devices where there have to be some."""
    placement = abstract.placement
    if placement is None:
        return
    sharding = sharding_of(placement)
    if isinstance(placement, Format) and in_host_memory(sharding) and _on_cpu(placement):
        raise MismatchError(
            "JAX has no arrays of a device layout in another memory of a CPU",
            expected="a layout in the memory of the device, or a sharding alone",
            found=placement,
            hint="Leave out the layout, or the memory kind.",
        )
    if devices and is_abstract(sharding):
        raise MismatchError(
            "the sharding names no devices",
            expected="a sharding over a mesh of devices",
            found=sharding,
            hint="Put jax.sharding.NamedSharding(mesh, spec) with a concrete mesh in the tree, or"
            " load inside `with jax.set_mesh(mesh)`. A plan (plan_load) needs no devices.",
        )


def check_holdable(
    shape: tuple[int, ...], dtype: np.dtype, *, file: str | None = None, tensor: str | None = None
) -> None:
    """Checks that numpy has arrays of a shape: an empty one may have extents of any size."""
    if len(shape) <= MAX_RANK and 0 not in shape:
        return
    try:
        np.empty(shape, dtype)
    except (ValueError, OverflowError) as error:
        raise ShapeMismatchError(
            "numpy cannot hold the tensor",
            file=file,
            tensor=tensor,
            expected=f"at most {MAX_RANK} dimensions, whose extents, zeros left out, multiply to"
            " less than 2**63 bytes",
            found=f"{len(shape)} dimensions, the largest {max(shape)}",
        ) from error


def _is_left_out(name: str, tree: AbstractTree) -> bool:
    """Whether a tree says so of a leaf, or of what the leaf is in."""
    return not tree.skipped.isdisjoint(prefixes(name))


def prefixes(name: str) -> Iterable[str]:
    """Return the names of what a leaf is in, and its own: `a`, `a.b`, `a.b.c`."""
    return itertools.accumulate(name.split("."), lambda above, part: f"{above}.{part}")


def _refuse_unexpected(catalog: Catalog, names: list[str], tree: AbstractTree) -> None:
    manifest = catalog.manifest()
    values = {} if manifest is None else manifest.values()
    asked = {catalog.other_names.get(name, name) for name in names}
    unexpected = [
        name for name in sorted({*catalog.names, *values} - asked) if not _is_left_out(name, tree)
    ]
    if unexpected:
        message = "the checkpoint has a {} that the abstract tree does not name"
        raise UnexpectedTensorError.collect(
            [
                UnexpectedTensorError(
                    message.format("value" if name in values else "tensor"),
                    file=catalog.path,
                    tensor=name,
                )
                for name in unexpected
            ],
            hint="Put `...` for what to leave out, or load with ReadOptions(strict=False).",
        )
