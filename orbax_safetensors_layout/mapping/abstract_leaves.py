"""Converts between trees of JAX and leaves by name: the one module here that imports JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.pytree import dotted_name, unboxed_name

from .shapes import TensorSpec

_struct: Any = jax.ShapeDtypeStruct  # untyped in some releases of jax


def abstract_tree(specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Return leaves by dotted name as nested dicts of `jax.ShapeDtypeStruct`."""
    tree: dict[str, Any] = {}
    for name, spec in specs.items():
        *folders, last = name.split(".")
        node: Any = tree
        for folder in folders:
            node = node.setdefault(folder, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or last in node:
            raise MappingError("the name of a leaf is the prefix of another's", tensor=name)
        node[last] = _struct(spec.shape, spec.dtype)
    return tree


def leaf_shapes(tree: Any) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each leaf of a tree by name, as loading names it; None without one."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {unboxed_name(key) or dotted_name(key): getattr(x, "shape", None) for key, x in leaves}
