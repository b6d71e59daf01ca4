"""Expressions as users write them: names, shapes, the rearrange notation, and refusals."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits
from hypothesis import given, strategies as st
from mapping_expressions import evaluate

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import natural_key
from orbax_safetensors_layout.mapping import (
    Mapping,
    NameTree,
    concat,
    fill,
    opaque,
    rule,
    stack,
    tensor,
)
from orbax_safetensors_layout.mapping.expr.einops import parse
from orbax_safetensors_layout.mapping.expr.values import Add, Scale
from orbax_safetensors_layout.mapping.names import substitute

F32 = np.dtype(np.float32)
X = tensor("x")


def bind(expr, dtype=F32, **shapes):
    return expr.bind({}, {name: (shape, np.dtype(dtype)) for name, shape in shapes.items()})


def rearranged(array, pattern, **sizes):
    """The notation in terms of reshape and transpose: an oracle of its own, for parts it knows."""
    left, right = (
        side.replace("(", " ( ").replace(")", " ) ").split() for side in pattern.split("->")
    )

    def axes(tokens):
        groups, inside = [], None
        for token in tokens:
            if token == "(":
                inside = []
            elif token == ")":
                groups.append(inside)
                inside = None
            elif inside is not None:
                inside.append(token)
            else:
                groups.append([] if token == "1" else [token])
        return groups

    sizes = dict(sizes)
    for group, n in zip(axes(left), array.shape, strict=True):
        known = math.prod(sizes[name] for name in group if name in sizes)
        sizes.update({name: n // known for name in group if name not in sizes})
    names = [name for group in axes(left) for name in group]
    order = [names.index(name) for group in axes(right) for name in group]
    split = array.reshape([sizes[name] for name in names]).transpose(order)
    return split.reshape([math.prod(sizes[name] for name in group) for group in axes(right)])


@pytest.mark.parametrize(
    ("shape", "pattern", "sizes"),
    [
        ((12, 5), "(h d) e -> e h d", {"d": 4}),
        ((12, 5), "(h d) e -> e h d", {"h": 4}),
        ((12, 5), "(h d) e->e (d h)", {"h": 4}),
        ((3, 4, 5), "a b c -> (c a) b", {}),
        ((24, 2), "(a b c) d -> b (d c) a", {"a": 2, "c": 3}),
        ((1, 6), "1 (a b) -> b 1 a", {"a": 2}),
        ((6,), "(a b) -> 1 b a 1", {"b": 3}),
        ((), "->", {}),
        ((3, 4), "long_name b2 -> b2 long_name", {}),
        ((4, 1), "a () -> a", {}),
    ],
)
def test_rearrange(shape, pattern, sizes):
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    bound_expr = bind(X.rearrange(pattern, **sizes), x=shape)
    assert_same_bits(
        evaluate(bound_expr, {"x": array}), rearranged(array, pattern.replace("()", "1"), **sizes)
    )


def test_rearrange_with_any_number_of_axes():
    array = np.arange(120, dtype=np.float32).reshape(2, 3, 20)
    bound_expr = bind(X.rearrange("... (h d) -> h ... d", h=4), x=array.shape)
    assert_same_bits(
        evaluate(bound_expr, {"x": array}), array.reshape(2, 3, 4, 5).transpose(2, 0, 1, 3)
    )


@given(st.data())
def test_rearrange_of_random_patterns(data):
    sizes = data.draw(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 4), min_size=1))

    def side():
        names, groups = data.draw(st.permutations(sorted(sizes))), []
        while names:
            n = data.draw(st.integers(1, len(names)))
            groups.append(names[:n])
            names = names[n:]
        text = " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups)
        return text, [math.prod(sizes[name] for name in g) for g in groups]

    (left, shape), (right, _) = side(), side()
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    bound_expr = bind(X.rearrange(f"{left} -> {right}", **sizes), x=tuple(shape))
    assert_same_bits(
        evaluate(bound_expr, {"x": array}), rearranged(array, f"{left} -> {right}", **sizes)
    )


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a b", "it needs one '->'"),
        ("a -> b -> a", "it needs one '->'"),
        ("a b -> b", "'a' is on one side only"),
        ("a a -> a", "'a' is twice on one side"),
        ("(a b -> a b", r"a '\(' is not closed"),
        ("a) -> a", r"'\)' is not understood"),
        ("((a)) -> a", r"'\(' is not understood"),
        ("a ... ... -> a ...", "'...' is not understood"),
        ("(... a) -> ... a", "'...' is not understood"),
        ("a 2 -> a", "'2' is not understood"),
        ("a, b -> b a", "',' is not understood"),
    ],
)
def test_malformed_rearrange(pattern, problem):
    with pytest.raises(MappingError, match=problem):
        parse(pattern)
    with pytest.raises(MappingError, match="rearrange pattern"):
        X.rearrange(pattern)


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        (X.transpose(0, 2, 1), r"transpose\(0, 2, 1\) does not name each of 2 axes once"),
        (X.transpose(0, 0), "does not name each of 2 axes once"),
        (X.reshape(5, 5), r"reshape\(5, 5\) does not hold the 24 elements of \[6, 4\]"),
        (X.reshape(5, -1), "does not hold the 24 elements"),
        (X.reshape(-1, -1), "does not hold the 24 elements"),
        (X.slice(2, 0, 1), r"slice\(2, 0, 1\) needs an axis 2; there are 2"),
        (X.slice(0, 0, 7), "reaches beyond axis 0 of extent 6"),
        (X.slice(1, -5), "reaches beyond axis 1 of extent 4"),
        (X.take(0, [0, 6]), r"reaches beyond axis 0 of extent 6: \[6\]"),
        (X.pad(3, 1, 1), "needs an axis 3"),
        (X.repeat(-3, 2), "needs an axis -3"),
        (X.rearrange("a b c -> c b a"), "the pattern has 3 axes, the shape 2"),
        (
            X.rearrange("(h d) e -> e h d", d=4),
            "axis 0 has extent 6, which is not a multiple of d=4",
        ),
        (X.rearrange("(h d) e -> e h d"), "the sizes of 'h' and 'd'.* are not known"),
        (X.rearrange("a b -> b a", b=3), "axis 1 has extent 4, which is not b=3"),
        (X.rearrange("a 1 -> a"), "axis 1 has extent 4, which is not 1"),
        (concat([X, tensor("y")], 1), r"part 0 is shape \[6, 4\].*part 1 is shape \[3, 4\]"),
        (concat([X, X.cast("float16")], 0), "part 1 is shape .* float16"),
        (concat([X, X], 0, sizes=[6, 5]), r"part 1 is shape .* of size 5"),
        (X.cast("int8").scale(0.5), r"scale\(0.5\): int8 cannot hold the constant"),
        (X.cast("int8").add(300), r"add\(300\): int8 cannot hold the constant"),
        (X.cast("int8").add(1 << 70), "int8 cannot hold the constant"),
        (X.cast("int8").pad(0, 1, 1, 0.5), "0.5 is not a value of int8"),
        (X.pad(0, 1, 1, "a"), "'a' is not a value of float32"),
        (X.cast("bool").add(1), "has no numeric meaning"),
        (X.cast("complex64").cast("float32"), "would drop the imaginary part"),
        (tensor("z"), "there is no tensor 'z'"),
        (tensor("{i}"), "nothing gives the wildcards of '{i}' a value"),
        (stack(tensor("x"), over="i"), "there is no tensor with {i} in its name"),
        (stack(X, "i", 4, indices=[0]), "needs an axis 4"),
    ],
)
def test_what_does_not_fit(expr, problem):
    with pytest.raises(MappingError, match=problem):
        bind(expr, x=(6, 4), y=(3, 4))


@pytest.mark.parametrize(
    "expr",
    [
        X.repeat(0, 1 << 62),
        X.pad(0, 0, 1 << 61),
        X.pad(0, 0, 1 << 61).slice(0, 0, 6),
        X.slice(0, 0, 0).repeat(1, 1 << 62),
        X.pad(0, 0, 1 << 39).cast("float64"),
        fill((1 << 48,), 0, "int8"),
        stack(X.pad(0, 0, 1 << 39), "i", indices=range(8)),
        concat([X.pad(0, 0, 1 << 39)] * 2, 0),
        opaque(np.abs, X, shape=(1 << 24, 1 << 24), dtype="int8"),
    ],
    ids=repr,
)
def test_no_array_is_larger_than_any_model(expr):
    mapping = Mapping([rule("leaf", expr)])
    for call in (mapping.abstract, mapping.explain):
        with pytest.raises(MappingError, match=r"leaf 'leaf'.*is more than 16 TiB"):
            call({"x": ((6, 4), F32)})
    assert X.pad(0, 0, (1 << 40) - 6).bind({}, {"x": ((6, 4), F32)}).shape == (1 << 40, 4)


def test_a_shape_that_does_not_fit_names_the_expression_and_the_tensor():
    expr = tensor("layers.{i}.q").rearrange("(h d) e -> e h d", d=5).transpose()
    with pytest.raises(MappingError) as caught:
        expr.bind({"i": "3"}, {"layers.3.q": ((6, 4), F32)})
    assert str(caught.value) == (
        "tensor('layers.{i}.q').rearrange('(h d) e -> e h d', d=5), given shape [6, 4] float32 of"
        " 'layers.3.q': axis 0 has extent 6, which is not a multiple of d=5."
    )


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: X.slice(0, 0, 1, 0), "step cannot be 0"),
        (lambda: X.pad(0, -1, 0), "must not be negative"),
        (lambda: X.repeat(0, 0), "at least 1, not 0"),
        (lambda: X.cast("float17"), "'float17' is not a dtype"),
        (lambda: X.rearrange("a -> a", d=3), "has no d"),
        (lambda: tensor("a.{"), "a wildcard is written as"),
        (lambda: tensor("a.{}"), "a wildcard is written as"),
        (lambda: tensor("a.{i.j}"), "a wildcard is written as"),
        (lambda: fill((2, -1), 0, "int8"), r"\(2, -1\) is not a shape"),
        (lambda: X.rearrange("(h d) -> h d", d=-4), "d=-4 is not a size"),
        (lambda: concat([], 0), "nothing to concatenate"),
        (lambda: concat([X, "y"], 0), r"concat takes expressions.*Did you mean osl.tensor\('y'\)"),
        (lambda: stack("y.{i}", "i"), "stack takes expressions"),
        (lambda: opaque(np.abs, X, np.ones(2), shape=(2,), dtype="int8"), "opaque takes expre"),
        (lambda: rule("a", "b"), r"rule takes expressions.*found: 'b'.*Did you mean osl.tensor"),
        (lambda: concat([X], 0, sizes=[1, 2]), "1 parts and 2 sizes"),
        (lambda: stack(X, "i", indices=[]), "there are no indices"),
        (lambda: stack(X, "i", indices=slice(None, None, -1)), "must go up"),
    ],
)
def test_what_cannot_be_written(make, problem):
    with pytest.raises(MappingError, match=problem):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: X.rearrange("(h d) -> h d", d=4.0),
        lambda: X.slice(0, 0.5),
        lambda: X.slice(0.0),
        lambda: X.take(0, [0.5]),
        lambda: X.repeat(0, 2.0),
        lambda: X.pad(0, 1.0, 0),
    ],
)
def test_what_is_no_integer_is_refused_where_it_is_written(make):
    with pytest.raises(MappingError, match="takes integers"):
        make()


def test_numbers_in_names_may_be_of_any_size():
    specs = {f"l.{i}.w": ((2,), F32) for i in (0, 1, "9" * 17, "9" * 5000)}
    with pytest.raises(MappingError, match=r"for i = 0..1, 9{17}, but none for 2..101 and more"):
        stack(tensor("l.{i}.w"), over="i").bind({}, specs)
    names = [f"a.{n}" for n in ("9" * 5000, "10", "9", "٣", "007")]
    assert sorted(names, key=natural_key) == ["a.007", "a.9", "a.10", names[0], "a.٣"]


def test_repr_is_what_was_written():
    expr = (
        concat(
            [
                stack(X.transpose(), over="i"),
                stack(tensor("y.{i}"), over="i", axis=1, indices=[0, 2]),
            ],
            -1,
        )
        .transpose(1, 0, 2)
        .reshape(2, -1)
        .slice(0, None, None, 2)
        .slice(0, 1)
        .slice(0, 1, 5)
        .take(1, range(12))
        .pad(0, 1, 2, -1)
        .repeat(0, 2)
        .cast(ml_dtypes.bfloat16)
        .scale(0.5)
        .add(1, lossy_inverse=True)
    )
    assert repr(expr) == (
        "concat([stack(tensor('x').transpose(), over='i'), stack(tensor('y.{i}'), over='i', axis=1,"
        " indices=[0, 2])], -1).transpose(1, 0, 2).reshape(2, -1).slice(0, None, None, 2)"
        ".slice(0, 1).slice(0, 1, 5).take(1, [0, 1, 2, 3, 4, 5, 6, 7 and 4 more]).pad(0, 1, 2, -1)"
        ".repeat(0, 2).cast('bfloat16').scale(0.5).add(1, lossy_inverse=True)"
    )
    bound_expr = bind(X.transpose(), x=(2, 3))
    assert repr(bound_expr) == "<Permuted [3, 2] float32>"
    assert repr(bound_expr.operand) == "<WholeTensor [2, 3] float32>"
    assert repr(fill((2,), 0, "int8")) == "fill((2,), 0, 'int8')"


def test_expressions_are_values():
    assert X.transpose(1, 0) == tensor("x").transpose((1, 0))
    assert X.transpose(1, 0) != X.transpose()
    assert Scale(2) != Add(2)


def test_name_trees():
    names = ["a.0.w", "a.1.w", "a.1.b", "a.10.w", "a.x.w", "b_0.w", "b_1.w", "a", "c.1.1", "c.1.2"]
    tree = NameTree(names)

    def found(pattern, **captures):
        return dict(tree.match(substitute(pattern, captures)))

    assert list(found("a.{i}.w")) == ["a.0.w", "a.1.w", "a.10.w", "a.x.w"]
    assert found("a.{i}.{p}", i="1") == {"a.1.w": {"p": "w"}, "a.1.b": {"p": "b"}}
    assert found("b_{i}.w") == {"b_0.w": {"i": "0"}, "b_1.w": {"i": "1"}}
    assert list(found("a")) == ["a"]
    assert list(found("{p}_{i}.w", p="b", i="0")) == list(found("b_{i}.w", i="0")) == ["b_0.w"]
    assert list(found("{p}_{p}.w")) == []
    assert list(found("c.{i}.{i}")) == ["c.1.1"]
    assert found("a.1") == found("d.{i}") == {}
    assert substitute("a.{i}.{j}", {"j": "2"}) == "a.{i}.2"
