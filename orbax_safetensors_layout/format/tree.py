"""The structure of a saved tree: containers, and leaves that are tensors or plain values.

As JSON it is a flat array: each node is followed by its children, one after the other with theirs.
So the nesting of the JSON does not grow with the tree's, and neither way recurses.

    {"dict": ["params", "step"]}, {"tuple": 2}, {"tensor": "params.0", "sharding": 0}, null,
    {"box": 1}, {"value": 7}

Keys and values are JSON's own where JSON has them exactly, else an object: `{"float": "nan"}`,
`{"int": "0x10000000000000000"}`, `{"str": HEX}` for text that is not Unicode, `{"tuple": [...]}`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, NoReturn, TypeAlias, get_args

from .dtypes import ONE_A_BYTE
from .schema import Schema, short_repr

MAX_DEPTH = 400
"""Containers within containers: few enough for Python's recursion limit."""

Key: TypeAlias = "str | int | float | bool | tuple[Key, ...] | None"
"""A key of a container; its type is kept, so that `{1: ...}` and `{"1": ...}` stay different."""

ContainerKind = Literal[
    "dict", "ordered_dict", "list", "tuple", "namedtuple", "box", "node", "none"
]
TensorKind = Literal["jax", "numpy", "numpy_scalar", "key"]

_CONTAINER_KINDS: tuple[ContainerKind, ...] = get_args(ContainerKind)[:-1]  # "none" is null
_TENSOR_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)
_MAX_KEY_DEPTH = 32
_JSON_INTEGER = 1 << 64  # beyond it other readers of JSON, and Python's limit on digits, give up
_is_hex_integer = re.compile(r"-?0x[0-9a-f]+\Z").match


class TensorLeaf(NamedTuple):
    """A leaf whose value is in the files. A NamedTuple: there may be 100,000 of them."""

    tensor: str  # its name in the files; of typed PRNG keys it is their data
    kind: TensorKind = "jax"
    dtype: str | None = None  # where the files hold another, as "int4" that is stored as I8
    sharding: int | None = None  # its number in `Manifest.shardings`, if any
    key_impl: str | None = None  # name of the PRNG implementation of typed keys


class ValueLeaf(NamedTuple):
    """A leaf whose value is in the manifest. `ValueLeaf(1)` is equal to `ValueLeaf(True)`."""

    value: bool | int | float | str  # an integer may be of any size; a float is exact


Leaf: TypeAlias = TensorLeaf | ValueLeaf
_TENSOR_FIELDS = frozenset(TensorLeaf._fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """An inner node of the tree; a `node` is any registered pytree node without its own kind."""

    kind: ContainerKind  # a `box` has the one attribute `value`, as `nnx.Variable` has
    children: tuple[Node, ...] = ()  # in the order of the container, for dicts that of insertion
    # Keys of a dict, a namedtuple (its fields), box or `node`; else children are counted.
    keys: tuple[Key, ...] = ()
    type: str | None = None  # `module:qualname` of a namedtuple or node

    @property
    def labels(self) -> tuple[Key, ...]:
        """Each child's part of dotted names: its key, or its number."""
        return self.keys or tuple(range(len(self.children)))


Node: TypeAlias = Container | TensorLeaf | ValueLeaf


def leaves(node: Node) -> Iterator[Leaf]:
    """Yields the leaves below a node (or itself), in the order of the containers."""
    stack: list[Node] = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, Container):
            stack.extend(reversed(top.children))
        else:
            yield top


def leaf_names(node: Node, *, boxes: bool = False) -> Iterator[tuple[str, Leaf]]:
    """Yields leaves with their dotted names, which have the levels of boxes only with `boxes`.

    A box that is the whole tree is named nevertheless: a leaf needs a name.
    """
    stack: list[tuple[str | None, Node]] = [(None, node)]
    while stack:
        name, top = stack.pop()
        if not isinstance(top, Container):
            yield name or "", top
            continue
        if name is not None and top.kind == "box" and not boxes:
            stack.append((name, top.children[0]))
            continue
        prefix = "" if name is None else f"{name}."
        names = [f"{prefix}{label}" for label in reversed(top.labels)]
        stack.extend(zip(names, reversed(top.children), strict=True))


