"""Pieces of expressions against numpy on full tensors."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from boxes import boxes_in
from checkpoints import assert_same_bits
from hypothesis import given, settings, strategies as st
from mapping_expressions import ALL_OPS, cases, evaluate, index_only, reader, specs_of

from orbax_safetensors_layout.errors import DtypeMismatchError, MappingError
from orbax_safetensors_layout.geometry import AffineView, Box, cover
from orbax_safetensors_layout.mapping import (
    AffinePiece,
    Cast,
    DecodedPiece,
    FillPiece,
    affine_pieces,
    apply_ops,
    apply_view,
    assemble_box,
    concat,
    fill,
    opaque,
    stack,
    tensor,
)
from orbax_safetensors_layout.mapping.expr.values import Add, Scale

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def random_tensor(*shape, dtype=F32):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def bound(expr, captures=None, dtype=F32, **shapes):
    return expr.bind(captures or {}, {name: (shape, dtype) for name, shape in shapes.items()})


def whole(bound_expr, *, factored=False):
    return bound_expr.pull_back(Box.whole(bound_expr.shape), factored=factored)


def overlap(boxes):
    return any(a.intersect(b) for a, b in itertools.combinations(boxes, 2))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_pieces_are_what_numpy_makes_of_the_full_tensors(data):
    case = data.draw(cases(ALL_OPS))
    bound_expr = case.expr.bind({}, specs_of(case.tensors))
    assert (bound_expr.shape, bound_expr.dtype) == (case.array.shape, F32)
    assert set(bound_expr.sources()) == set(case.tensors)
    box = data.draw(boxes_in(bound_expr.shape))
    pieces = bound_expr.pull_back(box)
    boxes = [piece.box for piece in pieces]
    assert cover(boxes, box)
    assert not overlap(boxes[:60])
    assert all(
        piece.view.shape == piece.box.shape for piece in pieces if isinstance(piece, AffinePiece)
    )
    expected = case.array[box.slices]
    assert_same_bits(evaluate(bound_expr, case.tensors, box), expected)
    assert cover([piece.box for piece in bound_expr.pull_back(box, factored=True)], box)
    assert_same_bits(evaluate(bound_expr, case.tensors, box, factored=True), expected)
    assert index_only(pieces) or not index_only(whole(bound_expr))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_only_what_is_needed_is_read(data):
    case = data.draw(cases(ALL_OPS))
    bound_expr = case.expr.bind({}, specs_of(case.tensors))
    box = data.draw(boxes_in(bound_expr.shape))
    read = reader(case.tensors)
    touched = [read(piece) for piece in affine_pieces(bound_expr.pull_back(box))]
    assert sum(values.size for values in touched) <= box.size


@pytest.mark.parametrize(
    ("expr", "shape", "count", "factored"),
    [
        (tensor("x").transpose(), (6, 8), 1, 1),
        (tensor("x").rearrange("(h d) e -> e h d", d=4), (8, 6), 1, 1),
        (tensor("x").rearrange("(h d) e -> e h d", d=4).reshape(6, 8), (8, 6), 1, 1),
        (tensor("x").reshape(-1), (8, 6), 1, 1),
        (tensor("x").slice(1, None, None, 2), (8, 6), 1, 1),
        (tensor("x").slice(1, None, None, -1), (8, 6), 1, 1),
        (tensor("x").take(0, [1, 3, 5]), (8, 6), 1, 1),
        (tensor("x").take(0, [1, 3, 5, 0]), (8, 6), 2, 2),
        # Merged axes that do not nest: one piece for each index of the outer one.
        (tensor("x").transpose().reshape(48), (8, 6), 6, 1),
        (tensor("x").transpose().reshape(48).reshape(6, 8), (8, 6), 1, 1),
        (tensor("x").slice(1, 0, 4).reshape(-1), (8, 6), 8, 1),
        (tensor("x").slice(1, 0, 4).reshape(4, 8), (8, 6), 2, 1),
        (tensor("x").repeat(0, 3), (4, 6), 4, 1),
        # Llama's rope, interleaved in place of half-split.
        (tensor("x").rearrange("(h two d) e -> (h d two) e", h=4, two=2), (64, 8), 32, 1),
        (concat([tensor("x"), tensor("x").slice(0, 0, 1)], 0), (8, 6), 2, 2),
        (tensor("x").pad(0, 1, 2), (8, 6), 3, 3),
    ],
)
def test_number_of_pieces(expr, shape, count, factored):
    bound_expr = bound(expr, x=shape)
    assert len(whole(bound_expr)) == count
    assert len(whole(bound_expr, factored=True)) == factored


def test_merging_pieces_costs_what_the_box_needs():
    bound_expr = bound(tensor("x").transpose().reshape(-1), x=(1 << 20, 1 << 20))
    (piece,) = bound_expr.pull_back(Box((5,), (9,)))
    assert piece.view == AffineView(5 << 20, (4,), (1 << 20,))
    pieces = bound_expr.pull_back(Box(((1 << 20) - 2,), ((3 << 20) + 1,)))
    assert [piece.box.size for piece in pieces] == [2, 1 << 20, 1 << 20, 1]
    assert len(bound_expr.pull_back(Box((7,), (1 << 40,)), factored=True)) == 2


def test_merged_pieces_that_continue_are_one():
    """`b` is 1, so that the merged axes nest although a slice moved the begin of the box."""
    bound_expr = bound(tensor("x").rearrange("a b c -> b (a c)"), x=(8, 1, 4))
    assert len(bound_expr.pull_back(Box((0, 3), (1, 27)))) == 1


@pytest.mark.parametrize("factored", [False, True])
def test_fused_gate_up(factored):
    x = random_tensor(4, 6, 10)
    gate = tensor("x").slice(-1, None, None, 2).transpose(0, 2, 1)
    bound_expr = bound(gate, x=x.shape)
    (piece,) = whole(bound_expr, factored=factored)
    assert piece.view == AffineView(0, (4, 5, 6), (60, 2, 10))
    assert_same_bits(evaluate(bound_expr, {"x": x}), x[..., ::2].transpose(0, 2, 1))


def test_concatenations_below_a_reshape():
    """The parts end within a row, so that this row is of two pieces."""
    x, y = random_tensor(5), random_tensor(7)
    bound_expr = bound(concat([tensor("x"), tensor("y")], 0).reshape(3, 4), x=(5,), y=(7,))
    array = np.concatenate([x, y]).reshape(3, 4)
    assert_same_bits(evaluate(bound_expr, {"x": x, "y": y}), array)
    assert [(p.source, p.box.start, p.box.stop) for p in whole(bound_expr)] == [
        ("x", (0, 0), (1, 4)),
        ("x", (1, 0), (2, 1)),
        ("y", (1, 1), (2, 4)),
        ("y", (2, 0), (3, 4)),
    ]


def test_stacks_of_layers_and_experts():
    tensors = {
        f"layers.{i}.experts.{e}.w": random_tensor(4, 3) + 10 * i + e
        for i in range(3)
        for e in range(5)
    }
    expr = stack(stack(tensor("layers.{i}.experts.{e}.w").transpose(), over="e"), "i", axis=1)
    bound_expr = expr.bind({}, specs_of(tensors))
    array = np.stack(
        [np.stack([tensors[f"layers.{i}.experts.{e}.w"].T for e in range(5)]) for i in range(3)], 1
    )
    assert bound_expr.shape == (5, 3, 3, 4)
    box = Box((1, 1, 0, 2), (3, 3, 2, 4))
    assert_same_bits(evaluate(bound_expr, tensors, box), array[box.slices])
    pieces = bound_expr.pull_back(box)
    assert [p.source for p in pieces] == [
        f"layers.{i}.experts.{e}.w" for i in (1, 2) for e in (1, 2)
    ]
    assert index_only(pieces)


def test_stacks_in_an_order_and_of_a_subset():
    tensors = {f"l.{i}": np.full(2, i, np.float32) for i in range(12)}
    specs = specs_of(tensors)
    for indices, expected in (
        (None, range(12)),
        (range(1, 12, 3), range(1, 12, 3)),
        ([5, 0, 3], [5, 0, 3]),
        (slice(2, None, 5), [2, 7]),
        (slice(None, 3), [0, 1, 2]),
    ):
        bound_expr = stack(tensor("l.{i}"), over="i", indices=indices).bind({}, specs)
        assert bound_expr.sources() == tuple(f"l.{i}" for i in expected)


def test_many_sources_cost_only_the_overlap():
    specs = {f"l.{i}.e.{e}": ((64, 32), F32) for i in range(61) for e in range(256)}
    expr = stack(stack(tensor("l.{i}.e.{e}").transpose(), over="e"), over="i")
    bound_expr = expr.bind({}, specs)
    assert len(bound_expr.sources()) == 61 * 256
    box = Box((3, 16, 0, 0), (5, 32, 32, 64))
    assert len(bound_expr.pull_back(box)) == 32
    assert len(bound_expr.pull_back(Box.whole(bound_expr.shape))) == 61 * 256


def test_values_step_by_step():
    x = random_tensor(64, 8, dtype=BF16)
    expr = tensor("x").cast("float32").scale(0.1234).cast("bfloat16").transpose().add(1)
    bound_expr = bound(expr, x=x.shape, dtype=BF16)
    assert bound_expr.dtype == BF16
    once = (x.astype(np.float32) * np.float32(0.1234)).astype(BF16)
    expected = once.T + np.asarray(1, BF16)
    box = Box((2, 3), (7, 50))
    assert_same_bits(evaluate(bound_expr, {"x": x}, box), expected[box.slices])
    (piece,) = bound_expr.pull_back(box)
    assert piece.ops == (Cast(F32), Scale(0.1234), Cast(BF16), Add(1))
    assert not index_only([piece])


def test_embedding_times_the_root_of_its_width_rounds_in_its_own_dtype():
    """Gemma: the normaliser itself is rounded to bfloat16."""
    x = random_tensor(16, 8, dtype=BF16)
    bound_expr = bound(tensor("x").scale(3072**0.5), x=x.shape, dtype=BF16)
    assert_same_bits(
        evaluate(bound_expr, {"x": x}), x * np.asarray(55.5, BF16)
    )  # 55.4256 rounds to 55.5


def test_a_cast_to_the_same_dtype_is_none():
    assert index_only(whole(bound(tensor("x").cast("float32"), x=(3,))))


def test_pads_and_fills_take_later_operations_and_not_earlier_ones():
    x = random_tensor(3, 2)
    expr = concat([tensor("x").scale(2).pad(0, 1, 0, 5).scale(3), fill((1, 2), 7, "float32")], 0)
    bound_expr = bound(expr.cast("float16"), x=x.shape)
    array = np.concatenate([np.full((1, 2), 15), x * 2 * 3, np.full((1, 2), 7)])
    assert_same_bits(evaluate(bound_expr, {"x": x}), array.astype(np.float16))
    first, *_, last = whole(bound_expr)
    assert isinstance(first, FillPiece)
    assert (first.value, first.value.dtype) == (15, np.float16)
    assert (last.box, last.value) == (Box((4, 0), (5, 2)), 7)


def test_scalars_and_empty_tensors():
    bound_expr = bound(tensor("x").reshape(1, 1).transpose().reshape(), x=())
    assert whole(bound_expr) == (AffinePiece(Box((), ()), "x", AffineView(0, (), ()), ()),)
    assert_same_bits(evaluate(bound_expr, {"x": np.float32(3)}), np.float32([3]).reshape(()))
    empty = bound(concat([tensor("x"), tensor("y")], 0), x=(0, 3), y=(2, 3))
    assert [piece.source for piece in whole(empty)] == ["y"]
    assert whole(bound(tensor("x").reshape(3, -1), x=(0, 3))) == ()


def test_a_region_outside_is_refused():
    bound_expr = bound(tensor("x"), x=(3, 4))
    with pytest.raises(ValueError, match="not a region"):
        bound_expr.pull_back(Box((0, 0), (3, 5)))
    with pytest.raises(ValueError, match="not a region"):
        bound_expr.pull_back(Box((0,), (3,)))


def test_opaque_reads_everything_and_gives_the_shard():
    x, y = random_tensor(4, 4), random_tensor(4)
    expr = opaque(lambda a, b: a @ np.diag(b), tensor("x"), tensor("y").scale(2.0), shape=(4, 4),
                  dtype="float32").transpose().reshape(16).cast("float64")  # fmt: skip
    bound_expr = bound(expr, x=x.shape, y=y.shape)
    expected = (x @ np.diag(y * 2)).T.reshape(16).astype(np.float64)
    for box in (Box((2,), (7,)), Box((0,), (16,))):
        assert_same_bits(evaluate(bound_expr, {"x": x, "y": y}, box), expected[box.slices])
        assert_same_bits(
            evaluate(bound_expr, {"x": x, "y": y}, box, factored=True), expected[box.slices]
        )
    pieces = bound_expr.pull_back(Box((1,), (3,)))
    assert all(isinstance(piece, DecodedPiece) for piece in pieces)
    assert sorted(p.view.shape for p in affine_pieces(pieces[:1])) == [(4,), (4, 4)]


def test_opaque_that_gives_something_else_is_refused():
    bound_expr = bound(opaque(np.sum, tensor("x"), shape=(2,), dtype="float32"), x=(2, 2))
    with pytest.raises(
        MappingError, match=r"function sum .* \(expected: \[2\] float32, found: \[\]"
    ):
        evaluate(bound_expr, {"x": np.ones((2, 2), np.float32)})


def test_casts_to_integers_have_to_hold_every_value():
    bound_expr = bound(tensor("x").cast("int8"), x=(3,))
    assert_same_bits(evaluate(bound_expr, {"x": np.float32([1, -3, 127])}), np.int8([1, -3, 127]))
    for lost in (0.5, 128, np.nan, np.inf):
        with pytest.raises(DtypeMismatchError, match="1 values do not fit"):
            evaluate(bound_expr, {"x": np.float32([1, lost, 2])})
    from_int4 = bound(tensor("x").cast("int16"), x=(2,), dtype=np.dtype(ml_dtypes.int4))
    assert_same_bits(
        evaluate(from_int4, {"x": np.array([-8, 7], ml_dtypes.int4)}), np.int16([-8, 7])
    )
    integers = bound(tensor("x").cast("int4"), x=(2,), dtype=np.dtype(np.int32))
    assert_same_bits(
        evaluate(integers, {"x": np.int32([-8, 7])}), np.array([-8, 7], ml_dtypes.int4)
    )
    with pytest.raises(DtypeMismatchError):
        evaluate(integers, {"x": np.int32([-8, 8])})


def test_long_chains_of_operations_work_in_chunks():
    ops = (Cast(F32), Scale(3.0), Cast(BF16))
    for shape in ((3_000_001,), (1, 2_500_000), (3, 1_500_000)):
        values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        out = np.empty(shape, BF16)
        assert_same_bits(apply_ops(values, ops, out), apply_ops(values, ops))


def test_assembling_into_a_given_array():
    x = random_tensor(4, 6)
    bound_expr = bound(tensor("x").transpose(), x=x.shape)
    box = Box((1, 0), (3, 4))
    out = np.zeros((4, 4), np.float32)
    assemble_box(bound_expr.pull_back(box), box, F32, reader({"x": x}), out=out[1:3])
    assert_same_bits(out[1:3], x.T[1:3])
    assert not out[0].any()


def test_a_view_never_reaches_foreign_elements():
    with pytest.raises(MappingError, match="beyond its tensor"):
        apply_view(np.arange(6), AffineView(4, (3,), (1,)))
    with pytest.raises(MappingError, match="beyond its tensor"):
        apply_view(np.arange(6), AffineView(1, (3,), (-1,)))
    assert apply_view(np.arange(6), AffineView(9, (0, 2), (1, 1))).shape == (0, 2)
