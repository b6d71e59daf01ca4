"""Tensors whose elements share bytes, through mappings: what every way of reading says of them."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of
from saved_files import PACKED_BITS, write_packed

import orbax_safetensors_layout as osl

SHAPE = (8, 16)
TAKEN = {
    "itself": (lambda t: t, lambda a: a),
    "cast": (lambda t: t.cast("float32"), lambda a: a.astype(np.float32)),
    "scaled": (lambda t: t.cast("float32").scale(2.0), lambda a: a.astype(np.float32) * 2),
    "rows": (lambda t: t.slice(0, 2, 6), lambda a: a[2:6]),
    "odd columns": (lambda t: t.slice(1, 1, 9), lambda a: a[:, 1:9]),
    "stacked": (
        lambda t: osl.concat([e.reshape(1, 8, 16) for e in (t, osl.tensor("u"))], axis=0),
        lambda a: np.stack([a, a]),
    ),
    "joined": (
        lambda t: osl.concat([t, t.slice(0, 0, 4)], axis=0),
        lambda a: np.concatenate([a, a[:4]]),
    ),
    "padded": (lambda t: t.pad(1, 0, 4), lambda a: np.pad(a, [(0, 0), (0, 4)])),
    "decoded": (
        lambda t: osl.dequantize_block(t, osl.tensor("s"), dtype="float32"),
        lambda a: a.astype(np.float32),
    ),
}
REARRANGED = {
    "transposed": lambda t: t.transpose(),
    "reversed": lambda t: t.slice(0, None, None, -1),
    "reshaped": lambda t: t.reshape(16, 8),
    "stepped": lambda t: t.slice(1, 0, 16, 2),
    "called transposed": lambda t: osl.opaque(
        np.copy, t.transpose(), shape=(16, 8), dtype="float4_e2m1fn"
    ),
}


def values_of(dtype):
    return np.resize(np.array([0.5, -1, 2, 4, 1.5], np.float32), SHAPE).astype(dtype)


def rules(expr):
    return osl.Mapping([osl.rule("leaf", expr)], strict=False)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("dtype", PACKED_BITS, ids=str)
def test_regions_of_a_tensor_that_are_in_its_order(tmp_path, dtype, kind, axis):
    values = values_of(dtype)
    ones = np.ones((1, 1), np.float32)
    path = write_packed(tmp_path, {"t": values, "s": ones, "u": values})
    make, oracle = TAKEN[kind]
    expr, expected = make(osl.tensor("t")), oracle(values)
    if dtype.name.startswith("float6"):  # no dtype of JAX's arrays
        expr, expected = expr.cast("bfloat16"), expected.astype(ml_dtypes.bfloat16)
    mapping = rules(expr)
    assert mapping.abstract(path)["leaf"].shape == expected.shape
    assert osl.metadata(path, mapping=mapping)["leaf"].dtype == expected.dtype
    spec = [None] * expected.ndim
    if axis is not None:
        spec[axis] = "x"
    sharding = NamedSharding(mesh_of(x=2), P(*spec))
    wanted = jax.ShapeDtypeStruct(expected.shape, expected.dtype, sharding=sharding)
    loaded = np.asarray(osl.load(path, {"leaf": wanted}, mapping=mapping)["leaf"])
    assert loaded.dtype == expected.dtype
    np.testing.assert_array_equal(loaded.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("kind", REARRANGED)
def test_what_rearranges_elements_is_refused_by_every_way_of_reading(tmp_path, kind):
    path = write_packed(tmp_path / "hf", {"t": values_of(np.dtype(ml_dtypes.float4_e2m1fn))})
    mapping = rules(REARRANGED[kind](osl.tensor("t")))
    for read in (
        lambda: mapping.abstract(path),
        lambda: mapping.explain(path),
        lambda: osl.metadata(path, mapping=mapping),
        lambda: osl.load(path, mapping=mapping),
    ):
        with pytest.raises(osl.MappingError, match=r"leaf 'leaf'.*'t' \(float4_e2m1fn\) share"):
            read()
    with pytest.raises(osl.UnsupportedDtypeError, match=r"share bytes.*tensor: 'leaf'"):
        osl.convert(path, tmp_path / "to", format="hf", mapping=mapping)
    assert not (tmp_path / "to").exists()
