"""Saving through a mapping: the inverse gives back the tensors, or refuses by name."""

from __future__ import annotations

import dataclasses
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from boxes import boxes_in
from checkpoints import assert_same_bits
from hypothesis import given, settings, strategies as st
from mapping_expressions import (
    ALL_OPS,
    INDEX_OPS,
    cases,
    evaluate,
    index_only,
    reshape,
    slice_,
    specs_of,
    take,
)

from orbax_safetensors_layout.errors import DtypeMismatchError, MappingError
from orbax_safetensors_layout.geometry import Box, cover
from orbax_safetensors_layout.mapping import (
    Mapping,
    TensorSpec,
    concat,
    dequantize_block,
    fill,
    opaque,
    rule,
    stack,
    tensor,
)
from orbax_safetensors_layout.mapping.inverse.inverse_patches import Patch
from orbax_safetensors_layout.mapping.inverse.invert import invert

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
BIJECTIONS = tuple(op for op in INDEX_OPS if op not in (slice_, take))


def inverted(case):
    bound_expr = case.expr.bind({}, specs_of(case.tensors))
    return invert({"leaf": bound_expr}, {"leaf": TensorSpec(bound_expr.shape, bound_expr.dtype)})


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_inverse_of_a_bijection_gives_back_every_tensor(data):
    case = data.draw(cases(BIJECTIONS))
    inverse = inverted(case)
    assert set(inverse) == set(case.tensors)
    for name, bound_expr in inverse.items():
        assert_same_bits(evaluate(bound_expr, {"leaf": case.array}), case.tensors[name])
        box = data.draw(boxes_in(bound_expr.shape))
        pieces = bound_expr.pull_back(box)
        assert index_only(pieces)
        assert cover([piece.box for piece in pieces], box)
        assert_same_bits(
            evaluate(bound_expr, {"leaf": case.array}, box), case.tensors[name][box.slices]
        )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_inverts_gives_back_every_tensor(data):
    """Slices and takes may lose elements; what loses none comes back."""
    case = data.draw(cases(ALL_OPS))
    try:
        inverse = inverted(case)
    except MappingError:
        if not any(f"{op}(" in repr(case.expr) for op in ("slice", "take")):
            raise
        return
    for name, bound_expr in inverse.items():
        assert_same_bits(evaluate(bound_expr, {"leaf": case.array}), case.tensors[name])


def partition(draw, expr, array, depth):
    """Splits an expression into several that have each element once."""
    if depth and array.ndim:
        axis = draw(st.integers(0, array.ndim - 1))
        n, step = array.shape[axis], draw(st.integers(1, 3))
        if n > 1:
            stops = sorted(draw(st.sets(st.integers(1, n - 1), max_size=2)))
            ranges = (
                [(rest, None, step) for rest in range(min(step, n))]
                if step > 1
                else list(zip([0, *stops], [*stops, n], [1] * (len(stops) + 1), strict=True))
            )
            for start, stop, by in ranges:
                index = [slice(None)] * array.ndim
                index[axis] = slice(start, stop, by)
                part = expr.slice(axis, start, stop, by), array[tuple(index)]
                if draw(st.booleans()):
                    part = part[0].slice(axis, None, None, -1), np.flip(part[1], axis)
                yield from partition(draw, *part, depth - 1)
            return
    yield expr, array


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_tensor_in_several_leaves(data):
    operations = tuple(op for op in BIJECTIONS if op is not reshape)
    case = data.draw(cases(operations, depth=3))
    parts = list(partition(data.draw, case.expr, case.array, 3))
    leaves = {f"leaf{i}": array for i, (_, array) in enumerate(parts)}
    specs = specs_of(case.tensors)
    bound_exprs = {f"leaf{i}": expr.bind({}, specs) for i, (expr, _) in enumerate(parts)}
    inverse = invert(
        bound_exprs, {name: TensorSpec(a.shape, a.dtype) for name, a in leaves.items()}
    )
    for name, bound_expr in inverse.items():
        assert_same_bits(evaluate(bound_expr, leaves), case.tensors[name])
        box = data.draw(boxes_in(bound_expr.shape))
        assert_same_bits(evaluate(bound_expr, leaves, box), case.tensors[name][box.slices])


