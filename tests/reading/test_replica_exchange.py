"""Replicas read once and spread: values, with all devices in one process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_bits, random_tensor, save
from every_dtype import decode, sample, write
from hypothesis import given, settings, strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from mapping_expressions import ALL_OPS, cases
from meshes import any_sharding, mesh_of
from sampling import every

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES
from orbax_safetensors_layout.reading import (
    ReplicaExchange,
    all_gather,
)
from orbax_safetensors_layout.reading.all_gather import SendBuffer
from orbax_safetensors_layout.runtime import ProcessGroup
from orbax_safetensors_layout.sharding import ReplicaGrid

BF16 = np.dtype(ml_dtypes.bfloat16)
SPECS = [(), ("a",), (None, "a"), ("a", "b"), (("b", "a"),), (None, "b")]
BUDGETS = [2 << 30, 4096, 1]  # all in one round; many rounds and stages; each as small as can be


@pytest.fixture(autouse=True)
def _as_if_shared(monkeypatch):
    """Takes replicas on devices of one process for replicas of several."""
    monkeypatch.setattr(ReplicaGrid, "is_shared", True)
    monkeypatch.setattr(ReplicaGrid, "parts_processes", True)


def once(budget: int = 2 << 30) -> osl.ReadOptions:
    return osl.ReadOptions(replicated="read_once", memory_budget_bytes=budget)


@pytest.mark.parametrize("budget", every(2, BUDGETS))
def test_every_dtype_under_every_sharding_has_the_same_bits(tmp_path, budget):
    shape = (8, 48)
    codes = [
        c for c in sorted(DTYPES) if not c.startswith("F6_") or jax.__version_info__ >= (0, 12)
    ]
    raws = {code: sample(code, shape) for code in codes}
    path = write(tmp_path / "t.safetensors", {c: (c, shape, raws[c]) for c in codes})
    expected = {code: decode(code, shape, raws[code]) for code in codes}
    jax.config.update("jax_enable_x64", True)
    try:
        for spec in SPECS:
            sharding = NamedSharding(mesh_of(a=4, b=2), P(*spec))
            tree = {
                code: jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding)
                for code, value in expected.items()
            }
            for code, array in osl.load(path, tree, options=once(budget)).items():
                assert array.sharding == sharding
                for shard in array.addressable_shards:
                    assert_same_bits(shard.data, expected[code][shard.index])
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2 << 30, 1])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_expression_under_any_sharding(tmp_path_factory, budget, data):
    case = data.draw(cases(ALL_OPS, depth=3))
    folder = tmp_path_factory.mktemp("mapped")
    tensors = {name: np.asarray(array) for name, array in case.tensors.items()}
    save(folder, tensors)
    mapping = osl.Mapping([osl.rule("leaf", case.expr)], strict=False)
    value = np.asarray(case.array)
    leaf = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=any_sharding(data, value.shape))
    loaded = osl.load(folder, {"leaf": leaf}, mapping=mapping, options=once(budget))["leaf"]
    assert loaded.sharding == leaf.sharding
    assert_same_bits(np.asarray(loaded), value)


@pytest.mark.parametrize("returns", [True, False])
def test_a_gather_without_end_is_an_error_in_time_and_remembered(monkeypatch, returns):
    monkeypatch.setattr(all_gather, "_unfinished", [])
    monkeypatch.setattr(all_gather, "_GRACE_SECONDS", 0.1)
    group = ProcessGroup("load", 0, 1, None, 0.1)
    array = mock.Mock(is_ready=lambda: False)
    gather = Future()
    if returns:
        gather.set_result((array, array))
    exchange = ReplicaExchange([], None, group)
    exchange._in_flight.append((None, gather))
    with pytest.raises(osl.PeerError, match=r"others? .* did not come within 0\.1 s"), exchange:
        exchange.finish()
    assert not all_gather.await_unfinished()
    array.is_ready = lambda: True
    assert all_gather.await_unfinished() == returns
    if not returns:
        gather.set_result((array, array))
    assert all_gather.await_unfinished()


def test_nobody_knows_whether_a_gather_that_failed_began(monkeypatch):
    monkeypatch.setattr(all_gather, "_unfinished", [])
    monkeypatch.setattr(all_gather, "_GRACE_SECONDS", 0.1)
    gather = Future()
    gather.set_exception(MemoryError())
    all_gather.leave_unfinished([gather])
    assert not all_gather.await_unfinished()


def test_programs_are_compiled_beside_the_reads(tmp_path):
    """By a thread of the load; the gathers of another find them in JAX's cache."""
    path = save(tmp_path, {"t": random_tensor((2048, 512), np.float32, 0)})
    leaf = jax.ShapeDtypeStruct((2048, 512), np.float32, sharding=NamedSharding(mesh_of(a=8), P()))
    threads = []

    def listener(event, _, **__):
        if "backend_compile" in event:
            threads.append(threading.current_thread().name)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        osl.load(path, {"t": leaf}, options=once())
    finally:
        jax.monitoring.clear_event_listeners()
    assert [name.rpartition("_")[0] for name in threads] == ["safetensors_compile"]
    assert not {*threads} & {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_kind_of_leaf(tmp_path, budget):
    tensors = {
        "uneven": random_tensor((7, 5, 3), BF16, 1),  # no dimension that eight devices divide
        "scalar": random_tensor((), np.float32, 2),
        "empty": np.zeros((0, 4), np.float32),
        "cast": random_tensor((16, 3), np.float16, 3),
        "int4": np.arange(-8, 8, dtype=np.int8),
        "wide": np.arange(24, dtype=np.int64).reshape(4, 6),
        "host": random_tensor((3,), np.float64, 4),
        "keys": np.arange(8, dtype=np.uint32).reshape(4, 2),
    }
    path = save(tmp_path, tensors)
    everywhere = NamedSharding(mesh_of(a=4, b=2), P())
    few = NamedSharding(mesh_of(jax.devices()[2:5], x=-1), P())
    pinned = everywhere.with_memory_kind("pinned_host")
    formatted = Format(Layout((1, 0)), NamedSharding(mesh_of(a=4, b=2), P("a")))

    def leaf(name, sharding, dtype=None):
        return jax.ShapeDtypeStruct(
            tensors[name].shape, dtype or tensors[name].dtype, sharding=sharding
        )

    tree = {
        "uneven": leaf("uneven", few),
        "scalar": leaf("scalar", everywhere),
        "empty": leaf("empty", everywhere),
        "cast": leaf("cast", formatted, np.float32),
        "int4": leaf("int4", everywhere, ml_dtypes.int4),
        "wide": leaf("wide", pinned, np.int32),
        "host": np.zeros(3, np.float64),
        "keys": leaf("keys", SingleDeviceSharding(jax.devices()[5])),
    }
    loaded = osl.load(path, tree, options=once(budget))
    for name, value in loaded.items():
        assert_same_bits(np.asarray(value), tensors[name].astype(tree[name].dtype))
        if name != "host":
            assert value.sharding == (tree[name].sharding)
    assert loaded["cast"].format.layout.major_to_minor == (1, 0)
    assert loaded["wide"].sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("budget", [2 << 30, 1])
@pytest.mark.parametrize(
    "around",
    [
        lambda: jax.set_mesh(mesh_of(x=2, y=4)),
        lambda: jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))),
        lambda: jax.debug_nans(True),
        lambda: jax.transfer_guard("disallow"),
        lambda: jax.default_device(jax.devices()[3]),
    ],
    ids=["mesh", "explicit mesh", "debug_nans", "transfer_guard", "default_device"],
)
def test_what_surrounds_a_load_does_not_touch_it(tmp_path, budget, around):
    value = np.full((16, 64), np.nan, np.float32)
    path = save(tmp_path, {"w": value})
    leaf = jax.ShapeDtypeStruct(
        (16, 64), np.float32, sharding=NamedSharding(mesh_of(a=4, b=2), P("a"))
    )
    with around():
        loaded = osl.load(path, {"w": leaf}, options=once(budget))["w"]
    assert_same_bits(np.asarray(loaded), value)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.bool_])
