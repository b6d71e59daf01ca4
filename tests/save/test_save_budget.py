"""Asynchronous saves under a memory budget: the blocking part lasts until the rest fits.

Arrays on the CPU are on the host already, so these tests have the package take it for a device
with memory of its own; they ask for no more than that `device_put` to `pinned_host` works.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from checkpoints import assert_same_bits, random_tensor
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, PartitionSpec as P
from limits import full_disk
from meshes import mesh_of, place
from orbax_calls import installed_context
from programs import run_alone
from saved_files import assert_saved
from saving import opened

import orbax_safetensors_layout as osl
from orbax_safetensors_layout import tensor
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.runtime import allocate
from orbax_safetensors_layout.writing import host
from orbax_safetensors_layout.writing.folder import OpenFile

VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)
NAMES = "abcdefgh"


@pytest.fixture(autouse=True)
def device_memory(monkeypatch):
    monkeypatch.setattr("orbax_safetensors_layout.writing.host._on_host", lambda array: False)


def tree():
    return {name: place(VALUES + number, P("x")) for number, name in enumerate(NAMES)}


def small_steps(budget=256):
    """Every tensor has a file and takes a while, so that later ones wait for earlier ones."""
    return osl.WriteOptions(
        memory_budget_bytes=budget,
        max_file_bytes=1,
        concurrency=1,
        progress=lambda _: time.sleep(0.02),
    )


def begin_v0(root, write):
    """Starts a save; returns what waits for it."""
    registry = osl.handler_registry("state", write=write)
    manager = ocp0.CheckpointManager(root, handler_registry=registry)

    def begin(step, item):
        args = ocp0.args.Composite(state=ocp0.args.StandardSave(item))
        manager.save(step, args=args)
        return manager.wait_until_finished

    return begin


def begin_v1(root, write):
    def begin(step, item):
        with osl.context("state"), osl.using(write=write):
            return ocp.save_async(root / str(step), item).result

    return begin


def begin_layout(root, write):
    def begin(step, item):
        with installed_context(), osl.using(write=write):
            return ocp.save_async(root / str(step), item).result

    return begin


def begin_training(root, write):
    training = ocp.training.Checkpointer(root, context=osl.context("state"))

    def begin(step, item):
        with osl.using(write=write):
            return training.save_async(step, item).result

    return begin


ROUTES = [begin_v0, begin_v1, begin_layout, begin_training]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("budget", [256, 1000, None])
def test_the_arrays_may_go_when_the_save_returns(tmp_path, route, budget):
    begin = route(tmp_path, small_steps(budget))
    for step in range(2):
        item = tree()
        finish = begin(step, item)
        for array in jax.tree.leaves(item):
            array.delete()
        finish()
        stored = opened(tmp_path / str(step) / "state")
        for number, name in enumerate(NAMES):
            assert_same_bits(stored[name], VALUES + number)


@pytest.mark.parametrize("route", ROUTES)
def test_the_arrays_are_waited_for_whatever_the_time_out(tmp_path, route):
    """That bounds how long processes wait for each other, not how long one of them writes."""
    begin = route(tmp_path, dataclasses.replace(small_steps(), timeout_seconds=0.001))
    item = tree()
    finish = begin(0, item)
    for array in jax.tree.leaves(item):
        array.delete()
    finish()
    stored = opened(tmp_path / "0" / "state")
    for number, name in enumerate(NAMES):
        assert_same_bits(stored[name], VALUES + number)


@pytest.mark.parametrize("route", ROUTES)
def test_the_budget_makes_the_blocking_part_longer(tmp_path, route):
    def blocking_seconds(budget):
        begin = route(tmp_path / str(budget), small_steps(budget))
        start = time.monotonic()
        finish = begin(0, tree())
        seconds = time.monotonic() - start
        finish()
        return seconds

    blocking_seconds(1)  # whatever is slow the first time
    assert blocking_seconds(256) > 0.02 * (len(NAMES) - 2)


@pytest.mark.parametrize(
    ("shape", "copies", "budget"), [((8, 8), 1, None), ((3072, 2048), 3, 32 << 20)]
)
def test_parts_come_to_the_host_while_others_are_written(
    tmp_path, monkeypatch, shape, copies, budget
):
    """A write ends here once the next copy has begun, also of tensors of which one fits alone."""
    values = {name: random_tensor(shape, np.dtype(np.float32), ord(name)) for name in "abc"}
    begun = threading.Semaphore(0)
    to_host, write_at = host._to_host, OpenFile.write_at
    copies_to_wait_for = iter([2, *[1] * (copies * len(values) - 2), 0])

    def begin(shards):
        begun.release()
        return to_host(shards)

    def write(file, offset, buffers):
        for _ in range(next(copies_to_wait_for) if offset else 0):  # headers are at 0
            assert begun.acquire(timeout=20), "the next part waits for the write"
        write_at(file, offset, buffers)

    monkeypatch.setattr(host, "_to_host", begin)
    monkeypatch.setattr(OpenFile, "write_at", write)
    options = osl.WriteOptions(max_file_bytes=1, concurrency=1, memory_budget_bytes=budget)
    osl.save(tmp_path, {name: place(v, P()) for name, v in values.items()}, options=options)
    assert next(copies_to_wait_for, None) is None
    assert_saved(tmp_path, values)


def test_copies_begin_at_once_where_no_host_memory_is_pinned():
    calls = []
    copied = mock.Mock(copy_to_host_async=lambda: calls.append("begin"))
    device = mock.Mock(addressable_memories=lambda: [mock.Mock(kind="device")])
    shard = mock.Mock(copy=lambda: calls.append("copy") or copied)
    shard.sharding.addressable_devices = {device}
    assert host._to_host([shard, shard]) == [copied, copied]
    assert calls == ["copy", "copy", "begin", "begin"]


@pytest.mark.parametrize("budget", [1, 200_000])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y", "x"), P()], ids=str)
def test_a_tensor_larger_than_the_budget_comes_in_slabs(tmp_path, monkeypatch, spec, budget):
    brought = []
    to_host = host._to_host
    monkeypatch.setattr(
        host, "_to_host", lambda all: brought.append(sum(s.nbytes for s in all)) or to_host(all)
    )
    dtypes = [np.float32, ml_dtypes.int4, ml_dtypes.float4_e2m1fn, np.bool_]
    values = {
        f"{number}": random_tensor(shape, np.dtype(np.int8), number).astype(dtype)
        for number, (dtype, shape) in enumerate(
            itertools.product(dtypes, [(16, 24), (8, 8, 6), (40, 8)])
        )
    }
    tree = {name: place(value, spec) for name, value in values.items()}
    with jax.transfer_guard("disallow"):
        options = osl.WriteOptions(memory_budget_bytes=budget, fsync=False)
        osl.save(tmp_path / "x", tree, options=options)
    assert_saved(tmp_path / "x", values)
    assert max(brought) <= max(budget, 64 << 10)


@pytest.mark.parametrize("route", ROUTES)
def test_a_full_disk_ends_the_blocking_part(tmp_path, route):
    begin = route(tmp_path, small_steps())
    big = {name: place(np.ones((8, 1000), np.float32), P("x")) for name in NAMES}

    def fail():
        begin(0, big)()

    with full_disk(8192), pytest.raises(osl.StorageError, match=r"model-.*\.safetensors"):
        fail()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("budget", [256, 100_000, None])
def test_numpy_arrays_may_be_overwritten(tmp_path, route, budget):
    """Views of them would show what comes after the save."""
    begin = route(tmp_path, small_steps(budget))
    values = {name: VALUES + number for number, name in enumerate(NAMES)}
    values["turned"] = np.arange(120_000.0).reshape(300, 400).T  # larger than a slab
    item = {name: value.copy(order="K") for name, value in values.items()}
    finish = begin(0, item)
    for array in item.values():
        array[...] = -1
    finish()
    stored = opened(tmp_path / "0" / "state")
    for name, value in values.items():
        assert_same_bits(stored[name], value)


def test_copies_of_numpy_arrays_are_within_the_budget(tmp_path):
    """256 MB, and no more than 64 MB and the budget beyond them."""
    environment = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
    grown = run_alone("save_manager_peak.py", tmp_path, environment=environment)
    assert int(grown) < (64 + 32) << 20


@pytest.mark.parametrize("option", ["write_concurrent_bytes", "transfer_concurrent_bytes"])
def test_the_budget_of_orbaxs_context(tmp_path, option):
    context = osl.context("state")
    setattr(context.memory, option, 256)
    with context:
        item = tree()
        response = ocp.save_async(tmp_path / "a", item)
        for array in jax.tree.leaves(item):
            array.delete()
        response.result()
    assert opened(tmp_path / "a" / "state").keys() == set(NAMES)


@pytest.mark.parametrize("start", [(1 << 31) - 8, 1 << 31, 1 << 32])
def test_what_is_cut_from_beyond_the_range_of_an_index_of_32_bits(start):
    """Of a buffer as of a flat optimizer state, of whose memory few pages are touched."""
    values = allocate(start + 64)  # which the device has as it is
    values[start + 5] = 7
    on_device = jax.device_put(values)
    box, region = Box.whole((start + 64,)), Box((start,), (start + 16,))
    assert np.flatnonzero(host._region(on_device, box, region)).tolist() == [5]


class HostCopies:
    """Host copies of values of devices, as saves wait for them."""

    def __init__(self, monkeypatch):
        self.nbytes, self.most_bytes = 0, 0
        self._alive = weakref.WeakValueDictionary()
        wait = host.HostValues.wait

        def recorded(values, pending):
            arrays = wait(values, pending)
            for array in arrays:
                self.nbytes += array.nbytes
                self._alive[id(array)] = array
            alive = sum(array.nbytes for array in self._alive.values())
            self.most_bytes = max(self.most_bytes, alive)
            return arrays

        monkeypatch.setattr(host.HostValues, "wait", recorded)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, None, "x")], ids=str)
def test_a_mapped_save_copies_what_it_writes_next(tmp_path, monkeypatch, axis, spec):
    """All once, whatever the leaf's size and the axis that its layers are along."""
    layers = [np.full((256, 128), n, np.float32) for n in range(16)]
    leaf = place(np.stack(layers, axis), spec)
    expr = osl.stack(tensor("model.{layer}").transpose(1, 0), over="layer", axis=axis)
    copies = HostCopies(monkeypatch)
    options = osl.WriteOptions(memory_budget_bytes=4 * layers[0].nbytes, concurrency=1)
    mapping = osl.Mapping([osl.rule("x", expr)])
    osl.save(tmp_path / "a", {"x": leaf}, mapping=mapping, options=options)
    assert copies.nbytes == leaf.nbytes
    assert 0 < copies.most_bytes <= 2 * layers[0].nbytes
    for name, value in opened(tmp_path / "a").items():
        assert_same_bits(value, layers[int(name.removeprefix("model."))].T)


