"""Trees as data and back: any pytree, its names, and what comes back without the original."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import sys
import types
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from hypothesis import given, settings, strategies as st

from orbax_safetensors_layout.format import (
    MAX_DEPTH,
    Container,
    Leaf,
    Manifest,
    Node,
    TensorLeaf,
    ValueLeaf,
    leaf_names,
    leaves,
    parse_manifest,
)
from orbax_safetensors_layout.pytree import (
    decode_treedef,
    dotted_name,
    encode_treedef,
    unboxed_names,
)


class Point(NamedTuple):
    x: Any
    y: Any


class Outer:
    class Inner(NamedTuple):
        z: Any


class Derived(Point):
    __slots__ = ()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "rest"], meta_fields=[])
@dataclasses.dataclass
class Layer:
    weight: Any
    rest: Any


@flax.struct.dataclass
class Struct:
    value: Any
    other: Any


@jax.tree_util.register_pytree_node_class
class Numbered:
    """A node without keys: its children are numbered."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> Numbered:
        return cls(*children)


PARAMS = {"a": np.ones(2, np.float32), "b": {"c": np.zeros(3, np.float32)}}


def on_file(node: Node) -> Node:
    """The node after a trip through the side file's bytes."""
    data = Manifest("hf", node).to_json()
    manifest = parse_manifest(data, file="m.json")
    assert manifest.to_json() == data
    assert manifest.tree is not None
    return manifest.tree


def round_trip(tree: Any) -> Any:
    """`tree` described, written, read and rebuilt with its own leaves."""
    values: dict[str, Any] = {}

    def leaf(path: Any, value: Any) -> Leaf:
        values[dotted_name(path)] = value
        return TensorLeaf(dotted_name(path))

    node = on_file(encode_treedef(tree, leaf))
    assert [name for name, _ in leaf_names(node)] == [
        leaf.tensor for leaf in leaves(node) if isinstance(leaf, TensorLeaf)
    ]
    return decode_treedef(node, lambda leaf: values[leaf.tensor])


def assert_same(decoded: Any, expected: Any) -> None:
    """Equal structures with the very same leaves, dicts in the same order."""
    assert jax.tree_util.tree_structure(decoded) == jax.tree_util.tree_structure(expected)
    pairs = zip(jax.tree.leaves(decoded), jax.tree.leaves(expected), strict=True)
    assert all(first is second for first, second in pairs)
    assert repr(decoded) == repr(expected)


# Trees whose types all come back.

keys = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["a", "b", "value", "0", "a.b", "\ud800", "\N{OHM SIGN}"]),
)
odd_keys = [
    st.dictionaries(kind, st.none(), max_size=3)
    for kind in (
        st.integers(),
        st.booleans(),
        st.floats(allow_nan=False),
        st.tuples(st.text(max_size=2), st.integers(0, 3)),
        st.none(),
    )
]


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def dicts_of(names: dict[Any, None], values: list[Any]) -> dict[Any, Any]:
        return dict(zip(names, values, strict=False))

    return st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.builds(dicts_of, st.one_of(odd_keys), st.lists(inner, min_size=3, max_size=3)),
        st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.builds(Point, inner, inner),
        st.builds(Outer.Inner, inner),
        st.just(optax.EmptyState()),
        st.just(optax.MaskedNode()),
    )


plain_trees = st.recursive(
    st.one_of(st.none(), st.builds(object), st.integers(), st.floats()), containers, max_leaves=12
)
other_nodes = [
    lambda child: FrozenDict({"k": child}),
    lambda child: Layer(child, [child]),
    lambda child: Struct(child, None),
    lambda child: Numbered(child, child),
    lambda child: collections.defaultdict(list, {"d": child}),
    lambda child: nn.Partitioned(child, names=("x",)),
    lambda child: Derived(child, child),
]
any_trees = st.recursive(
    st.one_of(st.none(), st.builds(object)),
    lambda inner: st.one_of(
        containers(inner),
        st.builds(lambda make, child: make(child), st.sampled_from(other_nodes), inner),
    ),
    max_leaves=12,
)


