"""Encodes a pytree's structure as data, and decodes it into trees.

A box is a node with the one attribute `value`, such as `nnx.Variable` or `linen.Partitioned`. The
structure records it, and names have nothing of it. A decoded tree has `{"value": ...}` in its
place, as Orbax stores it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import keyword
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from orbax_safetensors_layout.format import MAX_DEPTH, Container, Key, Leaf, Node

from .keys import component, is_attribute_value

KeyPath = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ValueBox:
    """A box whose own class is not known."""

    value: Any


jax.tree_util.register_dataclass(ValueBox, data_fields=["value"], meta_fields=[])


def encode_treedef(tree: Any, leaf: Callable[[KeyPath, Any], Leaf]) -> Node:
    """Return a pytree's structure; `leaf` gets key paths without flax boxes, and the leaves."""
    return _Encoder(leaf).node((), tree)


class _Encoder:
    def __init__(self, leaf: Callable[[KeyPath, Any], Leaf]) -> None:
        self._leaf = leaf
        # Whether a value is a leaf depends on its type alone; so JAX is asked once for each type.
        self._leaf_types: set[type] = set()

    def node(self, path: KeyPath, value: Any, depth: int = 0) -> Node:
        entries = self._children(value)
        if entries is None:
            return self._leaf(path, value)
        if depth >= MAX_DEPTH:
            raise ValueError(
                f"The tree is nested more than {MAX_DEPTH} containers deep, below"
                f" {jax.tree_util.keystr(path[:3])}."
            )
        if value is None:
            return Container("none")
        if _is_box(value, entries):
            ((key, child),) = entries
            inner = self.node(path or (key,), child, depth + 1)
            return Container("box", (inner,), ("value",))
        leaf_types = self._leaf_types
        nodes: list[Node] = []
        for key, child in entries:
            if type(child) in leaf_types:
                nodes.append(self._leaf((*path, key), child))
            else:
                nodes.append(self.node((*path, key), child, depth + 1))
        return _container(path, value, entries, nodes)

    def _children(self, value: Any) -> list[tuple[Any, Any]] | None:
        """Return the key and value of each child in JAX's order; None for a leaf."""
        kind = type(value)
        if kind in self._leaf_types:
            return None
        entries, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
        if len(entries) == 1 and not entries[0][0]:
            self._leaf_types.add(kind)
            return None
        return [(path[0], child) for path, child in entries]


def _container(
    path: KeyPath, value: Any, entries: list[tuple[Any, Any]], nodes: list[Node]
) -> Container:
    kind = type(value)
    if kind in (list, tuple):
        return Container("list" if kind is list else "tuple", tuple(nodes))
    if kind is collections.OrderedDict:
        return Container("ordered_dict", tuple(nodes), _keys(path, entries))
    if kind in (dict, collections.defaultdict):
        number = {key.key: i for i, (key, _) in enumerate(entries)}  # JAX sorts the keys
        order = [number[key] for key in value]
        keys = _keys(path, [entries[i] for i in order])
        return Container("dict", tuple(nodes[i] for i in order), keys)
    if _is_namedtuple(value, entries):
        return Container("namedtuple", tuple(nodes), tuple(kind._fields), _type_name(kind))
    positional = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
    numbers = [component(key) if isinstance(key, positional) else None for key, _ in entries]
    keys = () if numbers == list(range(len(entries))) else _keys(path, entries)
    return Container("node", tuple(nodes), keys, _type_name(kind))


def _is_namedtuple(value: Any, entries: list[tuple[Any, Any]]) -> bool:
    """Whether a node is a named tuple whose children are its fields."""
    if not isinstance(value, tuple) or not hasattr(value, "_fields"):
        return False
    return [getattr(key, "name", None) for key, _ in entries] == list(value._fields) and all(
        child is item for (_, child), item in zip(entries, value, strict=True)
    )


def _is_box(value: Any, entries: list[tuple[Any, Any]]) -> bool:
    """Whether names have nothing of a node."""
    return len(entries) == 1 and is_attribute_value(entries[0][0]) and not isinstance(value, tuple)


def _keys(path: KeyPath, entries: list[tuple[Any, Any]]) -> tuple[Key, ...]:
    keys = tuple(_plain_key(component(key)) for key, _ in entries)
    if len(set(keys)) != len(keys):
        raise ValueError(
            f"Keys of the node at {jax.tree_util.keystr(path) or 'the root'} have the same text:"
            f" {keys}."
        )
    return keys


def _plain_key(key: Any) -> Key:
    """Return the key itself if JSON can represent it, else its text."""
    if key is None or type(key) in (str, int, bool, float):
        return cast(Key, key)
    parts = tuple(map(_plain_key, key)) if type(key) is tuple else None
    return parts if parts is not None and parts == key else str(key)


def _type_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def decode_treedef(
    node: Node,
    value: Callable[[Leaf], Any],
    box: Callable[[Any], Any] = lambda value: {"value": value},
) -> Any:
    """Return a tree with the structure that `encode_treedef` found; `box` makes its boxes.

    Nothing that a file names is imported: a named tuple has its own class if that is loaded, else
    one with the same name and fields. Other nodes with attributes or keys, such as a flax
    `TrainState`, become dicts.
    """
    if not isinstance(node, Container):
        return value(node)
    parts = []
    for child in node.children:  # no comprehension: it would take a second frame for each level
        parts.append(decode_treedef(child, value, box))
    return box(parts[0]) if node.kind == "box" else _assemble(node, parts)


def _assemble(node: Container, parts: list[Any]) -> Any:
    match node.kind:
        case "none":
            return None
        case "tuple":
            return tuple(parts)
        case "ordered_dict":
            return collections.OrderedDict(zip(node.keys, parts, strict=True))
        case "namedtuple":
            kind = _namedtuple_class(node.type or "", tuple(map(str, node.keys)))
            return tuple.__new__(kind, parts)  # not `_make`, which a class may have replaced
        case "list":
            return parts
        case "dict" | "node":
            return dict(zip(node.keys, parts, strict=True)) if node.keys or not parts else parts


def _namedtuple_class(type_name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """Return the class that `module:qualname` names, if it is loaded; runs no module's code."""
    module_name, _, qualname = type_name.partition(":")
    kind: object = sys.modules.get(module_name)
    for part in qualname.split("."):
        is_namespace = isinstance(kind, types.ModuleType | type)
        # Plain attribute access could call a module's `__getattr__`, which may import.
        kind = object.__getattribute__(kind, "__dict__").get(part) if is_namespace else None
    is_class = isinstance(kind, type) and issubclass(kind, tuple)
    if is_class and getattr(kind, "_fields", None) == fields:
        return cast("type[tuple[Any, ...]]", kind)
    return _stand_in(type_name, fields)


@functools.lru_cache(maxsize=1024)  # equal structures get one class, so that their treedefs agree
def _stand_in(type_name: str, fields: Sequence[str]) -> type[tuple[Any, ...]]:
    module, _, qualname = type_name.partition(":")
    name = qualname.rpartition(".")[2]
    if not name.isidentifier() or keyword.iskeyword(name):
        name = "NamedTuple"
    # A tree that is saved again names the class that it came from.
    stand_in = collections.namedtuple(name, fields, rename=True, module=module)  # type: ignore[misc]
    stand_in.__qualname__ = qualname or name
    return stand_in