@pytest.fixture
def copied(monkeypatch):
    """The bytes of each copy from devices."""
    nbytes, to_host = [], host._to_host

    def recorded(shards):
        nbytes.extend(shard.nbytes for shard in shards)
        return to_host(shards)

    monkeypatch.setattr(host, "_to_host", recorded)
    return nbytes


SCATTERED = {
    "heads": (tensor("f").rearrange("(m k) e -> (k m) e", k=3), (3 << 10, 256)),
    "last axis": (osl.stack(tensor("t.{n}"), over="n", axis=2), (64, 256, 16)),
    "rows": (tensor("t").take(0, np.random.default_rng(0).permutation(4096).tolist()), (4096, 64)),
}


@pytest.mark.parametrize("case", SCATTERED)
def test_a_leaf_of_which_rows_take_scattered_elements_is_copied_once(tmp_path, copied, case):
    expr, shape = SCATTERED[case]
    values = np.random.default_rng(1).random(shape, np.float32)
    mapping = osl.Mapping([osl.rule("x", expr)])
    options = osl.WriteOptions(memory_budget_bytes=1 << 16)
    osl.save(tmp_path / "a", {"x": place(values, P())}, mapping=mapping, options=options)
    assert sum(copied) == values.nbytes
    assert_same_bits(np.asarray(osl.load(tmp_path / "a", mapping=mapping)["x"]), values)


