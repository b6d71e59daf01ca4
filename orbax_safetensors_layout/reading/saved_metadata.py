"""What a checkpoint of this package recorded about its leaves, for those who restore it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Sharding

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import DtypeMismatchError, MismatchError, ShapeMismatchError
from orbax_safetensors_layout.format import (
    Leaf,
    Manifest,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
    leaves,
    short_repr,
)
from orbax_safetensors_layout.mapping import Subject, cast_into, check_castable, is_whole, rounded
from orbax_safetensors_layout.pytree import AbstractLeaf, AbstractTree, decode_treedef
from orbax_safetensors_layout.sharding import decode_sharding, is_abstract, sharding_of

from .resolve import check_placeable, jax_dtype

SavedValue = bool | int | float | str

_HOST_KINDS = ("numpy", "numpy_scalar")


class SavedMetadata:
    """The manifest of a checkpoint, read when something is asked of it."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._placements: dict[int, Sharding | None] = {}

    @functools.cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None for a checkpoint that others wrote."""
        return self._catalog.manifest()

    @functools.cached_property
    def _leaves(self) -> dict[str, Leaf]:
        """By dotted name, and tensors also by their own."""
        node = None if self.manifest is None else self.manifest.tree
        by_name: dict[str, Leaf] = {}
        for name, leaf in () if node is None else leaf_names(node):
            by_name[name] = leaf
            if isinstance(leaf, TensorLeaf):
                by_name[leaf.tensor] = leaf
        return by_name

    def tree(self) -> AbstractTree | None:
        """The tree as it was saved, to be restored as it was; None where none is recorded."""
        if self.manifest is None or self.manifest.tree is None:
            return None
        node = self.manifest.tree
        saved = [*leaves(node)]
        parsed = [
            self._abstract_leaf(leaf) if isinstance(leaf, TensorLeaf) else None for leaf in saved
        ]
        values = [leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in saved]

        def build(values: Sequence[Any]) -> Any:
            filled = iter(values)
            return decode_treedef(node, lambda _: next(filled))

        return AbstractTree(values, parsed, set(), build)

    def apply_defaults(self, tree: AbstractTree, *, devices: bool) -> AbstractTree:
        """Return an abstract tree with what the checkpoint recorded in place of defaults.

        Leaves whose value is in the manifest become that value; arrays that the tree does not
        place go where they were saved from, if there are such devices. `devices` refuses shardings
        without devices.

        Raises:
            MismatchError: Recorded values do not fit the abstract tree; names all.
        """
        given, parsed = list(tree.leaves), list(tree.parsed)
        problems: list[MismatchError] = []
        for number, abstract in enumerate(tree.parsed):
            if abstract is None:
                continue
            name = self._name(abstract)
            if name is None:
                leaf = self._leaves.get(abstract.name) or self._leaves.get(
                    abstract.unboxed or abstract.name
                )
                if isinstance(leaf, ValueLeaf):
                    try:
                        check_placeable(abstract, devices)
                        given[number] = _as_abstract(leaf.value, abstract)
                        parsed[number] = None
                    except MismatchError as problem:
                        problem.file, problem.tensor = self._catalog.path, abstract.name
                        problems.append(problem)
                continue
            leaf = self._leaves.get(name)
            if isinstance(leaf, TensorLeaf):
                parsed[number] = self._completed(abstract, leaf)
        if problems:
            raise MismatchError.collect(problems)
        return tree._replace(leaves=given, parsed=parsed)

    def _completed(self, abstract: AbstractLeaf, leaf: TensorLeaf) -> AbstractLeaf:
        """Return an abstract array as it was saved, where the caller leaves that open."""
        if abstract.as_saved and leaf.kind in _HOST_KINDS:
            abstract = abstract._replace(placement=None)
        elif not abstract.is_placed:
            abstract = abstract._replace(placement=self._placement(leaf) or abstract.placement)
        if leaf.key_impl is None:
            return abstract
        if abstract.key_impl not in (None, leaf.key_impl):
            raise DtypeMismatchError(
                "typed PRNG keys of another implementation",
                file=self._catalog.path,
                tensor=abstract.name,
                expected=f"{abstract.key_impl} (the abstract tree)",
                found=leaf.key_impl,
            )
        return (
            abstract._replace(key_impl=leaf.key_impl, dtype=None)
            if abstract.takes_keys
            else abstract
        )

    def _name(self, abstract: AbstractLeaf) -> str | None:
        for name in (abstract.name, abstract.unboxed):
            if name is not None and name in self._catalog:
                return name
        return None

    def _abstract_leaf(self, leaf: TensorLeaf) -> AbstractLeaf:
        placement = None if leaf.kind in _HOST_KINDS else self._placement(leaf)
        scalar = np.generic if leaf.kind == "numpy_scalar" else None
        return AbstractLeaf(leaf.tensor, None, None, None, placement, scalar, True, leaf.key_impl)

    def _placement(self, leaf: TensorLeaf) -> Sharding | None:
        if leaf.sharding is None or self.manifest is None:
            return None
        if leaf.sharding not in self._placements:
            sharding = decode_sharding(self.manifest.shardings[leaf.sharding])
            self._placements[leaf.sharding] = sharding
            if sharding is None:
                logging.warning(
                    "%s was saved with shardings over devices that this program does not have;"
                    " arrays that have no sharding in the abstract tree come back unsharded.",
                    self._catalog.path,
                )
        return self._placements[leaf.sharding]


def _as_abstract(value: SavedValue, abstract: AbstractLeaf) -> Any:
    """A recorded number or string in place of the leaf that is wanted."""
    if abstract.scalar is not None and abstract.scalar is not np.generic:
        return _as_python(value, abstract.scalar)
    if abstract.as_saved:
        abstract = abstract._replace(placement=None)
        if abstract.shape is None and abstract.dtype is None:
            return value
    if abstract.shape not in (None, ()):
        raise ShapeMismatchError(
            "Shape mismatch",
            expected=f"{abstract.shape} (the abstract tree)",
            found=f"{short_repr(value)}, a single value",
        )
    array = _as_array(value, abstract.dtype)
    asked = abstract.dtype or array.dtype
    dtype = asked if abstract.placement is None else jax_dtype(asked, abstract.placement)
    check_castable(array.dtype, dtype)
    # As of arrays: 64 bits that were asked for and that JAX cannot hold must survive. Where
    # nothing was asked for, a float is rounded, but stays finite.
    is_rounded = abstract.dtype is None and dtype.kind == "f"
    is_kept = is_rounded and bool(np.isfinite(array) == np.isfinite(rounded(array, dtype)))
    exact = dtype != asked and not is_kept
    result = np.empty_like(array, dtype)
    cast_into(result, array, exact=exact, subject=Subject(abstract.name, None, array.dtype))
    if abstract.placement is None:
        return result if abstract.scalar is None else result[()]
    if is_abstract(sharding_of(abstract.placement)):
        return value  # of a plan, which makes no arrays
    return jax.make_array_from_callback((), sharding_of(abstract.placement), lambda _: result)


def _as_python(value: SavedValue, kind: type) -> SavedValue:
    """A recorded value as a Python scalar of another type that holds it."""
    try:
        scalar: SavedValue = kind(value)
        kept = scalar == value or (kind is float and scalar != scalar and value != value)
    except (ValueError, OverflowError):  # NaN, infinite, too large
        kept = False
    if not kept or isinstance(value, str) is not (kind is str):
        raise _not_a(value, kind.__name__)
    return scalar


def _as_array(value: SavedValue, dtype: np.dtype | None) -> np.ndarray:
    """A recorded number as an array that can be cast to a dtype."""
    if isinstance(value, str):
        raise _not_a(value, "a number")
    array = np.asarray(value)
    if array.dtype != object:
        return array
    if dtype is not None and not is_whole(dtype):
        with contextlib.suppress(OverflowError):
            if float(value) == value:
                return np.asarray(float(value))
    raise _not_a(value, "an integer of 64 bits" if dtype is None else str(dtype))


def _not_a(value: SavedValue, expected: str) -> DtypeMismatchError:
    return DtypeMismatchError(
        "the recorded value is not what is wanted",
        expected=expected,
        found=f"{short_repr(value)} ({type(value).__name__})",
    )