def check_both_ways(rules, tensors, *, infer=True, loaded=None):
    """Loads everything, saves it, with the files' shapes known and without."""
    mapping = Mapping(rules)
    forward = mapping.bind(specs_of(tensors))
    leaves = {
        name: evaluate(expression, tensors) for name, expression in forward.expressions.items()
    }
    if loaded:
        leaves = {name: value.astype(loaded) for name, value in leaves.items()}
    for known in (specs_of(tensors), None) if infer else (specs_of(tensors),):
        back = mapping.inverse().bind(specs_of(leaves), known)
        assert set(back.expressions) == set(tensors)
        for name, expression in back.expressions.items():
            assert_same_bits(evaluate(expression, leaves), tensors[name])
    return mapping.inverse().bind(specs_of(leaves), specs_of(tensors))


def random_tensors(dtype=F32, **shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def test_scanned_layers():
    tensors = {
        f"l.{i}.{p}": value
        for i in range(4)
        for p, value in random_tensors(q=(8, 6), up=(10, 6)).items()
    }
    q = tensor("l.{i}.q").rearrange("(h d) e -> e h d", d=2)
    back = check_both_ways(
        [
            rule("layers.q", stack(q, over="i", axis=1)),
            rule("layers.{i}.up", tensor("l.{i}.up").transpose()),
        ],
        tensors,
    )
    (piece,) = back.expressions["l.2.q"].pull_back(Box((2, 0), (6, 6)))
    assert piece.source == "layers.q"
    assert len(piece.box.shape) == 2


def test_experts_in_each_layer_and_layers_in_cycles():
    tensors = {
        f"l.{i}.e.{e}": value
        for i, e in itertools.product(range(6), range(3))
        for value in random_tensors(w=(4, 6)).values()
    }
    experts = stack(tensor("l.{i}.e.{e}").transpose(), over="e")
    check_both_ways(
        [
            rule("even", stack(experts, over="i", indices=slice(0, None, 2))),
            rule("odd", stack(experts, over="i", axis=2, indices=slice(1, None, 2))),
        ],
        tensors,
    )


def test_fused_tensors():
    x = tensor("qkv").rearrange("(three h d) e -> three e h d", three=3, d=4)
    back = check_both_ways(
        [rule(name, x.slice(0, i, i + 1).rearrange("1 e h d -> e h d"))
         for i, name in enumerate("qkv")],
        random_tensors(qkv=(24, 6)),
    )  # fmt: skip
    assert len(back.expressions["qkv"].pull_back(Box((0, 0), (24, 6)))) == 3


def test_a_fused_leaf():
    tensors = random_tensors(q=(8, 6), k=(4, 6), v=(4, 6))
    names = [tensor(name) for name in tensors]
    check_both_ways([rule("qkv", concat(names, 0).transpose())], tensors, infer=False)
    check_both_ways([rule("qkv", concat(names, 0, sizes=[8, None, 4]).transpose())], tensors)
    with pytest.raises(
        MappingError, match="does not determine how long its parts are along axis 0"
    ):
        Mapping([rule("qkv", concat(names, 0))]).inverse().bind({"qkv": ((16, 6), F32)})


PARTS_OF_KNOWN_LENGTH = {
    "1 each": lambda a, b: [a.rearrange("e -> 1 e"), b.rearrange("e -> 1 e")],
    "a cast": lambda a, b: [a.rearrange("e -> 1 e").cast(F32), b.cast(F32).rearrange("e -> 1 e")],
    "sizes": lambda a, b: [a.rearrange("(h d) -> h d", h=3), b.rearrange("(h d) -> h d", d=2)],
    "transposed": lambda a, b: [a.rearrange("e -> e 1").transpose(), b.rearrange("e -> 1 e")],
    "nested": lambda a, b: [concat([a.rearrange("e -> 1 e")], 0), b.rearrange("e -> 1 e")],
    "filled": lambda a, b: [fill((2, 6), 0, F32), a.rearrange("e -> 1 e"), b.rearrange("e -> 1 e")],
    "one more": lambda a, b: [a.rearrange("e -> 1 e"), b.rearrange("(h d) -> h d", d=6)],
    "repeated": lambda a, b: [a.rearrange("e -> 1 e"), b.rearrange("e -> 1 e").repeat(0, 2)],
    "slices": lambda a, b: [
        a.rearrange("(h d) -> h d", d=2).slice(0, 0, 1),
        a.rearrange("(h d) -> h d", d=2).slice(0, 1),
        b.rearrange("(h d) -> h d", h=3),
    ],
}


@pytest.mark.parametrize("parts", PARTS_OF_KNOWN_LENGTH.values(), ids=PARTS_OF_KNOWN_LENGTH)
def test_a_leaf_of_parts_that_say_how_long_they_are(parts):
    x = concat(parts(tensor("a"), tensor("b")), 0)
    check_both_ways([rule("leaf", x)], random_tensors(a=(6,), b=(6,)))


def test_interleaved_gate_up():
    both = tensor("gate_up")
    back = check_both_ways(
        [
            rule("gate", both.slice(-1, 0, None, 2).transpose()),
            rule("up", both.slice(-1, 1, None, 2).transpose()),
        ],
        random_tensors(gate_up=(4, 6, 10)),
    )
    pieces = back.expressions["gate_up"].pull_back(Box((0, 0, 2), (4, 6, 6)))
    assert [piece.source for piece in pieces] == ["gate", "up", "gate", "up"]


def test_parts_of_heads():
    """DeepSeek's kv_b: of every head some rows are of one leaf and some of another."""
    heads = tensor("kv_b").rearrange("(h x) r -> h x r", h=3)
    back = check_both_ways(
        [
            rule("k", heads.slice(1, 0, 4).transpose(1, 0, 2)),
            rule("v", heads.slice(1, 4)),
        ],
        random_tensors(kv_b=(30, 5)),
        infer=False,
    )
    pieces = back.expressions["kv_b"].pull_back(Box((2, 0), (16, 5)))
    assert [(p.source, p.box.start[0], p.box.stop[0]) for p in pieces] == [
        ("k", 2, 4),
        ("v", 4, 10),
        ("k", 10, 14),
        ("v", 14, 16),
    ]


def test_rope_half_split_to_interleaved():
    q = tensor("q").rearrange("(h two d) e -> (h d two) e", h=3, two=2)
    check_both_ways([rule("q", q)], random_tensors(q=(24, 5)))


def test_padded_repeated_and_cast_tensors_invert():
    tensors = random_tensors(BF16, vocab=(10, 4), kv=(6, 4)) | {"n": np.int8([1, -3])}
    check_both_ways(
        [
            rule("vocab", tensor("vocab").pad(0, 0, 6).transpose()),
            rule("kv", tensor("kv").rearrange("(h d) e -> h d e", d=3).repeat(0, 4)),
            rule("scale", tensor("n").cast("float32").scale(-0.125)),
            rule("ones", fill((3,), 1, "float32")),
        ],
        tensors,
        infer=False,
    )


def test_dtypes_of_what_is_saved():
    mapping = Mapping([rule("x", tensor("x").transpose()), rule("y", tensor("y").cast("float32"))])
    leaves = {"x": ((2, 3), F32), "y": ((4,), F32)}
    files = {"x": ((3, 2), BF16), "y": ((4,), BF16)}
    known = mapping.inverse().bind(leaves, files).specs()
    assert known == {"x": TensorSpec((3, 2), F32), "y": TensorSpec((4,), BF16)}
    assert mapping.inverse().bind(leaves).specs()["y"] == TensorSpec((4,), F32)


def test_values_are_only_undone_exactly():
    leaves = {"x": ((4,), F32)}

    def save(expr):
        return Mapping([rule("x", expr)]).inverse().bind(leaves, {"f": ((4,), F32)})

    x = np.float32([1, 1e-30, -3.3, 7])
    for expr, loaded in (
        (tensor("f").scale(-1), -x),
        (tensor("f").scale(0.5, lossy_inverse=True), x * np.float32(0.5)),
        (tensor("f").add(0, lossy_inverse=True), x),
        (tensor("f").scale(3, lossy_inverse=True).cast("float64"), x.astype(np.float64) * 3),
    ):
        (expression,) = save(expr).expressions.values()
        np.testing.assert_allclose(evaluate(expression, {"x": loaded.astype(F32)}), x, rtol=1e-6)
    with pytest.raises(MappingError) as caught:
        save(tensor("f").scale(0.3))
    assert str(caught.value) == (
        "The mapping cannot save: 1 problem.\n"
        "  - rule('x', tensor('f').scale(0.3)): scale(0.3) does not invert exactly. A power of"
        " two does, in a wider dtype than the file's; or accept the rounding with"
        " lossy_inverse=True."
    )
    with pytest.raises(MappingError, match=r"leaf 'x' cannot be saved: scale\(0.5\) of float32"):
        save(tensor("f").scale(0.5))  # of the smallest values
    with pytest.raises(MappingError, match=r"leaf 'x' cannot be saved: add\(1\) does not invert"):
        save(tensor("f").add(1))
    with pytest.raises(MappingError, match=r"scale\(0\) does not invert"):
        save(tensor("f").scale(0))
    expression = opaque(np.sum, tensor("f"), shape=(4,), dtype="float32").bind(
        {}, {"f": ((4,), F32)}
    )
    with pytest.raises(MappingError, match="by a function does not invert"):
        invert({"x": expression}, {"x": TensorSpec((4,), F32)})
    integers = Mapping([rule("x", tensor("f").add(3))]).inverse()
    (expression,) = integers.bind(
        {"x": ((2,), np.int8)}, {"f": ((2,), np.int8)}
    ).expressions.values()
    assert_same_bits(evaluate(expression, {"x": np.int8([5, -125])}), np.int8([2, -128]))
    with pytest.raises(DtypeMismatchError, match=r"1 values do not fit the add\(-3\)"):
        evaluate(expression, {"x": np.int8([5, -128])})


@pytest.mark.parametrize(
    ("expr", "lost"),
    [
        (tensor("w").cast("float8_e4m3fn").scale(3.0, lossy_inverse=True), "cast('float8_e4m3fn')"),
        (tensor("w").scale(3.0, lossy_inverse=True).cast("float8_e4m3fn"), "cast('float8_e4m3fn')"),
        (
            tensor("w").cast("float32").scale(3.0, lossy_inverse=True).cast("float8_e5m2").scale(2),
            "cast('float8_e5m2').scale(2)",
        ),
        (tensor("w").cast("float32").scale(3.0, lossy_inverse=True).cast("float64"), None),
        (tensor("w").cast("float8_e4m3fn", lossy_inverse=True).scale(-1), None),
        (
            tensor("w").cast("float32").scale(3.0, lossy_inverse=True)
            .cast("float8_e5m2", lossy_inverse=True),
            None,
        ),
    ],
)  # fmt: skip
def test_an_operation_accepts_no_loss_but_its_own(expr, lost):
    mapping = Mapping([rule("x", expr)])
    specs = {"w": ((4,), BF16)}
    saving = mapping.inverse()
    leaves = mapping.leaf_facts(specs)
    if lost is None:
        assert saving.bind(leaves, specs).specs()["w"] == TensorSpec((4,), BF16)
    else:
        with pytest.raises(MappingError, match=re.escape(f": {lost} of ") + ".* every value"):
            saving.bind(leaves, specs)


def test_what_never_inverts_is_refused_before_there_are_shapes():
    rules = [
        rule("a", opaque(np.linalg.inv, tensor("a"), shape=(2, 2), dtype="float32")),
        rule("b.{i}", dequantize_block(tensor("b.{i}.w"), tensor("b.{i}.s")).transpose()),
        rule("c", tensor("c").scale(1 / 3)),
        rule("d", tensor("d")),
        rule("e", tensor("d").scale(3.0), tied_to="d"),
    ]
    with pytest.raises(MappingError) as caught:
        Mapping(rules).inverse()
    lines = str(caught.value).splitlines()
    assert lines[0] == "The mapping cannot save: 3 problems."
    assert ["rule('a'" in lines[1], "rule('b.{i}'" in lines[2], "rule('c'" in lines[3]] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            [rule("a", tensor("x").repeat(0, 2).slice(0, 0, 3))],
            "of 2 x 2 elements only 3 are in leaf 'a'",
        ),
        (
            [rule("a", tensor("x")), rule("b", tensor("x").slice(0, 0, 1), tied_to="a")],
            "of 1 x 2 elements only 1 are in leaf 'b'",
        ),
        (
            [rule("a", tensor("x")), rule("b", tensor("x").scale(3.0), tied_to="a")],
            r"leaf 'b' is tied to 'a' and cannot be compared with it.*: scale\(3.0\)",
        ),
        (
            [
                rule("a", tensor("x")),
                rule("b", tensor("x").cast(BF16, lossy_inverse=True), tied_to="a"),
            ],
            "leaf 'b' is tied to 'a' and cannot be compared with it.*rounded, by cast",
        ),
        (
            [
                rule("a", tensor("x")),
                rule("b", opaque(np.sort, tensor("x"), shape=(2,), dtype=F32), tied_to="a"),
            ],
            "leaf 'b' is tied to 'a' and cannot be compared with it.*by a function",
        ),
    ],
)
def test_copies_that_cannot_be_compared(rules, problem):
    """They are refused, unless the rule or the operation accepts it."""
    specs = {"x": ((2,), F32)}
    mapping = Mapping(rules)
    leaves = mapping.bind(specs).specs()
    with pytest.raises(MappingError, match=problem) as caught:
        mapping.inverse().bind(leaves, specs)
    assert "lossy_inverse=True" in str(caught.value)
    if len(rules) > 1:
        accepted = Mapping([rules[0], dataclasses.replace(rules[1], lossy_inverse=True)])
        back = accepted.inverse().bind(leaves, specs)
        assert back.expressions["x"].sources() == ("a",)