def test_shards_are_looked_at_for_the_rows_that_they_have(tmp_path, monkeypatch):
    """Of 64 leaves of 8 shards that one tensor is made of, in blocks of 32 KiB."""
    tree = {f"e{n}": place(np.full((1, 32, 64), n, np.float32), P(None, "x")) for n in range(64)}
    rules = [osl.rule(f"e{n}", tensor("experts").slice(0, n, n + 1)) for n in range(64)]
    begun, begin = [], host.HostValues.begin_region
    monkeypatch.setattr(
        host.HostValues, "begin_region", lambda self, part: begun.append(part) or begin(self, part)
    )
    options = osl.WriteOptions(memory_budget_bytes=1 << 16)
    osl.save(tmp_path / "a", tree, mapping=osl.Mapping(rules), options=options)
    assert len(begun) <= 2 * 64 * 8
    stored = opened(tmp_path / "a")["experts"]
    assert (stored == np.arange(64)[:, None, None]).all()


def test_weights_with_a_factor_are_scanned_once(tmp_path, copied):
    weight = place(np.random.default_rng(0).random((256, 64), np.float32), P("x"))
    options = osl.WriteOptions(
        memory_budget_bytes=1 << 14, quantize=osl.Quantization("nvfp4"), dtype="bfloat16"
    )
    osl.save(tmp_path / "a", {"q_proj.weight": weight}, options=options)
    # For the factor, the scales and the values; and a row of it where the factor is written.
    assert sum(copied) == 3 * weight.nbytes + 64 * 4


