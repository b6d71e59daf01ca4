"""Loads arrays in other shapes than they were saved in, where Orbax's users ask for that."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.tree_util import tree_flatten_with_path

from orbax_safetensors_layout.load import LoadRequest, load, telling_others
from orbax_safetensors_layout.mapping import Expr, Mapping, rule, tensor
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.pytree import SavedLeaf, dotted_name, prng, unboxed_names

from .metadata import CheckpointMetadata, StoredArray


def begin_resized(
    path: str | os.PathLike[str],
    abstract: Any,
    begin_others: Callable[[Any], Callable[[], Any]],  # for arrays of their own shapes
    *,
    options: ReadOptions,
    loose: bool,
) -> Callable[[], Any]:
    """Holds a tree against the headers; returns a function that loads it.

    `jax.Array`s are cut or filled up with zeros where `strict=False`, or `loose`.
    """
    pairs, treedef = tree_flatten_with_path(abstract)
    leaves, unboxed = (
        [leaf for _, leaf in pairs],
        unboxed_names([path for path, _ in pairs], dicts=True),
    )
    numbers = [n for n, leaf in enumerate(leaves) if loose or not getattr(leaf, "strict", True)]
    if not numbers:
        return begin_others(abstract)
    stored: dict[str, Any] = {}
    with telling_others(path, LoadRequest(abstract, None, None, options)):
        CheckpointMetadata.read(path, None, stored.__setitem__)
    abstract, rules = {}, []
    for number in numbers:
        key_path, leaf = pairs[number]
        name = dotted_name(key_path)
        name = name if name in stored else unboxed[number]
        array = stored.get(name)
        shape: Any = getattr(leaf, "global_shape", None) or getattr(leaf, "shape", None)
        if not isinstance(array, StoredArray) or not _is_resizable(leaf, array, shape):
            continue
        places = [leaf.sharding, array.sharding]
        if isinstance(leaf, SavedLeaf):  # whose own is the fallback
            places.reverse()
        abstract[str(number)] = ocp.ArrayRestoreArgs(
            dtype=leaf.dtype or array.dtype,
            sharding=next((place for place in places if place is not None), None),
            global_shape=tuple(shape),
        )
        rules.append(rule(str(number), _resized(name, array.shape, shape)))
        leaves[number] = ...
    load_others = begin_others(jax.tree.unflatten(treedef, leaves))
    if not abstract:
        return load_others

    def load_all() -> Any:
        leaves = jax.tree.leaves(load_others())
        resized = load(path, abstract, mapping=Mapping(rules, strict=False), options=options)
        for name, value in resized.items():
            leaves[int(name)] = value
        return jax.tree.unflatten(treedef, leaves)

    return load_all


def _is_resizable(leaf: Any, stored: StoredArray, shape: Any) -> bool:
    if shape is None or not hasattr(leaf, "sharding") or prng.is_key(stored):
        return False
    is_host = stored.on_host and leaf.sharding is None
    return not is_host and tuple(shape) != stored.shape and len(shape) == len(stored.shape)


def _resized(name: str, stored_shape: tuple[int, ...], shape: tuple[int, ...]) -> Expr:
    expr = tensor(name)
    for axis, (stored, size) in enumerate(zip(stored_shape, shape, strict=True)):
        if size < stored:
            expr = expr.slice(axis, 0, size)
        elif size > stored:
            expr = expr.pad(axis, 0, size - stored)
    return expr