@given(tree=plain_trees)
def test_plain_containers_come_back_as_they_were(tree: Any) -> None:
    numbers: list[Any] = []

    def leaf(path: Any, value: Any) -> Leaf:
        numbers.append(value)
        return ValueLeaf(len(numbers) - 1)

    node = on_file(encode_treedef(tree, leaf))
    assert_same(decode_treedef(node, lambda leaf: numbers[leaf.value]), tree)


@given(tree=any_trees)
def test_leaves_come_in_jax_order_under_jax_names(tree: Any) -> None:
    seen: list[tuple[str, Any]] = []

    def leaf(path: Any, value: Any) -> Leaf:
        seen.append((dotted_name(path), value))
        return TensorLeaf(seen[-1][0])

    node = on_file(encode_treedef(tree, leaf)) if _is_text(tree) else encode_treedef(tree, leaf)
    expected, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert len(seen) == len(expected)
    unboxed = unboxed_names([path for path, _ in expected])
    for (name, value), (path, original), other in zip(seen, expected, unboxed, strict=True):
        assert value is original
        assert name in (dotted_name(path), other)
    assert [(name, leaf.tensor) for name, leaf in leaf_names(node)] == [
        (leaf.tensor, leaf.tensor) for leaf in leaves(node)
    ]
    assert sorted(leaf.tensor for leaf in leaves(node)) == sorted(name for name, _ in seen)


