"""Quantised tensors, decoded on a shard, against a decoding of the full tensor."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from boxes import boxes_in
from checkpoints import assert_same_bits
from hypothesis import given, settings, strategies as st
from mapping_expressions import evaluate, index_only, specs_of

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import (
    DecodedPiece,
    Mapping,
    affine_pieces,
    dequantize_block,
    dequantize_int4,
    dequantize_mxfp4,
    rule,
    stack,
    tensor,
)

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
W, S = tensor("w"), tensor("s")


def fp8_blocks(rows, columns, block, *lead):
    rng = np.random.default_rng(rows * columns)
    weight = (rng.standard_normal((*lead, rows, columns)) * 50).astype(FP8)
    scale = rng.random((*lead, -(-rows // block[0]), -(-columns // block[1]))).astype(F32)
    return {"w": weight, "s": scale}


def decoded_blocks(w, s, block):
    """One element at a time."""
    out = np.empty(w.shape, F32)
    for index in np.ndindex(*w.shape):
        at = (*index[:-2], index[-2] // block[0], index[-1] // block[1])
        out[index] = np.float32(w[index]) * s[at]
    return out.astype(BF16)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_block_scales(data):
    block = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    lead = data.draw(st.sampled_from([(), (2,)]))
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    tensors = fp8_blocks(rows, columns, block, *lead)
    expected = decoded_blocks(**tensors, block=block)
    expr = dequantize_block(W, S, block)
    if data.draw(st.booleans()):
        expr, expected = expr.transpose(), expected.transpose()
    if data.draw(st.booleans()):
        expr, expected = expr.slice(-1, None, None, -2), expected[..., ::-2]
    if data.draw(st.booleans()):
        expr, expected = expr.reshape(-1), expected.reshape(-1)
    bound_expr = expr.bind({}, specs_of(tensors))
    assert (bound_expr.shape, bound_expr.dtype) == (expected.shape, BF16)
    box = data.draw(boxes_in(bound_expr.shape))
    assert_same_bits(evaluate(bound_expr, tensors, box), expected[box.slices])
    assert_same_bits(evaluate(bound_expr, tensors, box, factored=True), expected[box.slices])


def test_a_shard_reads_its_values_and_the_scales_of_its_blocks():
    """DeepSeek-V3: 128 x 128 blocks, 576 rows of which the last block has only 64."""
    tensors = fp8_blocks(576, 512, (128, 128))
    bound_expr = dequantize_block(W, S).transpose().bind({}, specs_of(tensors))
    pieces = bound_expr.pull_back(Box((100, 130), (300, 576)))
    needed = {piece.source: piece.view.shape for piece in affine_pieces(pieces)}
    assert needed == {"w": (446, 200), "s": (4, 3)}
    expected = decoded_blocks(**tensors, block=(128, 128)).T
    assert_same_bits(
        evaluate(bound_expr, tensors, Box((100, 130), (300, 576))), expected[100:300, 130:]
    )


def test_stacked_experts_of_quantised_layers():
    tensors = {}
    for e in range(3):
        part = fp8_blocks(6, 8, (4, 4))
        tensors |= {f"e.{e}.w": part["w"], f"e.{e}.s": part["s"] + e}
    expr = stack(dequantize_block(tensor("e.{e}.w"), tensor("e.{e}.s"), (4, 4)), over="e")
    bound_expr = Mapping([rule("experts", expr)]).bind(specs_of(tensors)).expressions["experts"]
    box = Box((1, 2, 0), (3, 5, 8))
    expected = np.stack(
        [decoded_blocks(tensors[f"e.{e}.w"], tensors[f"e.{e}.s"], (4, 4)) for e in range(3)]
    )
    assert_same_bits(evaluate(bound_expr, tensors, box), expected[box.slices])
    assert all(isinstance(piece, DecodedPiece) for piece in bound_expr.pull_back(box))
    sources = {piece.source for piece in affine_pieces(bound_expr.pull_back(box))}
    assert sources == {"e.1.w", "e.1.s", "e.2.w", "e.2.s"}


def mxfp4(*groups):
    rng = np.random.default_rng(1)
    return {
        "w": rng.integers(0, 256, (*groups, 16)).astype(np.uint8),
        "s": rng.integers(90, 160, groups).astype(np.uint8),
    }


def decoded_mxfp4(w, s):
    """By ml_dtypes' own four-bit floats and powers of two."""
    halves = np.stack([w & 15, w >> 4], -1).reshape(*s.shape, 32)
    values = halves.view(ml_dtypes.float4_e2m1fn).astype(F32)
    scaled = values * s.view(ml_dtypes.float8_e8m0fnu).astype(F32)[..., None]
    return scaled.reshape(*s.shape[:-1], -1).astype(BF16)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mxfp4(data):
    groups = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    tensors = mxfp4(*groups)
    bound_expr = dequantize_mxfp4(W, S).bind({}, specs_of(tensors))
    box = data.draw(boxes_in(bound_expr.shape))
    assert_same_bits(evaluate(bound_expr, tensors, box), decoded_mxfp4(**tensors)[box.slices])


