"""A saved tree as JSON and back.

The tree is a flat array: each node is followed by its children, one after the other with theirs.
So the nesting of the JSON does not grow with the tree's, and neither way recurses.

    {"dict": ["params", "step"]}, {"tuple": 2}, {"tensor": "params.0", "sharding": 0}, null,
    {"value": 7}

Keys and values are JSON's own where JSON has them exactly, else an object: `{"float": "nan"}`,
`{"int": "0x10000000000000000"}`, `{"str": HEX}` for text that is not Unicode, `{"tuple": [...]}`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

from .dtypes import ONE_A_BYTE
from .schema import Schema, short_repr
from .tree import (
    MAX_DEPTH,
    Container,
    ContainerKind,
    Key,
    Leaf,
    Node,
    TensorKind,
    TensorLeaf,
    ValueLeaf,
)

_TENSOR_KINDS = ("jax", "numpy", "numpy_scalar", "key")
_TENSOR_FIELDS = frozenset(TensorLeaf._fields)
_MAX_KEY_DEPTH = 32
_JSON_INTEGER = 1 << 64  # beyond it other readers of JSON, and Python's limit on digits, give up
_is_hex_integer = re.compile(r"-?0x[0-9a-f]+\Z").match


def dump_tree(root: Node) -> list[object]:
    """Return the tree as a JSON value.

    Example:
        >>> dump_tree(Container("list", (TensorLeaf("0"), ValueLeaf(1.5), Container("none"))))
        [{'list': 3}, {'tensor': '0'}, {'value': 1.5}, None]
    """
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
        fields |= {
            name: value
            for name, value in zip(node._fields[2:], node[2:], strict=True)
            if value is not None
        }
        return fields
    if isinstance(node, ValueLeaf):
        return {"value": _dump_scalar(node.value)}
    if node.kind == "none":
        return None
    if node.kind in ("dict", "ordered_dict"):
        return {node.kind: [_dump_scalar(key) for key in node.keys]}
    if node.kind in ("list", "tuple"):
        return {node.kind: len(node.children)}
    if node.kind == "box":
        return {"box": node.type}
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


@dataclasses.dataclass(slots=True)
class _Open:
    """A container some of whose children are still to come."""

    kind: ContainerKind
    missing: int
    keys: tuple[Key, ...] = ()
    type: str | None = None
    children: list[Node] = dataclasses.field(default_factory=list)

    def close(self) -> Container:
        return Container(self.kind, tuple(self.children), self.keys, self.type)


def parse_tree(raw: object, checks: Schema, *, shardings: int) -> Node:
    """Parses and validates a tree.

    Raises:
        InvalidManifestError: It is malformed, or nested too deeply.
    """
    parser = _TreeParser(checks, shardings)
    stack: list[_Open] = []
    items = checks.items(raw, "tree")
    for number, item in enumerate(items):
        node = parser.node(item)
        if isinstance(node, _Open):
            if len(stack) >= MAX_DEPTH:
                checks.refuse(
                    "the tree is nested too deeply",
                    expected=f"at most {MAX_DEPTH} containers within one another",
                )
            stack.append(node)
        else:
            if not stack:
                return _only(node, number, items, checks)
            stack[-1].children.append(node)
        while stack[-1].missing == len(stack[-1].children):
            closed = stack.pop().close()
            if not stack:
                return _only(closed, number, items, checks)
            stack[-1].children.append(closed)
    checks.refuse(
        "the tree ends before all of its nodes came", expected="each container with its children"
    )


def _only(root: Node, number: int, items: list[object], checks: Schema) -> Node:
    if number + 1 != len(items):
        checks.refuse(
            "the tree goes on after its last node",
            expected=f"{number + 1} nodes",
            found=f"{len(items)} nodes",
        )
    return root


class _TreeParser:
    """Turns single raw nodes into leaves or containers that wait for their children."""

    def __init__(self, checks: Schema, shardings: int) -> None:
        self._checks = checks
        self._shardings = shardings
        self._types: dict[str, str] = {}  # one string object per type, not one per node
        self._parsers: Mapping[str, Callable[[dict[str, object]], Leaf | _Open]] = {
            "tensor": self._tensor,
            "value": self._value,
            "dict": lambda fields: self._dict("dict", fields),
            "ordered_dict": lambda fields: self._dict("ordered_dict", fields),
            "list": lambda fields: self._sequence("list", fields),
            "tuple": lambda fields: self._sequence("tuple", fields),
            "namedtuple": self._namedtuple,
            "box": self._box,
            "node": self._node,
        }

    def node(self, raw: object) -> Leaf | _Open:
        """Return a leaf, or a container without its children."""
        if raw is None:
            return _Open("none", 0)
        fields = self._checks.members(raw, "node of the tree")
        for name in fields:
            parse = self._parsers.get(name)
            if parse is not None:
                return parse(fields)
        self._checks.refuse(
            "unknown kind of node in the tree",
            expected=f"one of {', '.join(self._parsers)}",
            found=short_repr(list(fields)),
        )

    def _tensor(self, fields: dict[str, object]) -> TensorLeaf:
        checks = self._checks
        tensor = checks.text(fields["tensor"], "tensor name")
        if len(fields) == 1:
            return TensorLeaf(tensor)
        if not fields.keys() <= _TENSOR_FIELDS:
            checks.refuse(
                "malformed tensor leaf",
                tensor=tensor,
                expected=f"the keys {', '.join(TensorLeaf._fields)}",
                found=short_repr(list(fields)),
            )
        kind = fields.get("kind", "jax")
        if kind not in _TENSOR_KINDS:
            checks.refuse(
                "unknown kind of tensor leaf",
                tensor=tensor,
                expected=f"one of {', '.join(_TENSOR_KINDS)}",
                found=short_repr(kind),
            )
        sharding, dtype, key_impl = map(fields.get, ("sharding", "dtype", "key_impl"))
        return TensorLeaf(
            tensor,
            cast(TensorKind, kind),
            None if dtype is None else self._dtype(dtype, tensor),
            None if sharding is None else checks.size(sharding, "sharding", below=self._shardings),
            None if key_impl is None else checks.text(key_impl, "key_impl of a leaf"),
        )

    def _dtype(self, raw: object, tensor: str) -> str:
        """Return a dtype that files store under another code."""
        name = self._checks.text(raw, "dtype of a leaf")
        if name not in ONE_A_BYTE:
            self._checks.refuse(
                "unknown dtype of a tensor leaf",
                tensor=tensor,
                expected=f"one of {', '.join(ONE_A_BYTE)}",
                found=short_repr(name),
            )
        return name

    def _value(self, fields: dict[str, object]) -> ValueLeaf:
        value = self._scalar(fields["value"])
        if value is None or isinstance(value, tuple):
            self._refuse_scalar(fields["value"])
        return ValueLeaf(value)

    def _dict(self, kind: ContainerKind, fields: dict[str, object]) -> _Open:
        keys = self._keys(fields[kind])
        return _Open(kind, len(keys), keys)

    def _sequence(self, kind: ContainerKind, fields: dict[str, object]) -> _Open:
        return _Open(kind, self._checks.size(fields[kind], f"length of a {kind}"))

    def _namedtuple(self, fields: dict[str, object]) -> _Open:
        names = self._checks.texts(fields.get("fields"), "fields of a namedtuple")
        self._refuse_repeated(names)
        return _Open("namedtuple", len(names), names, self._type(fields["namedtuple"]))

    def _box(self, fields: dict[str, object]) -> _Open:
        return _Open("box", 1, ("value",), self._type(fields["box"]))

    def _node(self, fields: dict[str, object]) -> _Open:
        type_ = self._type(fields["node"])
        if "length" in fields:
            return _Open("node", self._checks.size(fields["length"], "length"), (), type_)
        keys = self._keys(fields.get("keys"))
        return _Open("node", len(keys), keys, type_)

    def _type(self, raw: object) -> str:
        text = self._checks.text(raw, "type of a node")
        return self._types.setdefault(text, text)

    def _keys(self, raw: object) -> tuple[Key, ...]:
        keys = tuple(
            key if type(key) is str else self._scalar(key)
            for key in self._checks.items(raw, "keys of a node")
        )
        self._refuse_repeated(keys)
        return keys

    def _refuse_repeated(self, keys: tuple[Key, ...]) -> None:
        if len(set(keys)) != len(keys):
            self._checks.refuse(
                "a key of a node is repeated", expected="each key once", found=short_repr(keys)
            )

    def _scalar(self, raw: object, depth: int = 0) -> Key:
        if raw is None or isinstance(raw, str | bool | int | float):
            return raw
        if isinstance(raw, tuple) and len(raw) == 1:
            ((kind, inner),) = raw
            if kind == "tuple" and isinstance(inner, list) and depth < _MAX_KEY_DEPTH:
                return tuple(self._scalar(item, depth + 1) for item in inner)
            if kind == "float" and inner in ("nan", "inf", "-inf"):
                return float(inner)
            if kind == "int" and isinstance(inner, str) and _is_hex_integer(inner):
                return int(inner, 16)
            if kind == "str" and isinstance(inner, str):
                return self._surrogates(inner)
        self._refuse_scalar(raw)

    def _surrogates(self, digits: str) -> str:
        try:
            return bytes.fromhex(digits).decode("utf-8", "surrogatepass")
        except ValueError:
            self._refuse_scalar(digits)

    def _refuse_scalar(self, raw: Any) -> NoReturn:
        self._checks.refuse(
            "malformed key or value in the tree",
            expected="a bool, a number, a string, or for keys null",
            found=short_repr(raw),
        )
