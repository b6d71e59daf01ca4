"""Applies what a checkpoint of this package recorded about its leaves."""

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
from orbax_safetensors_layout.errors import (
    DtypeMismatchError,
    InvalidManifestError,
    MismatchError,
    ShapeMismatchError,
    listed,
)
from orbax_safetensors_layout.format import (
    Leaf,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
    leaves,
    short_repr,
)
from orbax_safetensors_layout.mapping import (
    Mapping,
    Subject,
    cast_into,
    check_castable,
    is_whole,
    rounded,
)
from orbax_safetensors_layout.pytree import AbstractLeaf, AbstractTree, decode_treedef
from orbax_safetensors_layout.sharding import decode_sharding, is_abstract, sharding_of

from .resolve import check_placeable, jax_dtype, prefixes, stored_name

SavedValue = bool | int | float | str

_HOST_KINDS = ("numpy", "numpy_scalar")


class SavedMetadata:
    """The records of a checkpoint's manifest, if it has one.

    One that does not fit the files is an error, but counts for nothing where a mapping takes them.
    """

    def __init__(self, catalog: Catalog, *, is_mapped: bool = False) -> None:
        self._catalog = catalog
        try:
            manifest = catalog.manifest()
        except InvalidManifestError:
            if not is_mapped:
                raise
            manifest = None
        self._node = None if manifest is None else manifest.tree
        self._shardings = () if manifest is None else manifest.shardings
        self._placements: dict[int, Sharding | None] = {}
        self._leaves: dict[str, Leaf] = {}  # by dotted name, and tensors also by their own
        for name, leaf in () if self._node is None else leaf_names(self._node):
            self._leaves[name] = leaf
            if isinstance(leaf, TensorLeaf):
                self._leaves[leaf.tensor] = leaf

    def values(self) -> dict[str, SavedValue]:
        """Return the numbers and strings that were saved beside the tensors."""
        leaves = self._leaves.items()
        return {name: leaf.value for name, leaf in leaves if isinstance(leaf, ValueLeaf)}

    def tree(self) -> AbstractTree | None:
        """The tree as it was saved, to be restored as it was; None where none is recorded."""
        node = self._node
        if node is None:
            return None
        saved = [*leaves(node)]
        parsed = [
            self._abstract_leaf(leaf) if isinstance(leaf, TensorLeaf) else None for leaf in saved
        ]
        values = [leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in saved]

        def build(values: Sequence[Any]) -> Any:
            filled = iter(values)
            return decode_treedef(node, lambda _: next(filled))

        named = {name for name, leaf in leaf_names(node) if isinstance(leaf, ValueLeaf)}
        return AbstractTree(values, parsed, named, build)

    def apply_defaults(
        self, tree: AbstractTree, *, devices: bool, partial: bool, mapping: Mapping | None
    ) -> AbstractTree:
        """Return an abstract tree with recorded placements and values in place of defaults.

        Leaves whose value is in the manifest become it, unless a mapping makes them. Without
        a mapping, arrays that the tree does not place go where they were saved from, if there are
        such devices, and with `partial` leaves that the checkpoint lacks stay as they are given.
        `devices` refuses shardings without devices. Recorded values that do not fit the tree are
        one `MismatchError`.
        """
        given, parsed, skipped = list(tree.leaves), list(tree.parsed), set(tree.skipped)
        problems: list[MismatchError] = []
        lacking: list[str] = []
        for number, abstract in enumerate(tree.parsed):
            if abstract is None:
                continue
            name = stored_name(self._catalog, abstract)
            leaf = self._leaves.get(name)
            if mapping is not None and (isinstance(leaf, TensorLeaf) or mapping.makes(name)):
                continue
            if isinstance(leaf, TensorLeaf):
                parsed[number] = self._completed(abstract, leaf)
            elif isinstance(leaf, ValueLeaf):
                try:
                    check_placeable(abstract, devices)
                    given[number] = _as_abstract(leaf.value, abstract)
                    parsed[number] = None
                    skipped |= {name, abstract.name}
                except MismatchError as problem:
                    problem.file, problem.tensor = self._catalog.path, name
                    problems.append(problem)
            elif partial and mapping is None and self._lacks(name):
                parsed[number] = None
                lacking.append(abstract.name)
        if problems:
            raise MismatchError.collect(problems)
        if lacking:
            logging.warning(
                "%s lacks %s of the abstract tree, which comes back as given there.",
                self._catalog.path,
                listed(lacking),
            )
        return tree._replace(leaves=given, parsed=parsed, skipped=skipped)

    def _lacks(self, name: str) -> bool:
        """Whether there is no tensor of a name, nor below it, nor one that it would be below."""
        return name not in self._branches and not any(
            prefix in self._catalog or prefix in self._leaves for prefix in prefixes(name)
        )

    @functools.cached_property
    def _branches(self) -> set[str]:
        names = (*self._catalog.names, *self._leaves)
        return {prefix for name in names for prefix in prefixes(name)}

    def _completed(self, abstract: AbstractLeaf, leaf: TensorLeaf) -> AbstractLeaf:
        """Return an abstract array as it was saved, where the caller leaves that open."""
        if abstract.as_saved and leaf.kind in _HOST_KINDS:
            is_scalar = leaf.kind == "numpy_scalar" and abstract.shape is None
            scalar = np.generic if is_scalar else abstract.scalar
            abstract = abstract._replace(placement=None, scalar=scalar)
        elif not abstract.is_placed:
            abstract = abstract._replace(placement=self._placement(leaf) or abstract.placement)
        if leaf.key_impl is not None and abstract.key_impl not in (None, leaf.key_impl):
            raise DtypeMismatchError(
                "typed PRNG keys of another implementation",
                file=self._catalog.path,
                tensor=leaf.tensor,
                expected=f"{abstract.key_impl} (the abstract tree)",
                found=leaf.key_impl,
            )
        if leaf.key_impl is None or not abstract.takes_keys:
            return abstract
        return abstract._replace(key_impl=leaf.key_impl, dtype=None)

    def _abstract_leaf(self, leaf: TensorLeaf) -> AbstractLeaf:
        placement = None if leaf.kind in _HOST_KINDS else self._placement(leaf)
        scalar = np.generic if leaf.kind == "numpy_scalar" else None
        return AbstractLeaf(leaf.tensor, None, None, None, placement, scalar, True, leaf.key_impl)

    def _placement(self, leaf: TensorLeaf) -> Sharding | None:
        if leaf.sharding is None:
            return None
        if leaf.sharding not in self._placements:
            sharding = decode_sharding(self._shardings[leaf.sharding])
            self._placements[leaf.sharding] = sharding
            if sharding is None:
                logging.warning(
                    "%s was saved with shardings over devices that this program does not have;"
                    " arrays that have no sharding in the abstract tree come back unsharded.",
                    self._catalog.path,
                )
        return self._placements[leaf.sharding]


def _as_abstract(value: SavedValue, abstract: AbstractLeaf) -> Any:
    """Return a recorded number or string in place of an abstract leaf."""
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
            hint="Ask for shape (), or for a Python number.",
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
    sharding = sharding_of(abstract.placement)
    if is_abstract(sharding):
        return value  # of a plan, which makes no arrays
    # A process that has none of the devices makes no shard that the dtype could be taken from.
    return jax.make_array_from_callback((), sharding, lambda _: result, dtype=result.dtype)


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
        "the recorded value does not fit the requested leaf",
        expected=expected,
        found=f"{short_repr(value)} ({type(value).__name__})",
    )