def test_of_tied_leaves_one_is_saved():
    rules = [
        rule("embed", tensor("e")),
        rule("head", tensor("e").transpose(), tied_to="embed"),
    ]
    tensors = random_tensors(e=(6, 4))
    back = check_both_ways(rules, tensors)
    assert back.expressions["e"].sources() == ("embed", "head")
    leaves = {"embed": tensors["e"], "head": tensors["e"].T + 1}
    with pytest.raises(MappingError, match="leaf 'head' differs from 'embed', to which it is tied"):
        evaluate(back.expressions["e"], leaves)
    dropped = Mapping([rules[0], dataclasses.replace(rules[1], lossy_inverse=True)]).inverse()
    assert dropped.bind(specs_of(leaves)).expressions["e"].sources() == ("embed",)
    alone = Mapping(rules).inverse().bind({"head": ((4, 6), F32)})
    assert alone.expressions["e"].sources() == ("head",)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            [rule("a", tensor("x")), rule("b", tensor("x"))],
            "tensor 'x' cannot be saved: its parts in leaves 'a', 'b' overlap, or leave"
            " gaps. Where leaves hold the same values, say so: rule(..., tied_to=...).",
        ),
        (
            [rule("a", tensor("x").slice(0, 0, 3))],
            "tensor 'x' cannot be saved: of its 24 elements only 12 are in leaf 'a'.",
        ),
        (
            [rule("a", tensor("x").slice(0, 0, 3)), rule("b", tensor("x").slice(0, 2))],
            "tensor 'x' cannot be saved: its parts in leaves 'a', 'b' overlap",
        ),
        (
            [
                rule("a", tensor("x").slice(0, 1, 3)),
                rule("b", tensor("x").slice(0, 3)),
                rule("c", tensor("x").slice(0, 1, 2)),
            ],
            "tensor 'x' cannot be saved: no leaf holds what comes before its elements in leaves",
        ),
        (
            [
                rule("a", tensor("x").slice(0, 0, 4)),
                rule("b", tensor("x").slice(0, 0, 4).transpose()),
            ],
            "tensor 'x' cannot be saved: its parts in leaves 'a', 'b' overlap, or leave gaps",
        ),
        (
            [rule(n, tensor("x").slice(0, 0, None, 2)) for n in "ab"],
            "tensor 'x' cannot be saved: its parts in leaves 'a', 'b' overlap, or leave gaps",
        ),
        (
            [rule("a", tensor("x").slice(0, 1, None, 2)), rule("b", tensor("x").slice(0, 0, 3))],
            "tensor 'x' cannot be saved: its parts in leaves 'a', 'b' overlap, or leave gaps",
        ),
        (
            [rule("a", tensor("x").take(0, [0, 0, 1, 2, 3, 4, 5]))],
            "leaf 'a' cannot be saved: take(...) with an index twice does not invert",
        ),
        (
            [
                rule("a", tensor("x").slice(0, 0, 3)),
                rule("b", tensor("x").slice(0, 3).cast("float16")),
            ],
            "tensor 'x' cannot be saved: its parts in leaves 'a', 'b' are of float16 and float32",
        ),
    ],
)
def test_what_cannot_be_saved(rules, problem):
    files = {"x": ((6, 4), F32)}
    mapping = Mapping(rules)
    leaves = mapping.bind(files).specs()
    if "float16" in problem:
        leaves["b"] = TensorSpec(leaves["b"].shape, BF16)
        mapping = Mapping([rules[0], rule("b", tensor("x").slice(0, 3))])
        problem = problem.replace("float16", "bfloat16")
    with pytest.raises(MappingError) as caught:
        mapping.inverse().bind(leaves, files)
    assert problem in str(caught.value)