@pytest.mark.parametrize(
    ("sizes", "spec", "cut_axes"),
    [
        ((4, 2), (None, "a", "b"), (1, 2)),
        ((4, 2), (None, None, ("a", "b")), (2,)),
        ((4, 2), ("a", None, "b"), (2,)),
        ((2, 4), (None, "b"), (1,)),
        ((2, 4), ("a",), ()),
    ],
)
def test_columns_of_others_are_exchanged(tmp_path, budget, dtype, sizes, spec, cut_axes):
    """Boxes that lie side by side in a file's rows come from reads of whole rows."""
    shape = (8000, 8, 64)  # more than a MiB, which is not packed
    tensor = random_tensor(shape, dtype, 0)
    path = save(tmp_path, {"t": tensor})
    sharding = NamedSharding(mesh_of(a=sizes[0], b=sizes[1]), P(*spec))
    leaf = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    with mock.patch.object(
        SendBuffer, "gather", autospec=True, side_effect=SendBuffer.gather
    ) as gather:
        loaded = osl.load(path, {"t": leaf}, options=once(budget))["t"]
    forms = [call.args[0]._form for call in gather.call_args_list]
    assert {form.is_direct for form in forms} == {dtype != np.bool_}  # which pass through the host
    assert {form.cut_axes for form in forms} == {() if dtype == np.bool_ else cut_axes}
    assert loaded.sharding == sharding
    for shard in loaded.addressable_shards:
        assert_same_bits(np.asarray(shard.data), tensor[shard.index])
