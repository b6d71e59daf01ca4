"""Values on their way to devices with memory of their own, as which CPU devices are taken here."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from accelerators import Transfers
from checkpoints import assert_same_bits, random_tensor, save
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import abstract_of, mesh_of
from recording import recording
from sampling import every

import orbax_safetensors_layout as osl
import orbax_safetensors_layout.reading.leaf_builder as builder_module
from orbax_safetensors_layout.reading import LeafBuilder

SHAPE = (1024, 2048)
NUMBER = 24
STAGED = 64 << 20  # by requests in flight, at most
STACKED = osl.Mapping(
    [osl.rule("all", osl.stack(osl.tensor("t{i}").transpose(), over="i"))],
)
TRANSPOSED = osl.Mapping([osl.rule("t{i}", osl.tensor("t{i}").transpose())])
CAST = osl.Mapping([osl.rule("t{i}", osl.tensor("t{i}").cast("float32"))])


def make(folder):
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {f"t{i}": random_tensor(SHAPE, dtype, i) for i in range(NUMBER)}
    return save(folder, tensors), tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make(tmp_path_factory.mktemp("checkpoint"))


def mapped(tensors, mapping):
    if mapping is STACKED:
        return {"all": np.stack([tensors[f"t{i}"].T for i in range(NUMBER)])}
    if mapping is TRANSPOSED:
        return {name: tensor.T for name, tensor in tensors.items()}
    if mapping is CAST:
        return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    return tensors


TILES = [  # as tensors have dimensions, and no tile is larger than the budget
    *itertools.product((None, TRANSPOSED, CAST), (P("x"), P(None, "x"), P())),
    *itertools.product((STACKED,), (P("x"), P(None, "x"), P(None, None, "x"))),
]


@pytest.mark.parametrize(("mapping", "spec"), every(2, TILES))
def test_memory_is_used_again_when_its_transfer_has_ended(checkpoint, monkeypatch, mapping, spec):
    """Never before: `Transfers` checks each when it ends. And the budget counts it until then."""
    path, tensors = checkpoint
    values = mapped(tensors, mapping)
    transfers = Transfers(monkeypatch)
    budget = 8 * tensors["t0"].nbytes
    tree = abstract_of(values, NamedSharding(mesh_of(x=8), spec))
    options = osl.ReadOptions(memory_budget_bytes=budget)
    loaded = osl.load(path, tree, mapping=mapping, options=options)
    for name, value in values.items():
        assert_same_bits(np.asarray(loaded[name]), value)
    total = sum(value.nbytes for value in values.values())
    assert transfers.put_bytes == total
    assert transfers.most_bytes <= budget
    assert transfers.allocated_bytes <= 3 * total // 4  # some sizes take turns


@pytest.mark.parametrize(("mapping", "axis"), [(None, 0), (STACKED, 1), (TRANSPOSED, 1), (CAST, 0)])
def test_large_memory_is_registered_when_it_is_transferred(tmp_path, monkeypatch, mapping, axis):
    """It has its values then, since pages that were never written to take longer."""
    tensors = {f"t{i}": random_tensor((4096, 2048), np.dtype("int16"), i) for i in range(6)}
    values = (
        mapped(tensors, mapping)
        if mapping is not STACKED
        else {"all": np.stack([tensor.T for tensor in tensors.values()])}
    )
    transfers = Transfers(monkeypatch)
    driver, put = transfers.driver, []
    begin = LeafBuilder.take

    def take(builder, leaves, boxes, parts):
        put.extend(driver.holds(part) for part in parts)
        return begin(builder, leaves, boxes, parts)

    monkeypatch.setattr(LeafBuilder, "take", take)
    path = save(tmp_path, tensors, files=2)
    spec = P(*[None] * axis, "x")
    tree = abstract_of(values, NamedSharding(mesh_of(x=2), spec))
    budget = 3 * tensors["t0"].nbytes
    options = osl.ReadOptions(memory_budget_bytes=budget)
    loaded = osl.load(path, tree, mapping=mapping, options=options)
    for name, value in values.items():
        assert_same_bits(np.asarray(loaded[name]), value)
    assert put
    assert all(put)
    assert driver.log.count("register") < len(values) or mapping is STACKED  # used again
    assert not driver.registered  # all of it has been given back
    registered = len(driver.log)
    osl.load(path, tree, mapping=mapping, options=osl.ReadOptions(register_memory=False))
    assert len(driver.log) == registered


def test_values_that_are_not_read_wait_for_their_transfers(tmp_path, monkeypatch):
    transfers = Transfers(monkeypatch)
    shape = (512, 1024)
    tensors = {f"w{i}": random_tensor(shape, np.dtype("float32"), i) for i in range(4)}
    path = save(tmp_path, tensors)
    fills = [osl.rule(f"f{i}", osl.fill(shape, i, "float32")) for i in range(8)]
    pads = [osl.rule(f"p{i}", osl.tensor(f"w{i}").pad(0, 0, 7 * shape[0], i)) for i in range(4)]
    values = {f"f{i}": np.full(shape, i, np.float32) for i in range(8)}
    for i in range(4):
        filled = np.full((7 * shape[0], shape[1]), i, np.float32)
        values[f"p{i}"] = np.concatenate([tensors[f"w{i}"], filled])
    tree = abstract_of(values, NamedSharding(mesh_of(x=8), P("x")))
    budget = 2 * tensors["w0"].nbytes
    loaded = osl.load(
        path,
        tree,
        mapping=osl.Mapping([*fills, *pads]),
        options=osl.ReadOptions(memory_budget_bytes=budget),
    )
    for name, expected in values.items():
        assert_same_bits(np.asarray(loaded[name]), expected)
    assert transfers.put_bytes == sum(expected.nbytes for expected in values.values())
    assert transfers.most_bytes <= budget


def composed(number, rows):
    """Leaves of tensors of two dtypes, which are composed in several blocks."""
    half = {"a": np.float32, "b": ml_dtypes.bfloat16}
    tensors = {
        f"{kind}{i}": random_tensor((rows, 1024), np.dtype(dtype), i)
        for i in range(number)
        for kind, dtype in half.items()
    }
    parts = [osl.tensor("a{i}"), osl.tensor("b{i}").cast("float32")]
    values = {
        f"t{i}": np.concatenate([tensors[f"a{i}"], tensors[f"b{i}"].astype(np.float32)])
        for i in range(number)
    }
    return tensors, osl.Mapping([osl.rule("t{i}", osl.concat(parts, 0))]), values


@pytest.mark.parametrize("leaves_in_budget", [4, 1, 0.5])
def test_composed_leaves_count_until_their_transfer_has_ended(
    tmp_path, monkeypatch, leaves_in_budget
):
    """Where one is larger than the budget, it is alone."""
    tensors, mapping, values = composed(12, 1024)
    path = save(tmp_path, tensors, files=3)
    transfers = Transfers(monkeypatch)
    nbytes = values["t0"].nbytes
    options = osl.ReadOptions(memory_budget_bytes=int(leaves_in_budget * nbytes))
    tree = abstract_of(values, NamedSharding(mesh_of(x=8), P("x")))
    loaded = osl.load(path, tree, mapping=mapping, options=options)
    for name, value in values.items():
        assert_same_bits(np.asarray(loaded[name]), value)
    assert transfers.put_bytes == 12 * nbytes
    assert transfers.most_bytes <= max(options.memory_budget_bytes, nbytes)
    cost = osl.plan_load(path, tree, mapping=mapping, options=options).cost()
    assert transfers.most_bytes <= cost.peak_host_bytes
    assert cost.peak_host_bytes <= 2 * max(options.memory_budget_bytes, nbytes) + STAGED


def test_transfers_overlap_reads(checkpoint, monkeypatch):
    """None is waited for while the budget has room: all reads begin before."""
    path, tensors = checkpoint
    transfers = Transfers(monkeypatch)
    tree = abstract_of(tensors, NamedSharding(mesh_of(x=8), P("x")))
    with recording() as storage:
        storage.before_read = lambda file, start, stop: transfers.log.append("read")
        osl.load(path, tree, options=osl.ReadOptions(concurrency=1))  # few reads ahead
    log = transfers.log
    assert log.count("put") == log.count("wait") == NUMBER
    assert log.index("put") < max(n for n, word in enumerate(log) if word == "read")
    assert log[-NUMBER:] == ["wait"] * NUMBER


def test_memory_that_is_kept_is_nobody_elses(checkpoint, monkeypatch):
    """Beside arrays on devices a tree may have numpy arrays, which keep what they are made of."""
    path, tensors = checkpoint
    Transfers(monkeypatch)
    on_devices = abstract_of(tensors, NamedSharding(mesh_of(x=8), P("x")))
    tree = {
        name: leaf if int(name[1:]) % 2 else tensors[name]  # asks for a numpy array
        for name, leaf in on_devices.items()
    }
    budget = 4 * tensors["t0"].nbytes
    loaded = osl.load(path, tree, options=osl.ReadOptions(memory_budget_bytes=budget))
    for name, value in tensors.items():
        assert isinstance(loaded[name], jax.Array if int(name[1:]) % 2 else np.ndarray)
        assert_same_bits(np.asarray(loaded[name]), value)


def test_devices_are_fed_together(checkpoint, monkeypatch):
    """The first array of a kind is made the public way, the others in a call for all devices."""
    path, tensors = checkpoint
    put, fed = builder_module.batched_device_put(), []
    assert put is not None, "not checked with this JAX"

    def record(aval, sharding, values, devices):
        fed.append(len(devices))
        return put(aval, sharding, values, devices)

    monkeypatch.setattr(builder_module, "batched_device_put", lambda: record)
    Transfers(monkeypatch)
    osl.load(path, abstract_of(tensors, NamedSharding(mesh_of(x=8), P("x"))))
    assert fed == [8] * (NUMBER - 1)
