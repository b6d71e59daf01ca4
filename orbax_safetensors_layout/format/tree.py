"""The structure of a saved tree: containers, and leaves that are tensors or plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

MAX_DEPTH = 400
"""Containers within containers: few enough for Python's recursion limit."""

Key: TypeAlias = "str | int | float | bool | tuple[Key, ...] | None"
"""A key of a container; its type is kept, so that `{1: ...}` and `{"1": ...}` stay different."""

ContainerKind = Literal[
    "dict", "ordered_dict", "list", "tuple", "namedtuple", "none", "box", "node"
]
TensorKind = Literal["jax", "numpy", "numpy_scalar", "key"]


class TensorLeaf(NamedTuple):
    """A leaf whose value is in the files. A NamedTuple: there may be 100,000 of them.

    Attributes:
        tensor: Name of the tensor in the files.
        kind: What the value was: a `jax.Array`, a `numpy.ndarray`, a numpy scalar, or an array of
            typed PRNG keys, whose data the tensor is.
        dtype: The dtype of the value, where the files hold another, for instance `"int4"` that is
            stored as I8.
        sharding: Number of its sharding in `Manifest.shardings`; None where none is recorded.
        key_impl: Name of the PRNG implementation of typed keys.
    """

    tensor: str
    kind: TensorKind = "jax"
    dtype: str | None = None
    sharding: int | None = None
    key_impl: str | None = None


class ValueLeaf(NamedTuple):
    """A leaf whose value is in the manifest itself.

    Beware of `==`: as everywhere in Python, `ValueLeaf(1) == ValueLeaf(True) == ValueLeaf(1.0)`.

    Attributes:
        value: An integer of any size, an exact float, or a string.
    """

    value: bool | int | float | str


Leaf: TypeAlias = TensorLeaf | ValueLeaf


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """An inner node of the tree.

    Attributes:
        kind: What it was. `box` is a node with the one attribute `value`, such as `nnx.Variable`;
            `node` is any other registered pytree node.
        children: In the order of the container, for dicts the one of insertion.
        keys: Of each child: the key of a dict, the field of a namedtuple, the attribute or key of
            a `node`. Empty where children are counted: list, tuple, and a `node` of numbered
            children.
        type: `module:qualname` of a namedtuple, box or node.
    """

    kind: ContainerKind
    children: tuple[Node, ...] = ()
    keys: tuple[Key, ...] = ()
    type: str | None = None

    @property
    def labels(self) -> tuple[Key, ...]:
        """Each child's part of dotted names: its key, or its number."""
        return self.keys or tuple(range(len(self.children)))


Node: TypeAlias = Container | TensorLeaf | ValueLeaf


def leaves(node: Node) -> Iterator[Leaf]:
    """Yields the leaves below a node (or itself), in the order of the containers.

    Example:
        >>> list(leaves(Container("list", (ValueLeaf(1), Container("none"), ValueLeaf("b")))))
        [ValueLeaf(value=1), ValueLeaf(value='b')]
    """
    stack: list[Node] = [node]
    while stack:
        top = stack.pop()
        if isinstance(top, Container):
            stack.extend(reversed(top.children))
        else:
            yield top


def leaf_names(node: Node) -> Iterator[tuple[str, Leaf]]:
    """Yields the leaves with their dotted names, as in the original pytree.

    A box around a leaf adds nothing to its name, as in `pytree.unboxed_name`.

    Example:
        >>> tree = Container("dict", (Container("list", (ValueLeaf(1),)), ValueLeaf(2)), ("a", "b"))
        >>> [name for name, _ in leaf_names(tree)]
        ['a.0', 'b']
    """
    stack: list[tuple[str | None, Node]] = [(None, node)]
    while stack:
        name, top = stack.pop()
        if not isinstance(top, Container):
            yield name or "", top
            continue
        if name is not None and top.kind == "box" and not isinstance(top.children[0], Container):
            yield name, top.children[0]
            continue
        prefix = "" if name is None else f"{name}."
        names = [f"{prefix}{label}" for label in reversed(top.labels)]
        stack.extend(zip(names, reversed(top.children), strict=True))
