"""Fits trees to an item in Orbax's own format, which has a level `value` for each flax box."""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.tree_util import tree_map_with_path

from orbax_safetensors_layout.pytree import dotted_name, is_attribute_value

from .orbax_format.orbax_reader import stored_names


class BoxFitting:
    """Fits trees to the item of a folder: boxes around single leaves come and go as it has them."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._names = stored_names(directory)

    def fitted(self, tree: Any) -> Any:
        """Return a tree of a caller as the checkpoint has it, with its leaves in their order."""
        return tree_map_with_path(self._fitted_node, tree, is_leaf=_is_box)

    def _fitted_node(self, path: Any, node: Any) -> Any:
        name, is_boxed = dotted_name(path), _is_box(node)
        is_stored_boxed = f"{name}.value" in self._names
        if is_boxed and not is_stored_boxed and name in self._names:
            return jax.tree.leaves(node)[0]
        return {"value": node} if not is_boxed and is_stored_boxed and path else node


def unfitted(item: Any, fitted: Any, restored: Any) -> Any:
    """Return what was restored for a fitted item in the item's own structure."""
    treedef: Any = jax.tree.structure(item)
    if treedef == jax.tree.structure(fitted):
        return restored
    return jax.tree.unflatten(treedef, jax.tree.leaves(restored))


def _is_box(node: Any) -> bool:
    """Whether a node is around a leaf alone: its attribute or key `value`."""
    paths = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    if len(paths) != 1 or len(paths[0][0]) != 1:
        return False
    ((key,), child) = paths[0]
    is_value = is_attribute_value(key) or getattr(key, "key", None) == "value"
    return is_value and jax.tree_util.all_leaves([child])