def test_a_layout_of_columns_is_copied_by_the_rows_that_are_written(tmp_path, monkeypatch):
    monkeypatch.undo()  # to arrays on the host
    values = np.random.default_rng(0).random((512, 256), np.float32)
    columns = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    copies = HostCopies(monkeypatch)
    write = osl.WriteOptions(memory_budget_bytes=1 << 17)
    mapping = osl.Mapping([osl.rule("x", tensor("y").transpose())])
    with osl.context("state"), osl.using(mapping=mapping, write=write):
        ocp.save_async(tmp_path / "a", {"x": jax.device_put(values, columns)}).result()
    assert copies.nbytes == values.nbytes
    assert_same_bits(opened(tmp_path / "a" / "state")["y"], values.T)


@pytest.mark.parametrize("budget", [1 << 16, 1 << 20, None])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_mappings_and_formats_compute_is_that_of_arrays_on_the_host(
    tmp_path, monkeypatch, budget, asynchronous
):
    """Rows of quantised, cast and compared tensors, fused and cut ones, and packed leaves."""
    rng = np.random.default_rng(0)
    rows = {"e": (256, 64), "q": (4, 64, 128), "gu": (2, 128, 256), "n": (4, 64)}
    values = {name: rng.random(shape, np.float32) for name, shape in rows.items()}
    values["head"] = values["e"].T.copy()
    values["i"] = rng.integers(-8, 8, (4, 32)).astype(ml_dtypes.int4)
    specs = {
        "e": P("x"),
        "q": P(None, None, "x"),
        "gu": P(None, "x"),
        "n": P(),
        "head": P(None, "x"),
    }
    tree = {name: place(value, specs.get(name, P())) for name, value in values.items()}
    rules = [
        osl.rule("e", tensor("embed.weight")),
        osl.rule("head", tensor("embed.weight").transpose(), tied_to="e"),
        osl.rule("q", osl.stack(tensor("l.{n}.q_proj.weight").transpose(), over="n", axis=0)),
        osl.rule("gu", tensor("gate_up_proj.weight").rearrange("(k m) e -> k e m", k=2)),
        osl.rule("n", osl.stack(tensor("l.{n}.norm.weight"), over="n", axis=0)),
        osl.rule("i", tensor("i").transpose()),
    ]
    mapping = osl.Mapping(rules)
    quantize = None if asynchronous else osl.Quantization("nvfp4")
    write = osl.WriteOptions(memory_budget_bytes=budget, dtype="bfloat16", quantize=quantize)
    if asynchronous:
        with osl.context("state"), osl.using(mapping=mapping, write=write):
            saving = ocp.save_async(tmp_path / "a", tree)
            for array in tree.values():
                array.delete()
            saving.result()
        folder = tmp_path / "a" / "state"
    else:
        folder = tmp_path / "a"
        osl.save(folder, tree, mapping=mapping, options=write)
    monkeypatch.undo()
    osl.save(tmp_path / "b", values, mapping=mapping, options=write)
    (stored,) = folder.glob("*.safetensors")
    assert len(osl.metadata(folder)) > 10
    assert stored.read_bytes() == (tmp_path / "b" / stored.name).read_bytes()


