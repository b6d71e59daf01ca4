"""The abstract tree that a caller asks for, parsed once into `AbstractLeaf`s."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_safetensors_layout.errors import DtypeMismatchError
from orbax_safetensors_layout.sharding import Placement, is_abstract

from . import prng
from .keys import dotted_name, nested_dicts, unboxed_names

abstract_array: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax

_SCALARS = (bool, int, float, str)


class AbstractLeaf(NamedTuple):
    """A leaf that the caller asks for; None takes the file's shape and dtype."""

    name: str  # the dotted key path
    unboxed: str | None = None  # the same without the levels of boxes, if there are any
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None
    placement: Placement | None = None  # None for a host value
    scalar: type[bool | int | float | str | np.generic] | None = None  # None for arrays
    is_placed: bool = True  # if not, a sharding that was saved replaces `placement`
    key_impl: str | None = None  # of typed PRNG keys, whose data is read
    takes_keys: bool = False  # also if the data is asked for, as Orbax's restore arguments do
    as_saved: bool = False  # returns numpy arrays and numbers as such


@dataclasses.dataclass(frozen=True, slots=True)
class HostLeaf:
    """An abstract leaf that asks for a numpy array."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class SavedLeaf:
    """An abstract leaf that asks for the type and the placement that were saved."""

    shape: tuple[int, ...] | None  # of typed PRNG keys, theirs or their data's; None if saved so
    dtype: Any  # and None, too
    sharding: Sharding | None = None  # if none was saved, or not for these devices


class AbstractTree(NamedTuple):
    """An abstract tree and its leaves; one left out (`...`) is so with all tensors below it."""

    leaves: list[Any]
    parsed: list[AbstractLeaf | None]  # the parsed leaves; None for one that is left out
    skipped: set[str]  # names of those that are, with and without boxes, and of no tensors
    build: Callable[[Sequence[Any]], Any]  # makes the tree of values

    @classmethod
    def parse(cls, abstract: Any) -> AbstractTree:
        """Parses any pytree.

        Leaves may be `jax.ShapeDtypeStruct` (or anything with `shape`, `dtype` and `sharding`),
        concrete arrays as templates, numpy arrays (or anything with `shape` and `dtype` alone) for
        host arrays, Python scalars and strings or their types, `orbax.checkpoint` restore
        arguments, and `...`. A tree that is parsed already stays so.
        """
        if isinstance(abstract, cls):
            return abstract
        paths, treedef = jax.tree_util.tree_flatten_with_path(abstract)
        names = [dotted_name(path) for path, _ in paths]
        without = unboxed_names([path for path, _ in paths], dicts=True)
        pairs = zip(names, without, strict=True)
        unboxed = [None if name == other else other for name, other in pairs]
        parsed = [
            None if leaf is ... else _parse_leaf(name, other, leaf)
            for name, other, (_, leaf) in zip(names, unboxed, paths, strict=True)
        ]
        plain = {leaf.name for leaf in parsed if leaf is not None and leaf.unboxed is None}
        for number, leaf in enumerate(parsed):  # a box's "a.value" may be the name of another leaf
            if leaf is not None and leaf.unboxed is not None and leaf.name in plain:
                parsed[number] = leaf._replace(name=leaf.unboxed)
        left_out = [n for n, leaf in enumerate(parsed) if leaf is None]
        skipped = {name for n in left_out for name in (names[n], without[n])}
        build = functools.partial(jax.tree_util.tree_unflatten, treedef)
        return cls([leaf for _, leaf in paths], parsed, skipped, build)

    @classmethod
    def of_tensors(cls, names: Sequence[str]) -> AbstractTree:
        """A flat dict of numpy arrays, as they are in the files."""

        def build(values: Sequence[Any]) -> dict[str, Any]:
            return dict(zip(names, values, strict=True))

        return cls([None] * len(names), [AbstractLeaf(name) for name in names], set(), build)


def abstract_dicts(specs: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, Any]:
    """Return shapes and dtypes by dotted name as nested dicts of `jax.ShapeDtypeStruct`."""
    struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax
    return nested_dicts({name: struct(shape, dtype) for name, (shape, dtype) in specs.items()})


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves of a tree with their names, as loading names them, and its treedef."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = unboxed_names([path for path, _ in pairs])
    return [(name, leaf) for name, (_, leaf) in zip(names, pairs, strict=True)], treedef


def leaf_shapes(tree: Any) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each leaf of a tree by name, as loading names it; None without one."""
    return {name: getattr(leaf, "shape", None) for name, leaf in named_leaves(tree)[0]}


def _replicated_everywhere() -> NamedSharding:
    spec: PartitionSpec = PartitionSpec()  # type: ignore[no-untyped-call]
    return NamedSharding(Mesh(np.array(jax.devices()), ("devices",)), spec)