def unboxed_aliases(names: Iterable[str]) -> dict[str, str]:
    """Return names by what they are without levels that hold nothing but `value`.

    Names that have no such level are left out.
    """
    paths = [name.split(".") for name in names]
    levels = {
        (*path[:depth],)
        for path in paths
        for depth in range(1, len(path))
        if path[depth] == "value"
    }
    for path in paths if levels else ():
        for depth in range(1, len(path) + 1):
            if path[depth : depth + 1] != ["value"]:
                levels.discard((*path[:depth],))
    if not levels:
        return {}
    aliases = {}
    for path in paths:
        kept = [key for depth, key in enumerate(path) if (*path[:depth],) not in levels]
        if len(kept) < len(path):
            aliases[".".join(kept)] = ".".join(path)
    return aliases


def dump_tree(root: Node) -> list[object]:
    """Return the tree as a JSON value."""
    dumped: list[object] = []
    stack = [root]
    while stack:
        node = stack.pop()
        dumped.append(_dump_node(node))
        if isinstance(node, Container):
            stack.extend(reversed(node.children))
    return dumped


def _dump_node(node: Node) -> object:
    if isinstance(node, TensorLeaf):
        fields: dict[str, object] = {"tensor": node.tensor}
        if node.kind != "jax":
            fields["kind"] = node.kind
        optional = zip(node._fields[2:], node[2:], strict=True)
        fields |= {name: value for name, value in optional if value is not None}
        return fields
    if isinstance(node, ValueLeaf):
        return {"value": _dump_scalar(node.value)}
    if node.kind == "none":
        return None
    if node.kind in ("dict", "ordered_dict"):
        return {node.kind: [_dump_scalar(key) for key in node.keys]}
    if node.kind in ("list", "tuple", "box"):
        return {node.kind: len(node.children)}
    if node.kind == "namedtuple":
        return {"namedtuple": node.type, "fields": node.keys}
    if node.children and not node.keys:
        return {"node": node.type, "length": len(node.children)}
    return {"node": node.type, "keys": [_dump_scalar(key) for key in node.keys]}


def _dump_scalar(value: Key) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -_JSON_INTEGER < value < _JSON_INTEGER else {"int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, tuple):
        return {"tuple": [_dump_scalar(item) for item in value]}
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"str": value.encode("utf-8", "surrogatepass").hex()}
    return value


def parse_tree(raw: object, schema: Schema, *, shardings: int) -> Node:
    """Parses and validates a tree, whose leaves may refer to so many shardings."""
    parser = _NodeParser(schema, shardings)
    nodes: list[Node] = []  # from the last on, each with all below it
    depths: list[int] = []
    for item in reversed(schema.items(raw, "tree")):
        node, length = parser.node(item)
        depth = 0
        if isinstance(node, Container):
            first = len(nodes) - length
            if first < 0:
                expected = "each container with its children"
                schema.raise_error("the tree ends before all of its nodes came", expected)
            depth = 1 + max(depths[first:], default=0)
            if depth > MAX_DEPTH:
                expected = f"at most {MAX_DEPTH} containers within one another"
                schema.raise_error("the tree is nested too deeply", expected)
            node = Container(node.kind, tuple(reversed(nodes[first:])), node.keys, node.type)
            del nodes[first:], depths[first:]
        nodes.append(node)
        depths.append(depth)
    if not nodes:
        schema.raise_error("the tree ends before all of its nodes came", "a node", "an empty array")
    if len(nodes) > 1:
        schema.raise_error(
            "the tree goes on after its last node", "one root", f"{len(nodes)} roots"
        )
    return nodes[0]