def test_shapes_that_leaves_do_not_tell():
    def save(*rules, **leaves):
        shapes = {name: (shape, F32) for name, shape in leaves.items()}
        return Mapping(rules).inverse().bind(shapes)

    with pytest.raises(MappingError) as caught:
        save(rule("a", tensor("x").reshape(4, 6)), rule("b.{i}", tensor("y.{i}")), a=(4, 6), zz=())
    assert str(caught.value) == (
        "The mapping cannot save: 2 problems.\n"
        "  - no rule makes leaf 'zz'. Add rules for such. What is not a weight can be dropped:"
        " mapping.drop('zz'), or --drop of `convert`.\n"
        "  - leaf 'a': tensor('x').reshape(4, 6): reshape(4, 6) does not determine the input"
        " shape. Write it with rearrange, whose pattern does, or save through mapping.like(path),"
        " with a checkpoint that has the names and shapes."
    )
    with pytest.raises(
        MappingError, match=r"makes 'x' of shape \[4\], but leaf 'a' makes it \[3\]"
    ):
        save(rule("a", tensor("x")), rule("b", tensor("x")), a=(3,), b=(4,))
    with pytest.raises(MappingError, match=r"leaf 'a': stack\(.*: it has 2 indices, the leaf 3"):
        save(rule("a", stack(tensor("x.{i}"), "i", indices=[0, 4])), a=(3, 2))
    with pytest.raises(MappingError, match="axis 1 has extent 9, which is not a multiple of d=4"):
        save(rule("a", tensor("x").rearrange("h d e -> e (h d)", d=4)), a=(2, 9))


