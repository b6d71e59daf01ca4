"""Tensors whose elements share bytes, through mappings, with blocks of any size."""

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
    "itself twice, stacked": (
        lambda t: osl.concat([t.reshape(1, 8, 16)] * 2, axis=0),
        lambda a: np.stack([a, a]),
    ),
    "repeated": (lambda t: t.take(0, [0] * 4), lambda a: a[[0] * 4]),
    "twice beside zeros": (
        lambda t: osl.concat([t.pad(1, 0, 2).reshape(1, 8, 18)] * 2, axis=0),
        lambda a: np.stack([np.pad(a, [(0, 0), (0, 2)])] * 2),
    ),
    "rows from the last, beside zeros": (
        lambda t: osl.concat([t.slice(0, n, n + 1).pad(1, 0, 2) for n in (5, 4, 1, 0)], axis=0),
        lambda a: np.pad(a[[5, 4, 1, 0]], [(0, 0), (0, 2)]),
    ),
    "transposed": (lambda t: t.transpose(), lambda a: a.T),
    "reversed": (lambda t: t.slice(0, None, None, -1), lambda a: a[::-1]),
    "reshaped": (lambda t: t.reshape(16, 8), lambda a: a.reshape(16, 8)),
    "stepped": (lambda t: t.slice(1, 0, 16, 2), lambda a: a[:, ::2]),
    "transposed for a function": (
        lambda t: osl.opaque(
            np.copy, t.transpose().cast("float32"), shape=(16, 8), dtype="float32"
        ),
        lambda a: a.T.astype(np.float32),
    ),
    "padded": (lambda t: t.pad(1, 0, 4), lambda a: np.pad(a, [(0, 0), (0, 4)])),
    "decoded": (
        lambda t: osl.dequantize_block(t, osl.tensor("s"), dtype="float32"),
        lambda a: a.astype(np.float32),
    ),
}


def values_of(dtype):
    return np.resize(np.array([0.5, -1, 2, 4, 1.5], np.float32), SHAPE).astype(dtype)


def rules(expr):
    return osl.Mapping([osl.rule("leaf", expr)], strict=False)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("dtype", PACKED_BITS, ids=str)
def test_what_a_mapping_makes_of_it_is_what_numpy_makes(tmp_path, dtype, kind, axis):
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
    for budget in (1, 1 << 31):  # of blocks of one element, and of any size
        options = osl.ReadOptions(memory_budget_bytes=budget)
        tree = osl.load(path, {"leaf": wanted}, mapping=mapping, options=options)
        loaded = np.asarray(tree["leaf"])
        assert loaded.dtype == expected.dtype
        np.testing.assert_array_equal(loaded.astype(np.float32), expected.astype(np.float32))
