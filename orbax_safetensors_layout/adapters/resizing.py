"""Arrays that are cut or filled up with zeros at their ends, as Orbax's `strict=False` asks for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from orbax_safetensors_layout.load import load
from orbax_safetensors_layout.mapping import Expr, Mapping, rule, tensor
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.pytree import dotted_name, prng, unboxed_name

from .metadata import CheckpointMetadata, StoredArray


def load_resized(
    path: str | os.PathLike[str],
    abstract: Any,
    load_others: Callable[[Any], Any],
    *,
    options: ReadOptions,
    loose: bool,
) -> Any:
    """Loads a tree in which the abstract arrays may have another shape, of as many dimensions.

    This goes for arrays whose restore arguments have `strict=False`, or for all if `loose`; not for
    numpy arrays and typed PRNG keys. `load_others` loads a tree whose arrays have their own shapes.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = [leaf for _, leaf in pairs]
    numbers = [n for n, leaf in enumerate(leaves) if loose or not getattr(leaf, "strict", True)]
    if not numbers:
        return load_others(abstract)
    stored: dict[str, Any] = {}
    CheckpointMetadata.read(path, None, stored.__setitem__)
    abstract, rules = {}, []
    for number in numbers:
        key_path, leaf = pairs[number]
        name = dotted_name(key_path)
        name = name if name in stored else unboxed_name(key_path) or name
        array = stored.get(name)
        shape: Any = getattr(leaf, "global_shape", None) or getattr(leaf, "shape", None)
        if not isinstance(array, StoredArray) or not _is_resizable(leaf, array, shape):
            continue
        abstract[str(number)] = ocp.ArrayRestoreArgs(
            dtype=leaf.dtype or array.dtype,
            sharding=leaf.sharding or array.sharding,
            global_shape=tuple(shape),
        )
        rules.append(rule(str(number), _resized(name, array.shape, shape)))
        leaves[number] = ...
    values = load_others(jax.tree.unflatten(structure, leaves))
    if not abstract:
        return values
    resized = load(path, abstract, mapping=Mapping(rules, strict=False), options=options)
    leaves = jax.tree.leaves(values)
    for name, value in resized.items():
        leaves[int(name)] = value
    return jax.tree.unflatten(structure, leaves)


def _is_resizable(leaf: Any, stored: StoredArray, shape: Any) -> bool:
    if shape is None or not hasattr(leaf, "sharding") or prng.is_key(stored):
        return False
    if stored.on_host and leaf.sharding is None:
        return False
    return tuple(shape) != stored.shape and len(shape) == len(stored.shape)


def _resized(name: str, stored_shape: tuple[int, ...], shape: tuple[int, ...]) -> Expr:
    expr = tensor(name)
    for axis, (stored, size) in enumerate(zip(stored_shape, shape, strict=True)):
        if size < stored:
            expr = expr.slice(axis, 0, size)
        elif size > stored:
            expr = expr.pad(axis, 0, size - stored)
    return expr