@pytest.mark.parametrize(
    ("expr", "shape", "problem"),
    [
        (tensor("x").take(0, [1, 2]), (3,), "gives extent 2, not 3"),
        (tensor("x").pad(0, 3, 3), (5,), "gives at least extent 6, not 5"),
        (tensor("x").repeat(0, 2), (5,), "gives a multiple of 2, not 5"),
        (concat([tensor("x"), tensor("y")], 0, sizes=[2, 2]), (5,), "do not add up to 5"),
    ],
)
def test_leaves_of_the_wrong_shape(expr, shape, problem):
    with pytest.raises(MappingError, match=problem):
        Mapping([rule("a", expr)]).inverse().bind({"a": (shape, F32)})


def test_parts_that_split_a_tensor_in_ways_that_do_not_nest():
    x = tensor("x").rearrange("(a b) -> a b", a=3)
    y = tensor("x").rearrange("(a b) -> a b", a=5)
    check_both_ways(
        [
            rule("a", x.slice(0, 0, 2).slice(1, 0, 3)),
            rule("b", y.slice(0, 3, 5).slice(1, 0, 2)),
            rule("c", tensor("x").take(0, [3, 4, 8, 11, 14])),
        ],
        random_tensors(x=(15,)),
        infer=False,
    )


def parts_of(*indices):
    """Rules of leaves that have these indices of a vector."""
    return [
        rule(f"leaf{i}", tensor("x").take(0, indices_of_leaf))
        for i, indices_of_leaf in enumerate(indices)
    ]


