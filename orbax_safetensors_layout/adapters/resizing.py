"""Arrays that are cut or filled up with zeros at their ends, as Orbax's `strict=False` asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    """Loads a tree in which arrays may be wanted in another shape, of as many dimensions.

    Numpy arrays and typed PRNG keys have their shape.

    Args:
        path: The checkpoint.
        abstract: The wanted tree.
        load_others: Loads a tree of which all arrays have the shapes that are wanted.
        options: How to read.
        loose: Whether that goes for all arrays, not only for those whose restore arguments have
            `strict=False`.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(abstract)
    leaves = [leaf for _, leaf in pairs]
    numbers = [n for n, leaf in enumerate(leaves) if loose or not getattr(leaf, "strict", True)]
    if not numbers:
        return load_others(abstract)
    stored = _stored_arrays(path)
    wanted, rules = {}, []
    for number in numbers:
        found = _stored(stored, pairs[number][0])
        shape = _shape(leaves[number])
        if found is None or not _is_resizable(leaves[number], found, shape):
            continue
        wanted[str(number)] = _placed(leaves[number], found, shape)
        rules.append(rule(str(number), _resized(found, shape)))
        leaves[number] = ...
    values = load_others(jax.tree.unflatten(structure, leaves))
    if not wanted:
        return values
    resized = load(path, wanted, mapping=Mapping(rules, strict=False), options=options)
    leaves = jax.tree.leaves(values)
    for number, value in resized.items():
        leaves[int(number)] = value
    return jax.tree.unflatten(structure, leaves)


def _stored_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArrayMetadata]:
    found: dict[str, StoredArrayMetadata] = {}
    CheckpointMetadata.read(path).tree(
        lambda array: found.update({array.name: array}), lambda *_: None
    )
    return found


def _stored(
    arrays: dict[str, StoredArrayMetadata], path: Sequence[Any]
) -> StoredArrayMetadata | None:
    return arrays.get(dotted_name(path)) or arrays.get(unboxed_name(path) or "")


def _shape(leaf: Any) -> tuple[int, ...] | None:
    shape = getattr(leaf, "global_shape", None) or getattr(leaf, "shape", None)
    return None if shape is None else tuple(shape)


def _is_resizable(leaf: Any, stored: StoredArrayMetadata, shape: tuple[int, ...] | None) -> bool:
    if shape is None or not hasattr(leaf, "sharding") or prng.is_key(stored):
        return False
    if stored.on_host and leaf.sharding is None:
        return False
    return shape != stored.shape and len(shape) == len(stored.shape)


def _placed(leaf: Any, stored: StoredArrayMetadata, shape: tuple[int, ...] | None) -> Any:
    return ocp.ArrayRestoreArgs(
        dtype=leaf.dtype or stored.dtype,
        sharding=leaf.sharding or stored.placement,
        global_shape=shape,
    )


def _resized(stored: StoredArrayMetadata, shape: tuple[int, ...] | None) -> Expr:
    made = tensor(stored.name)
    for axis, (found, wanted) in enumerate(zip(stored.shape, shape or (), strict=True)):
        if wanted < found:
            made = made.slice(axis, 0, wanted)
        elif wanted > found:
            made = made.pad(axis, 0, wanted - found)
    return made
