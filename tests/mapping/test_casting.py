"""Dtype casts: asked for, imposed by JAX, and refused."""

from __future__ import annotations

import operator

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits, save
from saved_files import PACKED_BITS, write_packed

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping.casting import whole_range
from orbax_safetensors_layout.mapping.expr.values import Add, Scale


def load_as(tmp_path, value, dtype):
    path = save(tmp_path, {"t": value})
    return osl.load(path, {"t": jax.ShapeDtypeStruct(value.shape, dtype)})["t"]


@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.float8_e4m3fn])
def test_floats_round_as_numpy_does(tmp_path, target):
    value = np.array([[1.1, -2.7, 1e30, np.nan]], ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        expected = value.astype(target)
    assert_same_bits(load_as(tmp_path, value, target), expected)


def test_integers_widen_and_become_floats(tmp_path):
    value = np.array([1, 200], np.uint8)
    assert_same_bits(load_as(tmp_path, value, np.int32), value.astype(np.int32))
    value = np.array([[1, -300]], np.int16)
    assert_same_bits(load_as(tmp_path, value, np.float32), value.astype(np.float32))
    value = np.array([[True, False]])
    assert_same_bits(load_as(tmp_path, value, np.float32), value.astype(np.float32))


@pytest.mark.parametrize(
    ("value", "target"),
    [
        (np.array([1, 300], np.int32), np.int8),
        (np.array([-1], np.int32), np.uint32),
        (np.array([9], np.int8), ml_dtypes.int4),
        (np.array([1.5], np.float32), np.int32),
        (np.array([np.nan], np.float32), np.int32),
        (np.array([2], np.int32), np.bool_),
        (np.array([-np.inf], np.float16), np.int32),
        (np.array([np.inf], ml_dtypes.float8_e5m2), np.uint64),
        (np.array([np.nan], ml_dtypes.float8_e8m0fnu), np.int8),
        (np.array([2**31], np.float32), np.int32),
        (np.array([2.0**63], np.float64), np.int64),
        (np.array([2**63], np.uint64), np.int64),
        (np.array([16], ml_dtypes.float8_e8m0fnu), ml_dtypes.int4),
    ],
)
def test_integer_targets_must_hold_every_value(tmp_path, value, target):
    with pytest.raises(osl.DtypeMismatchError, match="do not fit") as caught:
        load_as(tmp_path, value, target)
    assert caught.value.tensor == "t"
    assert caught.value.file.endswith("model.safetensors")


@pytest.mark.parametrize("target", [np.int8, np.int32, ml_dtypes.int4, np.uint16])
@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_integers_in_range_are_cast_from_every_float(tmp_path, source, target):
    value = np.array([1, 2, 4], source)
    loaded = load_as(tmp_path, value, target)
    assert loaded.dtype == target
    np.testing.assert_array_equal(np.asarray(loaded).astype(np.int32), [1, 2, 4])


@pytest.mark.parametrize(("op", "exact"), [(Scale, operator.mul), (Add, operator.add)])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.int4, ml_dtypes.uint4])
def test_every_integer_whose_result_fits_is_kept(op, exact, dtype):
    low, high = whole_range(np.dtype(dtype))
    numbers = range(low, high + 1)
    values = np.array(numbers, np.int16).astype(dtype)
    for constant in numbers:
        results, kept = op(constant).checked(values)
        expected = [exact(number, constant) for number in numbers]
        assert [*np.broadcast_to(kept, values.shape)] == [low <= n <= high for n in expected]
        assert [*results[kept].astype(int)] == [n for n in expected if low <= n <= high]


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        (osl.tensor("a").scale(2), "-100"),
        (osl.tensor("u").add(100), "200"),
        (osl.tensor("i").scale(4), "1073741824"),
        (osl.tensor("a").slice(0, 2).pad(0, 0, 1, 100).scale(2), "100"),
        (osl.fill((2,), 100, "int8").scale(2), "100"),
    ],
)
def test_integers_of_mappings_do_not_wrap(tmp_path, expr, found):
    tensors = {"a": np.int8([1, 7, -100]), "u": np.uint8([200]), "i": np.int32([2**30])}
    path = save(tmp_path, tensors)
    mapping = osl.Mapping([osl.rule("w", expr)], strict=False)
    with pytest.raises(osl.DtypeMismatchError, match="1 values do not fit") as caught:
        osl.load(path, mapping=mapping)
    assert caught.value.tensor in ("w", *tensors)
    assert f"for instance {found}). Cast to a wider dtype; " in str(caught.value)
    if "pad" in str(expr) or "fill" in str(expr):
        with pytest.raises(osl.DtypeMismatchError, match="tensor: 'w'"):
            osl.plan_load(path, mapping=mapping)


def test_saved_integers_do_not_wrap(tmp_path):
    mapping = osl.Mapping([osl.rule("w", osl.tensor("a").add(1))])
    osl.save(tmp_path / "ok", {"w": np.int8([127, -127])}, mapping=mapping)
    assert_same_bits(osl.load(tmp_path / "ok")["a"], np.int8([126, -128]))
    with pytest.raises(osl.DtypeMismatchError, match=r"add\(-1\).*tensor: 'a'.*instance -128"):
        osl.save(tmp_path / "no", {"w": np.int8([127, -128])}, mapping=mapping)