@pytest.mark.parametrize(
    ("shape", "rules"),
    [
        ((9,), parts_of([0, 3, 6], [1, 2], [4, 5], [7, 8])),
        # Steps of 2 and 3, and what they leave.
        ((12,), parts_of([0, 2, 4, 6, 8, 10], [3, 9], [1, 5, 7], [11])),
        ((100,), parts_of(range(0, 100, 3), [1, 2], range(4, 100, 3), range(5, 100, 3))),
        # A cover by several steps that have no divisor in common.
        (
            (60,),
            parts_of(
                range(0, 60, 6),
                range(1, 60, 10),
                range(2, 60, 15),
                [i for i in range(60) if i % 6 and i % 10 != 1 and i % 15 != 2],
            ),
        ),
        # Around the one in the middle: no straight cut parts them.
        (
            (3, 3),
            [
                rule(f"leaf{i}", tensor("x").slice(0, *rows).slice(1, *columns).transpose())
                for i, (rows, columns) in enumerate(
                    [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)),
                     ((1, 2), (1, 2))]
                )
            ],
        ),
    ],
)  # fmt: skip
def test_parts_that_lie_within_one_another(shape, rules):
    check_both_ways(rules, random_tensors(x=shape))


def test_parts_that_end_within_a_row_of_another():
    x, rows = tensor("x"), tensor("x").rearrange("(r c) -> r c", c=3)
    check_both_ways(
        [
            rule("a", x.slice(0, 0, 7)),
            rule("b", x.slice(0, 7, 9)),
            rule("c", rows.slice(0, 3, 5).slice(1, 0, 2)),
            rule("d", rows.slice(0, 3, 5).slice(1, 2, 3)),
        ],
        random_tensors(x=(15,)),
    )


