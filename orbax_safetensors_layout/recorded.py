"""What a checkpoint of this package recorded about its leaves, for those who restore it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Sharding

from orbax_safetensors_layout import placements
from orbax_safetensors_layout.errors import DtypeMismatchError, ShapeMismatchError
from orbax_safetensors_layout.format.catalog import Catalog
from orbax_safetensors_layout.format.manifest import (
    Leaf,
    Manifest,
    Node,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
    leaves,
)
from orbax_safetensors_layout.plan.shards import sharding_of
from orbax_safetensors_layout.structure import rebuild
from orbax_safetensors_layout.tree import Want, WantedTree


class Recorded:
    """The manifest of a checkpoint, read when something is asked of it.

    Args:
        catalog: The checkpoint.
    """

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
        found: dict[str, Leaf] = {}
        for name, leaf in () if node is None else leaf_names(node):
            found[name] = leaf
            if isinstance(leaf, TensorLeaf):
                found[leaf.tensor] = leaf
        return found

    def tree(self) -> WantedTree | None:
        """The tree as it was saved, to be restored as it was; None where none is recorded."""
        if self.manifest is None or self.manifest.tree is None:
            return None
        node = self.manifest.tree
        found = [*leaves(node)]
        wants = [self._want(leaf) if isinstance(leaf, TensorLeaf) else None for leaf in found]
        values = [leaf.value if isinstance(leaf, ValueLeaf) else None for leaf in found]
        return WantedTree(values, wants, set(), functools.partial(_rebuild, node))

    def settle(self, tree: WantedTree) -> WantedTree:
        """A tree that the caller wants, with what the checkpoint recorded in place of defaults.

        Leaves whose value stands in the manifest become that value; arrays that the tree does not
        place go where they were saved from, if there are such devices.
        """
        given, wants = list(tree.leaves), list(tree.wants)
        for number, want in enumerate(tree.wants):
            if want is None:
                continue
            name = self._name(want)
            if name is None:
                leaf = self._leaves.get(want.name) or self._leaves.get(want.unboxed or want.name)
                if isinstance(leaf, ValueLeaf):
                    given[number], wants[number] = _as_wanted(leaf.value, want), None
                continue
            leaf = self._leaves.get(name)
            if isinstance(leaf, TensorLeaf):
                wants[number] = self._settled(want, leaf)
        return tree._replace(leaves=given, wants=wants)

    def _settled(self, want: Want, leaf: TensorLeaf) -> Want:
        """A wanted array as it was saved, where the caller leaves that open.

        Raises:
            DtypeMismatchError: Typed keys of another implementation are wanted.
        """
        if not want.is_placed:
            want = want._replace(placement=self._placement(leaf) or want.placement)
        if leaf.key_impl is None:
            return want
        if want.key_impl not in (None, leaf.key_impl):
            raise DtypeMismatchError(
                "typed PRNG keys of another implementation",
                file=self._catalog.path,
                tensor=want.name,
                expected=f"{want.key_impl} (the abstract tree)",
                found=leaf.key_impl,
            )
        return want._replace(key_impl=leaf.key_impl, dtype=None) if want.takes_keys else want

    def dtype(self, name: str) -> np.dtype | None:
        """The dtype of a tensor's values, where the file's is another."""
        leaf = self._leaves.get(name)
        return (
            None if not isinstance(leaf, TensorLeaf) or leaf.dtype is None else np.dtype(leaf.dtype)
        )

    def is_raw(self, name: str, dtype: np.dtype) -> bool:
        """Whether a tensor of bytes holds elements of `dtype`, one a byte, as they are."""
        leaf = self._leaves.get(name)
        return isinstance(leaf, TensorLeaf) and leaf.dtype == dtype.name

    def _name(self, want: Want) -> str | None:
        for name in (want.name, want.unboxed):
            if name is not None and name in self._catalog:
                return name
        return None

    def _want(self, leaf: TensorLeaf) -> Want:
        placement = None if leaf.kind in ("numpy", "numpy_scalar") else self._placement(leaf)
        scalar = np.generic if leaf.kind == "numpy_scalar" else None
        dtype = None if leaf.dtype is None else np.dtype(leaf.dtype)
        return Want(leaf.tensor, None, None, dtype, placement, scalar, True, leaf.key_impl)

    def _placement(self, leaf: TensorLeaf) -> Sharding | None:
        if leaf.sharding is None or self.manifest is None:
            return None
        if leaf.sharding not in self._placements:
            found = placements.restore(self.manifest.shardings[leaf.sharding])
            self._placements[leaf.sharding] = found
            if found is None:
                logging.warning(
                    "%s was saved with shardings over devices that this program does not have;"
                    " arrays that have no sharding in the abstract tree come back unsharded.",
                    self._catalog.path,
                )
        return self._placements[leaf.sharding]


def _rebuild(node: Node, values: Sequence[Any]) -> Any:
    filled = iter(values)
    return rebuild(node, lambda _: next(filled))


def _as_wanted(value: Any, want: Want) -> Any:
    """A recorded number or string in place of the leaf that is wanted.

    Raises:
        ShapeMismatchError: An array that is no scalar is wanted.
        DtypeMismatchError: The wanted type can not hold the value.
    """
    if want.scalar is not None and want.scalar is not np.generic:
        if isinstance(value, str) is not (want.scalar is str) or want.scalar(value) != value:
            raise _not_a(value, want, want.scalar.__name__)
        return want.scalar(value)
    if want.shape is None and want.dtype is None and want.placement is None:
        return value
    if want.shape not in (None, ()):
        raise ShapeMismatchError(
            "Shape mismatch",
            tensor=want.name,
            expected=f"{want.shape} (the abstract tree)",
            found=f"{value!r}, a single value",
        )
    if isinstance(value, str):
        raise _not_a(value, want, "a number")
    array = np.asarray(value)
    result = array if want.dtype is None else array.astype(want.dtype)
    exact = not jax.numpy.issubdtype(result.dtype, np.inexact)
    if array.dtype.kind == "O" or (exact and result != array):
        raise _not_a(value, want, str(want.dtype))
    if want.placement is None:
        return result if want.scalar is None else result[()]
    return jax.make_array_from_callback((), sharding_of(want.placement), lambda _: result)


def _not_a(value: Any, want: Want, wanted: str) -> DtypeMismatchError:
    return DtypeMismatchError(
        "the recorded value is not what is wanted",
        tensor=want.name,
        expected=wanted,
        found=f"{value!r} ({type(value).__name__})",
    )