def test_the_scale_that_is_not_a_number():
    tensors = mxfp4(1)
    tensors["s"][:] = 255
    bound_expr = dequantize_mxfp4(W, S, "float32").bind({}, specs_of(tensors))
    assert np.isnan(evaluate(bound_expr, tensors)).all()


def test_every_second_row_is_read_alone():
    """GPT-OSS: gate and up are interleaved rows of one quantised tensor."""
    tensors = mxfp4(3, 10, 2)
    expected = decoded_mxfp4(**tensors)
    for start in (0, 1):
        gate = dequantize_mxfp4(W, S).slice(1, start, None, 2).transpose(0, 2, 1)
        bound_expr = gate.bind({}, specs_of(tensors))
        box = Box((1, 5, 1), (3, 60, 4))
        assert_same_bits(
            evaluate(bound_expr, tensors, box), expected[:, start::2].transpose(0, 2, 1)[box.slices]
        )
        read = {p.source: p.view.shape for p in affine_pieces(bound_expr.pull_back(box))}
        assert read == {"w": (2, 3, 28), "s": (2, 3, 2)}
    down = dequantize_mxfp4(W, S).slice(1, None, None, -3).slice(0, 0, None, 2)
    bound_expr = down.bind({}, specs_of(tensors))
    assert_same_bits(evaluate(bound_expr, tensors), expected[::2, ::-3])


def int4(rows, groups, group):
    rng = np.random.default_rng(2)
    values = rng.integers(-8, 8, (rows, groups * group))
    padded = np.pad(values + 8, ((0, 0), (0, -values.shape[1] % 8)))
    words = padded.reshape(rows, -1, 8).astype(np.uint32)
    packed = sum(words[..., k] << np.uint32(4 * k) for k in range(8)).astype(np.uint32)
    scale = rng.random((rows, groups)).astype(BF16)
    decoded = values * np.repeat(scale.astype(F32), group, 1)
    return {"w": packed.view(np.int32), "s": scale}, decoded.astype(BF16)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_packed_integers(data):
    rows, groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    group = data.draw(st.sampled_from([1, 3, 8, 12, 32]))
    tensors, expected = int4(rows, groups, group)
    bound_expr = dequantize_int4(W, S, group).bind({}, specs_of(tensors))
    assert (bound_expr.shape, bound_expr.dtype) == (expected.shape, BF16)
    box = data.draw(boxes_in(bound_expr.shape))
    assert_same_bits(evaluate(bound_expr, tensors, box), expected[box.slices])
    needed = {p.source: p.view.shape[-1] for p in affine_pieces(bound_expr.pull_back(box))}
    assert needed["w"] <= box.shape[-1] // 8 + 2
    assert needed["s"] <= (box.shape[-1] + 14) // group + 2


def test_more_rows_than_are_decoded_at_once():
    tensors = fp8_blocks(3000, 700, (128, 128))
    bound_expr = dequantize_block(W, S, dtype="float32").bind({}, specs_of(tensors))
    box = Box((1000, 3), (3000, 700))
    scale = np.repeat(np.repeat(tensors["s"], 128, 0), 128, 1)[:3000, :700]
    assert_same_bits(
        evaluate(bound_expr, tensors, box), (tensors["w"].astype(F32) * scale)[box.slices]
    )