class _NodeParser:
    """Turns single raw nodes into leaves, or containers without their children."""

    def __init__(self, schema: Schema, shardings: int) -> None:
        self._schema = schema
        self._shardings = shardings

    def node(self, raw: object) -> tuple[Node, int]:
        if raw is None:
            return Container("none"), 0
        schema = self._schema
        fields = schema.members(raw, "node of the tree")
        if "tensor" in fields:
            return self._tensor(fields), 0
        if "value" in fields:
            value = self._scalar(fields["value"])
            if value is None or isinstance(value, tuple):
                self._refuse_scalar(fields["value"])
            return ValueLeaf(value), 0
        kind = next((kind for kind in _CONTAINER_KINDS if kind in fields), None)
        if kind == "dict" or kind == "ordered_dict":
            keys = self._keys(fields[kind])
            return Container(kind, (), keys), len(keys)
        if kind == "list" or kind == "tuple":
            return Container(kind), schema.size(fields[kind], f"length of a {kind}")
        if kind == "namedtuple":
            names = schema.texts(fields.get("fields"), "fields of a namedtuple")
            self._refuse_repeated(names)
            return Container(kind, (), names, self._type(fields[kind])), len(names)
        if kind == "box":
            if fields[kind] != 1:
                schema.raise_error("malformed box", "one child", short_repr(fields[kind]))
            return Container(kind, (), ("value",)), 1
        if kind == "node":
            type_ = self._type(fields[kind])
            if "length" in fields:
                return Container(kind, (), (), type_), schema.size(fields["length"], "length")
            keys = self._keys(fields.get("keys"))
            return Container(kind, (), keys, type_), len(keys)
        expected = f"one of tensor, value, {', '.join(_CONTAINER_KINDS)}"
        schema.raise_error("unknown kind of node in the tree", expected, short_repr(list(fields)))

    def _tensor(self, fields: dict[str, object]) -> TensorLeaf:
        schema = self._schema
        tensor = schema.text(fields["tensor"], "tensor name")
        if len(fields) == 1:
            return TensorLeaf(tensor)
        if not fields.keys() <= _TENSOR_FIELDS:
            expected = f"the keys {', '.join(TensorLeaf._fields)}"
            schema.raise_error("malformed tensor leaf", expected, short_repr(list(fields)), tensor)
        kind = fields.get("kind", "jax")
        if kind not in _TENSOR_KINDS:
            expected = f"one of {', '.join(_TENSOR_KINDS)}"
            schema.raise_error("unknown kind of tensor leaf", expected, short_repr(kind), tensor)
        dtype, sharding, key_impl = map(fields.get, ("dtype", "sharding", "key_impl"))
        if dtype is not None:
            dtype = schema.text(dtype, "dtype of a leaf")
            if dtype not in ONE_A_BYTE:
                expected = f"one of {', '.join(ONE_A_BYTE)}"
                schema.raise_error(
                    "unknown dtype of a tensor leaf", expected, short_repr(dtype), tensor
                )
        return TensorLeaf(
            tensor,
            kind,
            dtype,
            None if sharding is None else schema.size(sharding, "sharding", limit=self._shardings),
            None if key_impl is None else schema.text(key_impl, "key_impl of a leaf"),
        )

    def _type(self, raw: object) -> str:
        return sys.intern(self._schema.text(raw, "type of a node"))

    def _keys(self, raw: object) -> tuple[Key, ...]:
        keys = tuple(
            key if type(key) is str else self._scalar(key)
            for key in self._schema.items(raw, "keys of a node")
        )
        self._refuse_repeated(keys)
        return keys

    def _refuse_repeated(self, keys: tuple[Key, ...]) -> None:
        if len(set(keys)) != len(keys):
            self._schema.raise_error(
                "a key of a node is repeated", "each key once", short_repr(keys)
            )

    def _scalar(self, raw: object, depth: int = 0) -> Key:
        if raw is None or isinstance(raw, str | bool | int | float):
            return raw
        if isinstance(raw, dict) and len(raw) == 1:
            ((kind, inner),) = raw.items()
            if kind == "tuple" and isinstance(inner, list) and depth < _MAX_KEY_DEPTH:
                return tuple(self._scalar(item, depth + 1) for item in inner)
            if kind == "float" and inner in ("nan", "inf", "-inf"):
                return float(inner)
            if kind == "int" and isinstance(inner, str) and _is_hex_integer(inner):
                return int(inner, 16)
            if kind == "str" and isinstance(inner, str):
                try:
                    return bytes.fromhex(inner).decode("utf-8", "surrogatepass")
                except ValueError:
                    pass
        self._refuse_scalar(raw)

    def _refuse_scalar(self, raw: object) -> NoReturn:
        expected = "a bool, a number, a string, or for keys null"
        self._schema.raise_error("malformed key or value in the tree", expected, short_repr(raw))
