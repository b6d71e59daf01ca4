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


def is_attribute_value(key: object) -> bool:
    """Whether a key of a key path is the attribute `value`, as that of a box."""
    return getattr(key, "name", None) == "value"


def unboxed_names(paths: Sequence[Sequence[Any]], *, dicts: bool = False) -> list[str]:
    """Return the dotted names of a tree's leaves without the levels of its boxes.

    A box (`nnx.Variable`) has one child, its attribute `value`; other nodes may have a `value`
    among others. With `dicts` a dict of one leaf, its key "value", is a box, too: so Orbax stores
    boxes.
    """

    def is_level(path: Sequence[Any], depth: int) -> bool:
        is_last = dicts and depth == len(path) - 1
        return is_attribute_value(path[depth]) or (is_last and component(path[depth]) == "value")

    boxes = {
        (*path[:depth],) for path in paths for depth in range(1, len(path)) if is_level(path, depth)
    }
    for path in paths if boxes else ():
        for depth in range(1, len(path)):
            if not is_level(path, depth):
                boxes.discard((*path[:depth],))  # it has another child
    return [
        dotted_name([key for depth, key in enumerate(path) if (*path[:depth],) not in boxes])
        if boxes
        else dotted_name(path)
        for path in paths
    ]
