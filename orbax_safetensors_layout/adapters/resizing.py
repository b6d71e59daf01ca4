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

from .metadata import CheckpointMetadata, StoredArrayMetadata


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
    stored: dict[str, StoredArrayMetadata] = {}
    CheckpointMetadata.read(path, None).tree(
        lambda array: stored.update({array.name: array}), lambda *_: None
    )
    abstract, rules = {}, []
    for number in numbers:
        key_path, leaf = pairs[number]
        array = stored.get(dotted_name(key_path)) or stored.get(unboxed_name(key_path) or "")
        shape = getattr(leaf, "global_shape", None) or getattr(leaf, "shape", None)
        if array is None or shape is None or not _is_resizable(leaf, array, tuple(shape)):
            continue
        abstract[str(number)] = ocp.ArrayRestoreArgs(
            dtype=leaf.dtype or array.dtype,
            sharding=leaf.sharding or array.placement,
            global_shape=tuple(shape),
        )
        rules.append(rule(str(number), _resized(array, tuple(shape))))
        leaves[number] = ...
    values = load_others(jax.tree.unflatten(structure, leaves))
    if not abstract:
        return values
    resized = load(path, abstract, mapping=Mapping(rules, strict=False), options=options)
    leaves = jax.tree.leaves(values)
    for name, value in resized.items():
        leaves[int(name)] = value
    return jax.tree.unflatten(structure, leaves)


def _is_resizable(leaf: Any, stored: StoredArrayMetadata, shape: tuple[int, ...]) -> bool:
    if not hasattr(leaf, "sharding") or prng.is_key(stored):
        return False
    if stored.on_host and leaf.sharding is None:
        return False
    return shape != stored.shape and len(shape) == len(stored.shape)


def _resized(stored: StoredArrayMetadata, shape: tuple[int, ...]) -> Expr:
    expr = tensor(stored.name)
    for axis, (size, wanted_size) in enumerate(zip(stored.shape, shape, strict=True)):
        if wanted_size < size:
            expr = expr.slice(axis, 0, wanted_size)
        elif wanted_size > size:
            expr = expr.pad(axis, 0, wanted_size - size)
    return expr
