"""The model side of a mapping as a tree: the one module of `mapping` that JAX is imported for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.pytree import dotted_name, unboxed_name

from .shapes import TensorSpec

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax


def abstract_tree(facts: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Leaves by dotted name as nested dicts of `jax.ShapeDtypeStruct`.

    Raises:
        MappingError: A leaf's name is also the begin of another's.
    """
    tree: dict[str, Any] = {}
    for name, fact in facts.items():
        *folders, last = name.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise MappingError("a leaf stands where others are below it", tensor=name)
        if last in node:
            raise MappingError("a leaf stands where others are below it", tensor=name)
        node[last] = _struct(fact.shape, fact.dtype)
    return tree


def leaf_shapes(tree: Any) -> dict[str, tuple[int, ...] | None]:
    """Name and shape of each leaf of a tree, as loading names them; None where it has none."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        unboxed_name(path) or dotted_name(path): getattr(leaf, "shape", None)
        for path, leaf in pairs
    }
