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


def unboxed_names(paths: Sequence[Sequence[object]]) -> list[str | None]:
    """Return the names of a tree's leaves without their flax boxes; None for one that has none.

    A box (`nnx.Variable`) has one leaf, its `value`; other nodes may have a `value` among others.
    """

    def is_below(number: int, node: Sequence[object]) -> bool:
        return number < len(paths) and [*paths[number][: len(node)]] == [*node]

    names: list[str | None] = []
    for number, path in enumerate(paths):
        is_boxed = len(path) > 1 and getattr(path[-1], "name", None) == "value"
        if is_boxed:  # leaves of a node follow each other
            node = path[:-1]
            is_boxed = not (number and is_below(number - 1, node)) and not is_below(
                number + 1, node
            )
        names.append(dotted_name(path[:-1]) if is_boxed else None)
    return names


def dotted_names(paths: Sequence[Sequence[object]]) -> list[str]:
    """Return the dotted names of a tree's leaves, to which a flax box adds nothing."""
    return [
        unboxed or dotted_name(path)
        for path, unboxed in zip(paths, unboxed_names(paths), strict=True)
    ]