def test_quantised_tensors_as_they_are():
    tensors = fp8_blocks(6, 8, (4, 4))
    rules = [rule("q", W.transpose()), rule("q_scale", S.transpose())]
    bound_mapping = Mapping(rules).bind(specs_of(tensors))
    assert bound_mapping.specs()["q"].dtype == FP8
    assert all(
        index_only(expr.pull_back(Box.whole(expr.shape)))
        for expr in bound_mapping.expressions.values()
    )
    leaves = {name: evaluate(expr, tensors) for name, expr in bound_mapping.expressions.items()}
    for name, expr in Mapping(rules).inverse().bind(specs_of(leaves)).expressions.items():
        assert_same_bits(evaluate(expr, leaves), tensors[name])


@pytest.mark.parametrize(
    ("expr", "shapes", "problem"),
    [
        (
            dequantize_block(W, S),
            {"w": ((200, 300), FP8), "s": ((2, 2), F32)},
            r"the scale has shape \[2, 2\]; blocks of \(128, 128\) need \[2, 3\]",
        ),
        (
            dequantize_block(W, S),
            {"w": ((200,), FP8), "s": ((2,), F32)},
            r"the weight has fewer axes than the block",
        ),
        (
            dequantize_mxfp4(W, S),
            {"w": ((4, 2, 8), np.uint8), "s": ((4, 2), np.uint8)},
            r"the blocks have shape \[4, 2, 8\].* need \[4, 2, 16\]",
        ),
        (
            dequantize_mxfp4(W, S),
            {"w": ((2, 16), np.uint8), "s": ((2,), F32)},
            "the scales must be uint8 or float8_e8m0fnu, not float32",
        ),
        (
            dequantize_int4(W, S),
            {"w": ((4, 9), np.int32), "s": ((4, 2), F32)},
            r"the packed values have shape \[4, 9\].* need \[4, 8\]",
        ),
        (
            dequantize_int4(W, S),
            {"w": ((4, 8), F32), "s": ((4, 2), F32)},
            "the packed values must be int32, eight in each, not float32",
        ),
    ],
)
def test_what_does_not_fit(expr, shapes, problem):
    with pytest.raises(MappingError, match=problem) as caught:
        expr.bind({}, shapes)
    assert "of 'w' and shape" in str(caught.value)
    with pytest.raises(MappingError, match=r"must be .*positive integer"):
        dequantize_block(W, S, (0, 4)) if "block" in repr(expr) else dequantize_int4(W, S, 0)


BLOCKS, MXFP4, INT4 = dequantize_block(W, S, (4, 4)), dequantize_mxfp4(W, S), dequantize_int4(W, S)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
SHAPES = {BLOCKS: ((4, 4), (1, 1)), MXFP4: ((1, 16), (1,)), INT4: ((1, 4), (1, 1))}


def specs(expr, weight, scale):
    return {name: (s, d) for name, s, d in zip("ws", SHAPES[expr], (weight, scale), strict=True)}


@pytest.mark.parametrize("expr", SHAPES, ids=repr)
def test_dtypes_that_decoders_take(expr):
    small = {FP8, E8M0, np.dtype(ml_dtypes.float8_e5m2)}
    floats = {F32, BF16, np.dtype(np.float16), np.dtype(np.float64), *small}
    weights, scales = {
        BLOCKS: ({*small, np.dtype(np.int8)}, floats),
        MXFP4: ({np.dtype(np.uint8)}, {np.dtype(np.uint8), E8M0}),
        INT4: ({np.dtype(np.int32), np.dtype(np.uint32)}, floats),
    }[expr]
    other = map(np.dtype, (np.bool_, np.uint8, np.int8, np.int64, np.complex64, ml_dtypes.int4))
    dtypes = {*floats, *weights, *other}
    for weight in dtypes:
        for scale in dtypes:
            if weight in weights and scale in scales:
                expr.bind({}, specs(expr, weight, scale))
                continue
            with pytest.raises(MappingError, match=r"must be .* not ") as caught:
                expr.bind({}, specs(expr, weight, scale))
            wrong = weight if weight not in weights else scale
            assert f"not {wrong.name}" in str(caught.value)


def test_eight_bit_integers_in_blocks():
    values = {"w": np.arange(-8, 8, dtype=np.int8).reshape(4, 4), "s": np.full((1, 1), 0.5, F32)}
    decoded = evaluate(BLOCKS.bind({}, specs_of(values)), values)
    assert_same_bits(decoded, (values["w"] * np.float32(0.5)).astype(BF16))
