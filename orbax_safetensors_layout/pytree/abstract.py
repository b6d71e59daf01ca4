"""The abstract tree that a caller asks for, parsed once into `AbstractLeaf`s."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from orbax_safetensors_layout.errors import DtypeMismatchError
from orbax_safetensors_layout.sharding import Placement, is_abstract

from . import prng
from .keys import dotted_name, unboxed_name

PLACEHOLDER = ...
"""A leaf that is left out: nothing is read for it, and it is returned as it is."""

_SCALARS = (bool, int, float, str)


class AbstractLeaf(NamedTuple):
    """What the caller asks for of one leaf.

    Attributes:
        name: Dotted key path.
        unboxed: The name without the attribute of a flax box around the leaf, if it has one.
        shape: Required shape; None takes the file's.
        dtype: Requested dtype; None takes the file's.
        placement: Sharding or format of a `jax.Array`; None for a host value.
        scalar: The Python type of a scalar leaf, `np.generic` for a numpy scalar; None for arrays.
        is_placed: Whether the tree names a placement. Otherwise a sharding that was saved with the
            tensor replaces `placement`.
        key_impl: Of an array of typed PRNG keys, whose data is read, the implementation's name.
        takes_keys: Whether typed keys are returned as such, although the data is asked for: Orbax's
            restore arguments describe keys by it.
        as_saved: Whether numpy arrays and numbers are returned as such, whatever `placement` is.
    """

    name: str
    unboxed: str | None
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    placement: Placement | None
    scalar: type[bool | int | float | str | np.generic] | None
    is_placed: bool = True
    key_impl: str | None = None
    takes_keys: bool = False
    as_saved: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class HostLeaf:
    """An abstract leaf that asks for a numpy array."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class SavedLeaf:
    """An abstract leaf that asks for the type and the placement that were saved.

    Attributes:
        shape: Its shape; of typed PRNG keys, theirs or their data's.
        dtype: Its dtype.
        sharding: Where an array goes if none was saved, or not for these devices; None: everywhere.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None = None


class AbstractTree(NamedTuple):
    """An abstract tree and its leaves.

    Attributes:
        leaves: All leaves of the tree, placeholders among them.
        wants: The parsed leaves; None for a placeholder.
        skipped: Names of the placeholders, with and without a flax box. One stands for all
            tensors below it.
        build: Makes the tree of values.
    """

    leaves: list[Any]
    wants: list[AbstractLeaf | None]
    skipped: set[str]
    build: Callable[[Sequence[Any]], Any]

    @classmethod
    def parse(cls, abstract: Any) -> AbstractTree:
        """Parses an abstract tree.

        Args:
            abstract: Any pytree. Leaves may be `jax.ShapeDtypeStruct` (or anything with `shape`,
                `dtype` and `sharding`), concrete arrays as templates, numpy arrays (or anything
                with `shape` and `dtype` alone) for host arrays, Python scalars and strings or
                their types, `orbax.checkpoint` restore arguments, and `...`.
        """
        paths, treedef = jax.tree_util.tree_flatten_with_path(abstract)
        wants = [None if leaf is PLACEHOLDER else _parse_leaf(path, leaf) for path, leaf in paths]
        skipped = {
            name
            for path, leaf in paths
            if leaf is PLACEHOLDER
            for name in (dotted_name(path), unboxed_name(path))
            if name is not None
        }
        build = functools.partial(jax.tree_util.tree_unflatten, treedef)
        return cls([leaf for _, leaf in paths], wants, skipped, build)

    @classmethod
    def of_tensors(cls, names: Sequence[str]) -> AbstractTree:
        """A flat dict of numpy arrays, as they are in the files."""
        wants = [AbstractLeaf(name, None, None, None, None, None) for name in names]
        build = functools.partial(_dict_of, names)
        return cls([None] * len(names), [*wants], set(), build)


def _dict_of(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def replicated_everywhere() -> NamedSharding:
    """Return the sharding of leaves that name none: every device holds everything."""
    spec: PartitionSpec = PartitionSpec()  # type: ignore[no-untyped-call]
    return NamedSharding(Mesh(np.array(jax.devices()), ("devices",)), spec)


def _parse_leaf(path: Sequence[Any], leaf: Any) -> AbstractLeaf:
    name, unboxed = dotted_name(path), unboxed_name(path)
    if isinstance(leaf, type) and issubclass(leaf, _SCALARS) and not issubclass(leaf, np.generic):
        return AbstractLeaf(name, unboxed, (), None, None, leaf)
    if isinstance(leaf, _SCALARS) and not isinstance(leaf, np.generic):
        return AbstractLeaf(name, unboxed, (), None, None, type(leaf))
    if hasattr(leaf, "restore_type"):
        return _parse_restore_args(name, unboxed, leaf)
    if isinstance(leaf, np.ndarray | np.generic) or not hasattr(leaf, "sharding"):
        if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"Leaf {name!r} of the abstract tree is a {type(leaf).__name__}; expected a "
                "jax.ShapeDtypeStruct, an array, a Python scalar or its type, or `...`."
            )
        scalar = np.generic if isinstance(leaf, np.generic) else None
        return AbstractLeaf(
            name, unboxed, tuple(leaf.shape), _dtype(name, leaf.dtype), None, scalar
        )
    placement = _placement(leaf)
    as_saved = isinstance(leaf, SavedLeaf)
    is_placed = placement is not None and not as_saved
    impl = prng.implementation(leaf) if prng.is_key(leaf) else None
    data = leaf if impl is None else jax.eval_shape(jax.random.key_data, leaf)
    shape = None if data.shape is None else tuple(data.shape)
    dtype = _dtype(name, data.dtype)
    placement = placement or replicated_everywhere()
    return AbstractLeaf(
        name, unboxed, shape, dtype, placement, None, is_placed, impl, as_saved, as_saved
    )


def _parse_restore_args(name: str, unboxed: str | None, args: Any) -> AbstractLeaf:
    """Parses Orbax's `RestoreArgs` and `ArrayRestoreArgs`, by their attributes."""
    impl = prng.implementation(args) if prng.is_key(args) else None
    dtype = None if impl is not None else _dtype(name, args.dtype)
    default = jax.Array if hasattr(args, "sharding") else None
    if (args.restore_type or default) is not jax.Array:
        scalar = args.restore_type if args.restore_type in _SCALARS else None
        shape = () if scalar else None
        if args.restore_type is not None:
            return AbstractLeaf(name, unboxed, shape, dtype, None, scalar)
        return AbstractLeaf(
            name, unboxed, None, dtype, None, None, is_placed=False, takes_keys=True, as_saved=True
        )
    placement = getattr(args, "sharding", None)
    if placement is not None and not isinstance(placement, Sharding | Format):
        placement = placement.to_jax_sharding()  # orbax's ShardingMetadata
    if placement is None and getattr(args, "mesh", None) and args.mesh_axes is not None:
        placement = NamedSharding(args.mesh, args.mesh_axes)
    shape = getattr(args, "global_shape", None) or getattr(args, "shape", None)
    shape = None if shape is None else tuple(shape)
    is_placed = placement is not None
    placement = placement or replicated_everywhere()
    return AbstractLeaf(
        name, unboxed, shape, dtype, placement, None, is_placed, impl, takes_keys=True
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
    if sharding is not None and not isinstance(sharding, Sharding):
        sharding = sharding.to_jax_sharding()  # orbax's ShardingMetadata
    found: Sharding | None = sharding
    return found


def in_host_memory(sharding: Sharding | None) -> bool:
    """Return whether a sharding names another memory than its devices' default."""
    if sharding is None or sharding.memory_kind is None or is_abstract(sharding):
        return False
    device: Any = next(iter(sharding.device_set))
    found: bool = sharding.memory_kind != device.default_memory().kind
    return found


def _with_devices(sharding: NamedSharding) -> NamedSharding:
    """Return a sharding over an abstract mesh on the mesh of `jax.set_mesh`, where that fits.

    `jax.eval_shape` returns such shardings where mesh axes are explicit.
    """
    current = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None
    if isinstance(current, Mesh) and dict(current.shape) == dict(sharding.mesh.shape):
        return NamedSharding(current, sharding.spec)
    return sharding


def _dtype(name: str, dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        raise DtypeMismatchError(
            "a safetensors file holds plain numbers, not an extended dtype",
            tensor=name,
            expected="a plain dtype",
            found=dtype,
            hint="Load the key data as uint32 and wrap it with jax.random.wrap_key_data, or leave"
            " the leaf alone with `...`.",
        )
    parsed: np.dtype = np.dtype(dtype)
    return parsed