def test_parts_of_rows_that_another_shape_cuts():
    """Some of the rows of 5 are no rows of 3, and come back all the same."""
    rows = tensor("x").reshape(3, 5)
    check_both_ways(
        [rule("a", rows.slice(1, 0, 2).transpose()), rule("b", rows.slice(1, 2))],
        random_tensors(x=(5, 3)),
        infer=False,
    )


def test_extents_from_several_leaves():
    """Each leaf tells only how long the fused axis is at least."""
    x = tensor("x")
    check_both_ways(
        [
            rule("a", x.slice(0, 0, 5, 2).transpose()),
            rule("b", x.slice(0, 1, 5, 2)),
            rule("c", x.take(0, [6, 5])),
            rule("d", x.slice(0, 7)),
        ],
        random_tensors(x=(11, 3)),
    )
    check_both_ways([rule("a", x.slice(0, -3)), rule("b", x.slice(0, 0, -3))],
                    random_tensors(x=(11, 3)))  # fmt: skip
    check_both_ways([rule("a", x.repeat(0, 3).pad(1, 1, 2).transpose())],
                    random_tensors(x=(4, 3)))  # fmt: skip


def test_tables_of_what_is_saved():
    mapping = Mapping([rule("up", stack(tensor("l.{i}.up").transpose(), over="i"))])
    text = mapping.inverse().explain({"up": ((2, 3, 4), F32)})
    assert text.splitlines()[1].split("  ") == [
        "l.0.up",
        "[4, 3]",
        "float32",
        "inverse of stack(tensor('l.{i}.up').transpose(), over='i')",
        "up",
    ]
    assert repr(mapping.inverse()) == f"{mapping!r}.inverse()"


def test_empty_tensors():
    mapping = Mapping([rule("a", concat([tensor("x"), tensor("y")], 0)), rule("b", tensor("z"))])
    files = {"x": ((0, 2), F32), "y": ((3, 2), F32), "z": ((0,), F32)}
    back = mapping.inverse().bind({"a": ((3, 2), F32), "b": ((0,), F32)}, files)
    assert {name: expression.shape for name, expression in back.expressions.items()} == {
        name: shape for name, (shape, _) in files.items()
    }
    assert back.expressions["x"].pull_back(Box((0, 0), (0, 2))) == ()


def test_equal_steps_among_many_rows_cost_no_more(monkeypatch):
    """Three equally spaced rows, which are one patch, and thousands of others between them."""
    rows = np.random.default_rng(0).permutation(4096)
    order = [0, 2000, 4000, *(int(row) for row in rows if row not in (0, 2000, 4000))]
    calls, restrict = [], Patch.restrict
    monkeypatch.setattr(
        Patch, "restrict", lambda *args, **how: calls.append(1) or restrict(*args, **how)
    )
    mapping = Mapping([rule("leaf", tensor("x").take(0, order))])
    bound = mapping.inverse().bind({"leaf": ((4096, 2), np.dtype("int32"))}).expressions["x"]
    assert len(calls) < 10 * 4096
    values = np.arange(8192, dtype=np.int32).reshape(4096, 2)
    assert (evaluate(bound, {"leaf": values[order]}) == values).all()