SURROUNDINGS = {
    "mesh": lambda: jax.set_mesh(mesh_of(x=2, y=4)),
    "explicit mesh": lambda: jax.set_mesh(mesh_of(x=8, axis_types=(AxisType.Explicit,))),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "default_device": lambda: jax.default_device(jax.devices()[3]),
}


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("how", ["plain", "mapped", "orbax"])
def test_what_surrounds_a_save_does_not_touch_it(tmp_path, around, how):
    """Slabs are cut on the devices that hold them, one by one, whatever the values."""
    values = random_tensor((512, 1024), np.dtype(np.float32), 0)
    values[::7], values[1::7] = np.nan, -np.inf
    integers = (np.arange(values.size) % 16 - 8).reshape(values.shape).astype(ml_dtypes.int4)
    tree = {"w": place(values, P("x")), "i": place(integers, P("x"))}
    expected = {name: np.asarray(array) for name, array in tree.items()}
    write = osl.WriteOptions(memory_budget_bytes=1 << 16)
    if how == "orbax":
        with SURROUNDINGS[around](), osl.context("state"), osl.using(write=write):
            ocp.save_async(tmp_path / "a", tree).result()
        assert_saved(tmp_path / "a" / "state", expected)
        return
    mapping = None
    if how == "mapped":  # takes a part of each row
        halves = [tensor("{x}.0"), tensor("{x}.1")]
        mapping = osl.Mapping([osl.rule("{x}", osl.concat(halves, axis=1, sizes=[256, 768]))])
    with SURROUNDINGS[around]():
        osl.save(tmp_path / "a", tree, mapping=mapping, options=write)
    loaded = osl.load(tmp_path / "a", mapping=mapping)
    for name, value in expected.items():  # int4 is stored as int8
        assert_same_bits(np.asarray(loaded[name]).astype(value.dtype), value)


def test_the_caller_goes_on_when_the_last_leaf_of_a_mapped_save_is_on_the_host(tmp_path):
    """Files of it are still to be written then."""
    may_end = threading.Event()
    mapping = osl.Mapping([osl.rule("{x}", tensor("model.{x}"))])

    def pause(progress):
        assert progress.done_bytes < progress.total_bytes or may_end.wait(20)

    write = dataclasses.replace(small_steps(), progress=pause)
    with osl.context("state"), osl.using(mapping=mapping, write=write):
        saving = ocp.save_async(tmp_path / "a", tree())
        may_end.set()
        saving.result()
    assert opened(tmp_path / "a" / "state").keys() == {f"model.{name}" for name in NAMES}
