"""Pytree key paths as dotted names, without importing JAX."""

from __future__ import annotations

from collections.abc import Sequence


def component(key: object) -> str:
    """Return one key of a key path as text: a dict key, an index or an attribute name."""
    # DictKey and FlattenedIndexKey, SequenceKey, GetAttrKey
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def dotted_name(path: Sequence[object]) -> str:
    """Return a key path as a dotted name: `("layers", 0, "kernel")` is `"layers.0.kernel"`.

    A dict key with dots is taken as it is, so a flat dict of Hugging Face names and the nested dict
    of their parts name the same tensors.
    """
    return ".".join(map(component, path))


def unboxed_name(path: Sequence[object]) -> str | None:
    """Return the name of a leaf in a box such as `flax.nnx.Variable`, without the box.

    Flax's boxes (`nnx.Variable`, `linen.Partitioned`) are pytree nodes with one attribute,
    `value`. Returns None where the path does not end in such an attribute.
    """
    if len(path) > 1 and getattr(path[-1], "name", None) == "value":
        return dotted_name(path[:-1])
    return None
