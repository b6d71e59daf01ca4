"""Numbers and strings that stand in the manifest, asked for as anything that a tree can name."""

from __future__ import annotations

import math

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from jax_versions import enable_x64
from meshes import mesh_of

import orbax_safetensors_layout as osl

NAN = float("nan")
VALUES = [
    0, 1, -1, True, False, 5_000_000_000, 2**31, 2**40, -(2**63), 2**63, 2**64, 2**70, 2**1100,
    0.0, -0.0, 0.1, 0.5, 1e300, -1e300, 16777217, math.inf, -math.inf, NAN, "", "text", "7",
]  # fmt: skip
SMALL = [ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.float8_e4m3fn]
DTYPES = [*map(np.dtype, ["?", "i1", "i4", "i8", "u8", "f4", "f8", "c8", *SMALL])]


def same(value: object, other: object) -> bool:
    return value == other or (value != value and other != other)


@pytest.fixture
def saved(tmp_path):
    osl.save(tmp_path / "x", {str(number): value for number, value in enumerate(VALUES)})
    return tmp_path / "x"


def asked(number: int, leaf: object) -> dict[str, object]:
    """A tree that wants one of the values, and leaves the others alone."""
    return {**dict.fromkeys(map(str, range(len(VALUES))), ...), str(number): leaf}


@pytest.mark.parametrize("kind", [bool, int, float, str])
def test_python_scalars_are_the_value_or_refused(saved, kind):
    for number, value in enumerate(VALUES):
        for leaf in (kind, kind()):
            if held(kind, value):
                loaded = osl.load(saved, asked(number, leaf))[str(number)]
                assert type(loaded) is kind
                assert same(loaded, value)
            else:
                with pytest.raises(osl.DtypeMismatchError, match=f"tensor: '{number}'"):
                    osl.load(saved, asked(number, leaf))


def held(kind: type, value: object) -> bool:
    """Whether a Python type has a value."""
    try:
        return isinstance(value, str) is (kind is str) and same(kind(value), value)
    except (ValueError, OverflowError):
        return False


@pytest.mark.parametrize("where", ["host", "device", "device of 64 bits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_are_what_numpy_makes_of_the_value_or_refused(saved, dtype, where):
    leaf = np.zeros((), dtype)
    if where != "host":
        leaf = jax.ShapeDtypeStruct((), dtype, sharding=NamedSharding(mesh_of(x=4, y=2), P()))
    with enable_x64(where == "device of 64 bits"):
        given = dtype if where == "host" else np.dtype(jax.dtypes.canonicalize_dtype(dtype))
        must_survive = given.kind in "iub" or given.name == "int4" or given != dtype
        for number, value in enumerate(VALUES):
            expected = None if isinstance(value, str) else numpy_value(value, given, must_survive)
            if expected is None:
                with pytest.raises(osl.DtypeMismatchError, match=f"tensor: '{number}'"):
                    osl.load(saved, asked(number, leaf))
            else:
                loaded = np.asarray(osl.load(saved, asked(number, leaf))[str(number)])
                assert (loaded.dtype, loaded.tobytes()) == (given, expected.tobytes()), value


def numpy_value(value: float, dtype: np.dtype, must_survive: bool) -> np.ndarray | None:
    """A value in a dtype; None where it has to survive and does not."""
    try:
        exact = float(value) if abs(value) >= 2**64 and dtype.kind not in "iub" else value
        with np.errstate(all="ignore"):
            rounded = np.asarray(np.asarray(exact).astype(dtype))
        return None if must_survive and not same(rounded.item(), value) else rounded
    except (OverflowError, TypeError, ValueError):
        return None


def test_a_float_that_jax_would_make_infinite_is_refused(saved):
    """No dtype is asked for: one is rounded as JAX does, but stays finite."""
    request = ocp0.ArrayRestoreArgs(restore_type=jax.Array)
    checkpointer = ocp0.Checkpointer(osl.SafetensorsCheckpointHandler())
    for number, value in enumerate(VALUES):
        if type(value) is not float:
            continue
        args = osl.SafetensorsRestore(
            {str(number): 0.0}, {str(number): request}, partial_restore=True
        )
        if abs(value) == 1e300:
            with pytest.raises(osl.DtypeMismatchError, match=f"tensor: '{number}'"):
                checkpointer.restore(saved, args=args)
        else:
            restored = checkpointer.restore(saved, args=args)[str(number)]
            assert same(restored.item(), float(np.float32(value)))


def test_a_numpy_scalar_comes_back_as_one(saved):
    loaded = osl.load(saved, asked(0, np.float32(7)))["0"]
    assert (type(loaded), loaded) == (np.float32, 0)


def test_all_values_that_do_not_fit_are_told_together(saved):
    abstract = {str(number): int for number in range(len(VALUES))}
    with pytest.raises(osl.DtypeMismatchError) as caught:
        osl.load(saved, abstract)
    text = str(caught.value)
    assert str(saved) in text
    for name in ("'15'", "'22'", "'24'"):  # 0.1, NaN, text
        assert name in text


def test_a_plan_makes_no_arrays(saved):
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P())
    abstract = asked(0, jax.ShapeDtypeStruct((), np.int32, sharding=sharding))
    assert osl.plan_load(saved, abstract).needed_bytes == 0
    with pytest.raises(osl.MismatchError, match="names no devices"):
        osl.load(saved, abstract)


STATE = {"best_loss": NAN, "worst": math.inf, "step": 7, "params": {"w": np.arange(4.0)}}


def assert_restored(restored):
    assert math.isnan(restored["best_loss"])
    assert (type(restored["best_loss"]), restored["worst"], restored["step"]) == (
        float,
        math.inf,
        7,
    )
    np.testing.assert_array_equal(restored["params"]["w"], STATE["params"]["w"])


@pytest.mark.parametrize("layout", ["hf", "sharded"])
def test_a_state_with_nan_is_restored_with_its_own_template(tmp_path, layout):
    options = osl.WriteOptions(layout=layout)
    osl.save(tmp_path / "x", STATE, options=options)
    assert_restored(osl.load(tmp_path / "x", STATE))
    assert_restored(osl.load(tmp_path / "x"))
    with ocp0.CheckpointManager(
        tmp_path / "v0", handler_registry=osl.handler_registry("default", write=options)
    ) as manager:
        manager.save(0, args=ocp0.args.StandardSave(STATE))
        manager.wait_until_finished()
        assert_restored(manager.restore(0, args=ocp0.args.StandardRestore(STATE)))
        assert_restored(manager.restore(0))
    with osl.using(write=options), osl.context("state"):
        ocp.save_checkpointables(tmp_path / "v1", {"state": STATE})
        loaded = ocp.load_checkpointables(tmp_path / "v1", {"state": STATE})
        assert_restored(loaded["state"])
