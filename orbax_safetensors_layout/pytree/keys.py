"""Pytree key paths as dotted names, without importing JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orbax_safetensors_layout.errors import MappingError


def component(key: object) -> Any:
    """Return one key of a key path: a dict key, an index, an attribute name, else its text."""
    for attribute in ("key", "idx", "name"):  # of DictKey and FlattenedIndexKey, SequenceKey, ...
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def dotted_name(path: Sequence[object]) -> str:
    """Return a key path as a dotted name: `("layers", 0, "a.b")` is `"layers.0.a.b"`."""
    return ".".join(str(component(key)) for key in path)


def nested_dicts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted name as nested dicts."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *folders, last = name.split(".")
        node: Any = tree
        for folder in folders:
            node = node.setdefault(folder, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or last in node:
            raise MappingError("the name of a leaf is a prefix of another's", tensor=name)
        node[last] = value
    return tree


def unboxed_name(path: Sequence[object]) -> str | None:
    """Return the name of a leaf without its flax box (`nnx.Variable`); None where it has none."""
    is_boxed = len(path) > 1 and getattr(path[-1], "name", None) == "value"
    return dotted_name(path[:-1]) if is_boxed else None


def leaf_name(path: Sequence[object]) -> str:
    """Return the dotted name of a leaf; a flax box adds nothing to it."""
    return unboxed_name(path) or dotted_name(path)