def test_dtypes_that_are_no_numbers_are_refused(tmp_path):
    path = save(tmp_path, {"t": np.ones(2, np.float64)})
    abstract = np.zeros(2, "V8")
    with pytest.raises(osl.DtypeMismatchError, match="no numeric meaning"):
        osl.load(path, {"t": abstract})


def test_complex_to_real_is_refused_before_reading(tmp_path):
    with pytest.raises(osl.DtypeMismatchError, match="imaginary"):
        load_as(tmp_path, np.array([1 + 2j], np.complex64), np.float32)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64])
def test_64_bit_values_that_survive_are_loaded(tmp_path, dtype):
    array = load_as(tmp_path, np.array([0, 1, 77], dtype), dtype)
    assert array.dtype == jax.dtypes.canonicalize_dtype(dtype)
    np.testing.assert_array_equal(np.asarray(array), [0, 1, 77])


@pytest.mark.parametrize(
    "value",
    [np.array([2**40], np.int64), np.array([2**32], np.uint64), np.array([0.1], np.float64)],
    ids=str,
)
def test_64_bit_values_that_would_be_damaged_are_refused(tmp_path, value):
    with pytest.raises(osl.DtypeMismatchError, match="jax_enable_x64"):
        load_as(tmp_path, value, value.dtype)


def test_rounding_a_double_on_request_is_no_damage(tmp_path):
    value = np.array([0.1], np.float64)
    assert_same_bits(load_as(tmp_path, value, np.float32), value.astype(np.float32))


def test_64_bit_host_arrays_are_untouched(tmp_path):
    value = np.array([2**40, -1], np.int64)
    assert_same_bits(osl.load(save(tmp_path, {"t": value}))["t"], value)


def test_64_bit_arrays_with_x64(tmp_path):
    value = np.array([0.1, np.nan], np.float64)
    jax.config.update("jax_enable_x64", True)
    try:
        assert_same_bits(load_as(tmp_path, value, np.float64), value)
    finally:
        jax.config.update("jax_enable_x64", False)


SMALL = [
    *(np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz)),
    *(np.dtype(ml_dtypes.float8_e5m2), np.dtype(ml_dtypes.float8_e5m2fnuz)),
    *(np.dtype(ml_dtypes.float8_e8m0fnu), *PACKED_BITS),
]


@pytest.mark.parametrize("target", SMALL, ids=str)
@pytest.mark.parametrize("source", SMALL, ids=str)
def test_every_small_float_becomes_every_other(tmp_path, source, target):
    """Also where ml_dtypes has no cast; saving with another dtype does the same."""
    value = np.resize(np.array([0.5, 1, 2, 4], np.float32), 8).astype(source)
    expected = value.astype(np.float32).astype(target)
    write_packed(tmp_path / "files", {"t": value})
    loaded = osl.load(tmp_path / "files", {"t": np.empty(8, target)})["t"]
    assert_same_bits(loaded, expected)
    expr = osl.tensor("t")
    if source not in PACKED_BITS:  # those are not rearranged
        expr, expected = expr.slice(0, None, None, -1), expected[::-1]
    rules = osl.Mapping([osl.rule("t", expr.cast(target))])
    assert_same_bits(osl.load(tmp_path / "files", mapping=rules)["t"], expected)
    if target not in PACKED_BITS:  # those are no dtypes of WriteOptions
        options = osl.WriteOptions(dtype=target, fsync=False)
        osl.save(tmp_path / "other", {"t": value}, options=options)
        assert_same_bits(osl.load(tmp_path / "other")["t"], loaded)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_small_float_is_saved_and_decoded_through_a_mapping(tmp_path, dtype):
    value = np.tile(np.array([[0.5, 1], [2, 4]], np.float32), (2, 2)).astype(dtype)
    write_packed(tmp_path / "files", {"t": value, "s": np.ones((1, 1), np.float32)})
    if dtype in PACKED_BITS:
        expr, turned = osl.tensor("t"), value  # those are not rearranged
    else:
        expr, turned = osl.tensor("t").transpose(), value.T
    rules = osl.Mapping([osl.rule("t", expr)], strict=False)
    tree = osl.load(tmp_path / "files", mapping=rules)
    assert_same_bits(tree["t"], turned)
    osl.save(tmp_path / "out", tree, mapping=rules)
    assert_same_bits(osl.load(tmp_path / "out")["t"], value)
    decoded = osl.dequantize_block(osl.tensor("t"), osl.tensor("s"), dtype="float32")
    called = osl.opaque(np.copy, osl.tensor("t"), shape=(4, 4), dtype=dtype)
    for expr, expected in ((decoded, value.astype(np.float32)), (called, value)):
        rules = osl.Mapping([osl.rule("t", expr)], strict=False)
        assert_same_bits(osl.load(tmp_path / "files", mapping=rules)["t"], expected)