def _is_text(tree: Any) -> bool:
    """Names of tensors have to be Unicode text; keys above values alone need not."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    try:
        "".join(dotted_name(path) for path, _ in paths).encode()
    except UnicodeEncodeError:
        return False
    return True


def test_boxes_have_the_name_that_loading_looks_for() -> None:
    tree = {
        "a": nn.Partitioned(1.0, names=("x",)),
        "b": nn.Partitioned({"c": 2.0}, names=()),
        "d": Struct(3.0, 4.0),
        "e": nn.Partitioned(nn.Partitioned(5.0, names=()), names=()),
        "f": {"value": 6.0},
        "g": nn.Partitioned(None, names=()),
    }
    node = encode_treedef(tree, lambda path, value: TensorLeaf(dotted_name(path)))
    names = ["a", "b.c", "d.value", "d.other", "e", "f.value"]
    assert [leaf.tensor for leaf in leaves(node)] == names
    assert [name for name, _ in leaf_names(node)] == names
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert unboxed_names(paths) == names


def test_a_box_becomes_what_orbax_makes_of_it() -> None:
    tree = {"a": nn.Partitioned(1.0, names=("x",)), "g": nn.Partitioned(None, names=())}
    assert round_trip(tree) == {"a": {"value": 1.0}, "g": {"value": None}}
    assert round_trip(nn.Partitioned(2.0, names=())) == {"value": 2.0}
    assert [name for name, _ in leaf_names(encode_treedef(nnx.Param(1.0), _value))] == ["value"]


def _value(path: Any, value: Any) -> Leaf:
    return ValueLeaf(value)


@pytest.mark.parametrize("tree", [1.5, None, {}, [], (), [{}], [[], ()], optax.EmptyState()])
def test_leaves_and_empty_containers_as_the_whole_tree(tree: Any) -> None:
    assert_same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.sgd(0.1, momentum=0.9),
        optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-3), {"a": True, "b": False})),
        optax.multi_transform(
            {"x": optax.adam(1e-3), "y": optax.set_to_zero()}, {"a": "x", "b": "y"}
        ),
        optax.inject_hyperparams(optax.adamw)(1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2),
    ],
    ids=["adamw", "sgd", "masked", "multi_transform", "inject_hyperparams", "multi_steps"],
)
def test_optax_states(optimizer: Any) -> None:
    params = {"a": PARAMS["a"], "b": PARAMS["b"]}
    state = optimizer.init(params)
    assert_same(round_trip(state), state)
    assert_same(round_trip({"opt": state, "params": params}), {"opt": state, "params": params})


def test_train_state_becomes_a_dict() -> None:
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))
    restored = round_trip(state)
    assert list(restored) == ["step", "params", "opt_state"]
    assert_same(restored["params"], state.params)
    assert_same(restored["opt_state"], state.opt_state)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_nnx_state_becomes_a_dict_of_boxes() -> None:
    state = nnx.state(Model(nnx.Rngs(0)))
    restored = round_trip(state)
    assert set(restored) == {"first", "dropout"}
    assert set(restored["first"]) == {"kernel", "bias"}
    assert restored["first"]["kernel"]["value"].shape == (2, 3)
    assert all(
        first is second
        for first, second in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    )


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (FrozenDict({"b": 1, "a": {"c": 2}}), {"a": {"c": 2}, "b": 1}),
        (FrozenDict({"value": 1}), {"value": 1}),
        (Layer(1, [2]), {"weight": 1, "rest": [2]}),
        (Struct(1, 2), {"value": 1, "other": 2}),
        (Numbered(1, 2), [1, 2]),
        (Numbered(), {}),
        (nnx.State({0: 1, 1: 2}), {0: 1, 1: 2}),
        (collections.defaultdict(list, {1: 2, 0: 3}), {1: 2, 0: 3}),
        ({np.int64(3): 1}, {"3": 1}),
        ({b"x": 1}, {"b'x'": 1}),
        (jax.tree_util.Partial(print, 1), [(1,), {}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_other_nodes_become(tree: Any, expected: Any) -> None:
    restored = round_trip(tree)
    assert restored == expected
    assert list(map(type, restored)) == list(map(type, expected))


def test_keys_keep_their_types_and_their_order() -> None:
    tree = {2.5: 0, True: 1, -3: 2, math.inf: 3, 10**30: 4}
    restored = round_trip(tree)
    assert [(type(key), key) for key in restored] == [(type(key), key) for key in tree]
    assert list(round_trip({"b": 1, "a": 2})) == ["b", "a"]
    assert round_trip({None: 1}) == {None: 1}
    assert round_trip({("a", 1): 1, ("a", 2): 2}) == {("a", 1): 1, ("a", 2): 2}
    assert math.isnan(*round_trip({math.nan: 1}))


def test_keys_of_the_same_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Keys of the node at \['a'\] have the same text"):
        encode_treedef({"a": TwoKeys()}, _value)


@jax.tree_util.register_pytree_with_keys_class
class TwoKeys:
    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.DictKey("k"), 1), (jax.tree_util.GetAttrKey("k"), 2)], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> TwoKeys:
        return cls()


def test_one_type_is_a_leaf_or_not_by_its_class_alone() -> None:
    class Unregistered(dict):
        pass

    tree = [Unregistered(a=1), Unregistered()]
    assert round_trip(tree) == tree


# Named tuples.


def test_named_tuple_of_an_imported_class() -> None:
    tree = [Point(1, 2), Outer.Inner(3), Derived(4, 5)]
    restored = round_trip(tree)
    assert list(map(type, restored)) == [Point, Outer.Inner, Derived]


def described_type(name: str, fields: tuple[str, ...] = ("x", "y")) -> type:
    node = Container("namedtuple", tuple(map(ValueLeaf, range(len(fields)))), fields, name)
    return type(decode_treedef(node, lambda leaf: leaf.value))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (f"{__name__}:Point", ("x", "z")),
        (f"{__name__}:Point", ("y", "x")),
        (f"{__name__}:Nothing", ("x", "y")),
        (f"{__name__}:Point.x.y", ("x", "y")),
        (f"{__name__}:PARAMS", ("x", "y")),
        (f"{__name__}:Layer", ("weight", "rest")),
        ("colorsys_not_there:Point", ("x", "y")),
        ("builtins:tuple", ("x", "y")),
        ("no colon", ("x",)),
        (":", ()),
        ("", ()),
        ("m:class", ("x",)),
        ("m:f.<locals>.P", ("class", "_hidden", "1", "def f(): pass")),
    ],
)
def test_stand_in_for_a_named_tuple(name: str, fields: tuple[str, ...]) -> None:
    kind = described_type(name, fields)
    assert kind is not Point
    assert issubclass(kind, tuple)
    assert len(kind._fields) == len(fields)
    assert described_type(name, fields) is kind  # so that treedefs agree


def test_stand_in_looks_like_the_original_and_is_saved_under_its_name() -> None:
    kind = described_type("some.module:Outer.State", ("mu", "nu"))
    assert (kind.__module__, kind.__qualname__) == ("some.module", "Outer.State")
    assert repr(kind(1, 2)) == "State(mu=1, nu=2)"
    node = encode_treedef(kind(1, 2), _value)
    assert node == Container(
        "namedtuple", (ValueLeaf(1), ValueLeaf(2)), ("mu", "nu"), "some.module:Outer.State"
    )


def test_nothing_that_a_file_names_is_imported_or_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lazy_module")

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} was looked up")

    module.__getattr__ = refuse
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    assert described_type("lazy_module:Point") is not Point
    before = set(sys.modules)
    described_type("antigravity:Point")
    described_type("this:Point")
    assert set(sys.modules) == before

    class Trap(NamedTuple):
        x: Any

    Trap._make = classmethod(refuse)
    module.Trap = Trap
    assert described_type("lazy_module:Trap", ("x",)) is Trap


# Depth and size.


def nested(depth: int) -> Any:
    tree: Any = 1.0
    for number in range(depth):
        tree = [tree] if number % 2 else {"k": tree}
    return tree


@pytest.mark.parametrize("depth", [200, MAX_DEPTH])
def test_deep_trees(depth: int) -> None:
    restored, expected = round_trip(nested(depth)), nested(depth)
    for number in reversed(range(depth)):
        key = 0 if number % 2 else "k"
        assert type(restored) is type(expected)
        restored, expected = restored[key], expected[key]
    assert restored == 1.0


def test_deeper_trees_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"nested more than {MAX_DEPTH} .* below \['k'\]"):
        encode_treedef(nested(MAX_DEPTH + 1), _value)


def test_many_leaves_in_a_flat_dict() -> None:
    array = np.zeros(1)
    tree = {f"model.layers.{i}.weight": array for i in range(60_000)}
    node = encode_treedef(tree, lambda path, value: TensorLeaf(path[-1].key))
    assert decode_treedef(node, lambda leaf: array) == tree


def test_values_are_exact() -> None:
    values = [
        *(True, False, 0, -1, 2**63, -(2**64), 10**5000, -(10**5000), 1.0, -0.0, 5e-324),
        *(1.7976931348623157e308, math.inf, -math.inf, "", "text", "\ud800", "\ud83d\ude00", "\0"),
    ]
    restored = decode_treedef(on_file(encode_treedef(values, _value)), lambda leaf: leaf.value)
    assert list(map(type, restored)) == list(map(type, values))
    assert restored == values
    assert math.copysign(1, restored[9]) == -1
    (nan,) = decode_treedef(on_file(encode_treedef([math.nan], _value)), lambda leaf: leaf.value)
    assert math.isnan(nan)


@settings(max_examples=200)
@given(value=st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.booleans()))
def test_any_value_is_exact_and_stands_in_plain_json(value: Any) -> None:
    data = Manifest("hf", ValueLeaf(value)).to_json()
    json.loads(data, parse_constant=pytest.fail)
    node = on_file(ValueLeaf(value))
    assert isinstance(node, ValueLeaf)
    assert type(node.value) is type(value)
    assert repr(node.value) == repr(value)