def _parse_leaf(name: str, unboxed: str | None, leaf: Any) -> AbstractLeaf:
    kind = leaf if isinstance(leaf, type) else type(leaf)
    if issubclass(kind, np.str_):
        kind = str  # which it is saved as
    if issubclass(kind, _SCALARS) and not issubclass(kind, np.generic):
        return AbstractLeaf(name, unboxed, (), scalar=kind)
    if hasattr(leaf, "restore_type"):
        return _parse_restore_args(name, unboxed, leaf)
    if isinstance(leaf, np.ndarray | np.generic) or not hasattr(leaf, "sharding"):
        if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"Leaf {unboxed or name!r} of the abstract tree is a {type(leaf).__name__};"
                " expected a jax.ShapeDtypeStruct, an array, a Python scalar or its type, or `...`."
            )
        scalar = np.generic if isinstance(leaf, np.generic) else None
        dtype = _dtype(name, leaf.dtype)
        return AbstractLeaf(name, unboxed, tuple(leaf.shape), dtype, scalar=scalar)
    placement = _placement(leaf)
    as_saved = isinstance(leaf, SavedLeaf)
    impl = prng.implementation(leaf) if prng.is_key(leaf) else None
    data = leaf if impl is None else jax.eval_shape(jax.random.key_data, leaf)
    return AbstractLeaf(
        name,
        unboxed,
        shape=None if data.shape is None else tuple(data.shape),
        dtype=_dtype(name, data.dtype),
        placement=placement or _replicated_everywhere(),
        is_placed=placement is not None and not as_saved,
        key_impl=impl,
        takes_keys=as_saved,
        as_saved=as_saved,
    )


def _parse_restore_args(name: str, unboxed: str | None, args: Any) -> AbstractLeaf:
    impl = prng.implementation(args) if prng.is_key(args) else None
    dtype = None if impl is not None else _dtype(name, args.dtype)
    default = jax.Array if hasattr(args, "sharding") else None
    if (args.restore_type or default) is not jax.Array:
        scalar = args.restore_type if args.restore_type in _SCALARS else None
        shape = () if scalar else None
        leaf = AbstractLeaf(name, unboxed, shape, dtype, scalar=scalar)
        if args.restore_type is not None:
            return leaf
        return leaf._replace(is_placed=False, takes_keys=True, as_saved=True)
    placement = _of_jax(getattr(args, "sharding", None))
    if placement is None and getattr(args, "mesh", None) and args.mesh_axes is not None:
        placement = NamedSharding(args.mesh, args.mesh_axes)
    shape = getattr(args, "global_shape", None) or getattr(args, "shape", None)
    return AbstractLeaf(
        name,
        unboxed,
        shape=None if shape is None else tuple(shape),
        dtype=dtype,
        placement=placement or _replicated_everywhere(),
        is_placed=placement is not None,
        key_impl=impl,
        takes_keys=True,
    )


def _placement(leaf: Any) -> Placement | None:
    format_ = getattr(leaf, "format", None)
    # Concrete arrays always have a device layout; only an abstract leaf asks for one.
    is_array = isinstance(leaf, jax.Array)
    if isinstance(format_, Format) and format_.layout is not None and not is_array:
        order = getattr(format_.layout, "major_to_minor", None)
        row_major = order is not None and order == tuple(sorted(order))
        # Host memory has no other layout, and JAX takes none for it.
        return format_.sharding if row_major and in_host_memory(format_.sharding) else format_
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding) and is_abstract(sharding):
        return _with_devices(sharding)
    return _of_jax(sharding)


def _of_jax(placement: Any) -> Placement | None:
    """Return JAX's own form of a placement, which may be orbax's `ShardingMetadata`."""
    if placement is None or isinstance(placement, Sharding | Format):
        return placement
    return cast(Sharding, placement.to_jax_sharding())


def in_host_memory(sharding: Sharding | None) -> bool:
    """Whether a sharding names another memory than its devices' default."""
    if sharding is None or sharding.memory_kind is None or is_abstract(sharding):
        return False
    device: Any = next(iter(sharding.device_set))
    return bool(sharding.memory_kind != device.default_memory().kind)


def current_mesh() -> Mesh | None:
    """Return the mesh of `jax.set_mesh`, if there is one, and if JAX tells (not jax 0.7)."""
    current = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None
    return current if isinstance(current, Mesh) and not current.empty else None


def _with_devices(sharding: NamedSharding) -> NamedSharding:
    """Return an abstract mesh's sharding, as `jax.eval_shape` gives, on `jax.set_mesh`'s mesh."""
    current = current_mesh()
    if current is not None and dict(current.shape) == dict(sharding.mesh.shape):
        return NamedSharding(current, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def _dtype(name: str, dtype: Any) -> np.dtype | None:
    if dtype is None or isinstance(dtype, np.dtype):
        return dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        raise DtypeMismatchError(
            "a safetensors file holds plain numbers, not an extended dtype",
            tensor=name,
            expected="a plain dtype",
            found=dtype,
            hint="Load the key data as uint32 and wrap it with jax.random.wrap_key_data, or leave"
            " the leaf alone with `...`.",
        )
    return cast(np.dtype, np.dtype(dtype))
