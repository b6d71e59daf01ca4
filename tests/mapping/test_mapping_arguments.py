"""Arguments that make no expression are refused by name, when it is written or bound."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.errors import MappingError

W = osl.tensor("w")
HUGE = 10**400
SPECS = {
    "w": ((2, 2), np.dtype("float32")),
    "i": ((4,), np.dtype("int8")),
    "n": ((4,), np.dtype(ml_dtypes.int4)),
    "b": ((4,), np.dtype("bool")),
    "c": ((4,), np.dtype("complex64")),
    "h": ((4,), np.dtype("float16")),
    "l": ((4,), np.dtype("int64")),
}


def bound(expr: osl.Expr) -> None:
    expr.bind({}, SPECS)


WRONG = {
    "reshape": [
        *(lambda to=to: W.reshape(to) for to in (None, "22", 1.5, HUGE, np.array([1.5]), [None])),
        lambda: W.reshape(2, "2"),
    ],
    "transpose": [lambda axes=axes: W.transpose(axes) for axes in (None, "10", 0.5, [0, "1"])],
    "rearrange": [
        lambda: W.rearrange(None),
        *(lambda a=a: W.rearrange("(a b) c -> a b c", a=a) for a in ("x", 1.5, None, HUGE)),
    ],
    "slice": [lambda: W.slice(0, "a"), lambda: W.slice(None, 0), lambda: W.slice(0, 0, 1, None)],
    "take": [lambda of=of: W.take(0, of) for of in (None, "ab", [1.5], [True], 1, [HUGE])],
    "pad": [lambda: W.pad("0", 1, 1), lambda: W.pad(0, HUGE, 1), lambda: W.pad(0, None, 1)],
    "repeat": [lambda n=n: W.repeat(0, n) for n in ("2", None, 1.5, HUGE)],
    "scale": [lambda c=c: W.scale(c) for c in (HUGE, "2", None, 1j, np.ones(2), [1])],
    "add": [lambda c=c: W.add(c) for c in (HUGE, "x", None, 1j, np.ones(2))],
    "dtype": [
        lambda dtype=dtype: W.cast(dtype) for dtype in (None, "O", "U3", [("a", "i4")], 7, "")
    ],
    "concat": [
        lambda: osl.concat(None, 0),
        lambda: osl.concat(W, 0),
        lambda: osl.concat([W], None),
        lambda: osl.concat([W, W], 0, sizes=["a", None]),
    ],
    "stack": [
        lambda: osl.stack(W, None),
        *(lambda of=of: osl.stack(W, "i", indices=of) for of in (["a"], 3, "ab", slice("a", "b"))),
        lambda: osl.stack(W, "i", axis="a"),
    ],
    "shape": [
        *(lambda shape=shape: osl.fill(shape, 1, "float32") for shape in (None, "ab", 7, [1.5])),
        lambda: osl.opaque(abs, W, shape=4, dtype="float32"),
    ],
    "opaque takes a function": [lambda: osl.opaque(None, W, shape=(4,), dtype="float32")],
    "not a dtype": [
        lambda: osl.fill((2,), 1, None),
        lambda: osl.opaque(abs, W, shape=(4,), dtype=None),
        lambda: osl.dequantize_block(W, W, dtype=None),
    ],
    "dequantize_block": [
        lambda: osl.dequantize_block("w", W),
        *(lambda of=of: osl.dequantize_block(W, W, block=of) for of in ("ab", None, (1.5, 2))),
    ],
    "dequantize_mxfp4": [lambda: osl.dequantize_mxfp4(W, "w")],
    "dequantize_int4": [
        lambda: osl.dequantize_int4(W, None),
        *(lambda group=group: osl.dequantize_int4(W, W, group=group) for group in ("a", None)),
    ],
    "gives floating-point numbers": [
        lambda of=of, dtype=dtype: of(W, W, dtype=dtype)
        for of in (osl.dequantize_block, osl.dequantize_mxfp4, osl.dequantize_int4)
        for dtype in ("int8", "uint8", "bool", "complex64", "int4")
    ],
    "a pattern of names": [
        *(lambda name=name: osl.tensor(name) for name in (None, 7, b"w")),
        lambda: osl.rule(None, W),
        lambda: osl.rule(["a"], W),
        lambda: osl.rule("a", None, tied_to=7),
    ],
    "Mapping takes": [lambda: osl.Mapping(None), lambda: osl.Mapping(osl.rule("m", W))],
    "shapes and dtypes by name": [
        lambda of=of, take=take: getattr(osl.Mapping([osl.rule("m", W)]), take)(of)
        for take in ("like", "abstract", "explain", "leaf_facts", "bind")
        for of in (
            *(None, 5, [("w", ((2,), "int8"))], {7: ((2,), "int8")}),
            *({"w": (4, 6)}, {"w": "F32"}, {"w": None}, {"w": ((2,), "F32")}),
            *({"w": ((4.0,), "int8")}, {"w": jax.ShapeDtypeStruct((2,), "int8")}),
        )
    ],
    "items at most": [
        lambda: osl.fill(range(10**9), 1, "float32"),
        lambda: osl.fill([1] * 65, 1, "float32"),
        lambda: osl.opaque(abs, W, shape=range(10**9), dtype="float32"),
        lambda: W.reshape(range(10**9)),
        lambda: W.transpose(range(10**9)),
        lambda: W.take(0, range(10**9)),
        lambda: osl.stack(W, "i", indices=itertools.count()),
        lambda: osl.concat([W, W], 0, sizes=range(10**9)),
    ],
    "unsaved=": [lambda of=of: osl.Mapping([], unsaved=of) for of in (None, 5, "[", [7], b"w")],
    "buffers=": [lambda of=of: osl.Mapping([], buffers=of) for of in (None, 5, "[", [7], b"w")],
    "ignore=": [lambda: osl.Mapping([], ignore=None), lambda: osl.Mapping([], ignore=[7])],
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_are_refused_by_name(what):
    for number, make in enumerate(WRONG[what]):
        with pytest.raises(MappingError) as caught:
            make()
        assert what in str(caught.value), number
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("w", 1j), ("w", 1e300), ("w", "7"), ("w", None), ("w", [1, 2]), ("w", HUGE), ("h", 70000),
        ("i", 300), ("i", 1.5), ("i", float("nan")), ("i", 1j), ("n", 8), ("n", 0.5), ("b", 2),
        ("l", -(2**63) - 1),
    ],
)  # fmt: skip
def test_values_that_a_dtype_does_not_hold_are_refused(name, value):
    dtype = SPECS[name][1]
    for expr in (osl.tensor(name).pad(0, 1, 1, value=value), osl.fill((2,), value, dtype)):
        with pytest.raises(MappingError, match=r" is not a value of "):
            bound(expr)


def test_values_that_a_dtype_holds_are_taken():
    for name, value in [
        ("w", 0.1), ("w", float("nan")), ("w", -np.inf), ("w", np.float64(0.5)), ("w", True),
        ("w", complex(1, 0)), ("c", 1j), ("i", -128), ("i", 3.0), ("n", 7), ("b", 1),
        ("h", np.float32(2)), ("w", ml_dtypes.bfloat16(2)), ("i", np.array(5)), ("w", 1 << 70),
    ]:  # fmt: skip
        dtype = SPECS[name][1]
        bound_expr = osl.tensor(name).pad(0, 1, 0, value=value).bind({}, SPECS)
        assert bound_expr.dtype == dtype
        bound(osl.fill((2,), value, dtype))
    bound(W.reshape(np.array([4, 1])))
    bound(W.transpose(np.array([1, 0])).take(0, np.array([1, 0])))
    bound(W.scale(np.float32(2)).add(np.array(1.0)).add(1 << 70))


@pytest.mark.parametrize("name", ["w", "h"])
def test_constants_beyond_a_dtype_are_refused(name):
    for expr in (osl.tensor(name).scale(1e300), osl.tensor(name).add(-1e300)):
        with pytest.raises(MappingError, match="cannot hold the constant"):
            bound(expr)


def test_scalars_of_jax_are_numbers():
    for constant in (
        jnp.float32(2),
        jnp.asarray(2.0),
        4 / jnp.sqrt(4),
        jnp.bfloat16(2),
        jnp.int32(2),
    ):
        assert repr(W.scale(constant)) in (repr(W.scale(2.0)), repr(W.scale(2)))
    for wrong in (jnp.ones(2), jax.random.key(0), jax.ShapeDtypeStruct((), jnp.float32)):
        with pytest.raises(osl.MappingError, match="takes a real number"):
            W.scale(wrong)
    with pytest.raises(osl.MappingError, match="takes a real number"):
        jax.jit(lambda x: W.scale(x) and x)(jnp.float32(2))
