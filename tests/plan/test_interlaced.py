"""Leaves that take turns in one tensor: its bytes are read once, and go to all of them."""

import ml_dtypes
import numpy as np
import pytest
from accelerators import Accelerator
from checkpoints import assert_same_bits, random_tensor, save
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from meshes import abstract_of, mesh_of
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES, TensorEntry
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.options import PROFILES
from orbax_safetensors_layout.plan import LeafRead
from orbax_safetensors_layout.plan.coalesce import requests_of
from orbax_safetensors_layout.plan.planner import RegionPlanner
from orbax_safetensors_layout.sharding import AddressableShards

SHAPES = {"small": (4, 16, 64), "grouped": (8, 64, 512), "blocks": (8, 256, 2048)}
SPECS = [P(), P("x"), P(None, "x"), P(None, None, "x"), P("x", "y"), P(None, "x", "y")]


def gate_up(transposed=False):
    """GPT-OSS: gate and up take turns along the last axis; here as three leaves with its bias."""
    tensor = osl.tensor("gate_up")
    parts = {"gate": tensor.slice(2, 0, None, 2), "up": tensor.slice(2, 1, None, 2)}
    if transposed:
        parts = {name: part.transpose(0, 2, 1) for name, part in parts.items()}
    return osl.Mapping([osl.rule(name, part) for name, part in parts.items()])


def expected(tensor, transposed=False):
    parts = {"gate": tensor[..., ::2], "up": tensor[..., 1::2]}
    return {n: p.transpose(0, 2, 1) if transposed else p for n, p in parts.items()}


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_gate_and_up_read_their_tensor_once(tmp_path, size, spec, transposed):
    tensor = random_tensor(SHAPES[size], np.float16)
    path = save(tmp_path, {"gate_up": tensor})
    mesh = mesh_of(x=4, y=2)
    leaves = expected(tensor, transposed)
    tree = abstract_of(leaves, NamedSharding(mesh, spec))
    mapping = gate_up(transposed)
    plan = osl.plan_load(path, tree, mapping=mapping)
    with recording() as storage:
        loaded = osl.load(path, tree, mapping=mapping)
    for name, value in leaves.items():
        assert_same_bits(np.asarray(loaded[name]), value)
    assert sum(b - a for _, a, b in storage.tensor_ranges()) == tensor.nbytes
    assert plan.cost().read_bytes == plan.cost().needed_bytes == tensor.nbytes


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_a_process_of_several_reads_its_part_once(tmp_path, spec):
    tensor = random_tensor(SHAPES["blocks"], np.float16)
    path = save(tmp_path, {"gate_up": tensor})
    tree = abstract_of(expected(tensor), NamedSharding(AbstractMesh((4,), ("x",)), spec))
    for process in range(4):
        plan = osl.plan_load(path, tree, mapping=gate_up(), process_index=process, process_count=4)
        assert plan.cost().read_bytes == plan.cost().needed_bytes == tensor.nbytes // 4


@pytest.mark.parametrize(("part", "reads"), [(1, 1), (4, 4)])
def test_onto_accelerators_within_the_budget(tmp_path, monkeypatch, part, reads):
    """Leaves held at once are read at once; a smaller budget costs further reads."""
    tensor = random_tensor(SHAPES["blocks"], np.float16)
    path = save(tmp_path, {"gate_up": tensor})
    accelerator = Accelerator(monkeypatch)
    leaves = expected(tensor)
    tree = abstract_of(leaves, NamedSharding(mesh_of(x=8), P(None, "x")))
    budget = tensor.nbytes // part
    options = osl.ReadOptions(memory_budget_bytes=budget)
    with recording() as storage:
        loaded = osl.load(path, tree, mapping=gate_up(), options=options)
    for name, value in leaves.items():
        assert_same_bits(np.asarray(loaded[name]), value)
    assert sum(b - a for _, a, b in storage.tensor_ranges()) <= reads * tensor.nbytes
    assert max(accelerator.sizes) <= budget


def test_an_array_does_not_keep_the_memory_of_another(tmp_path):
    tensor = random_tensor((16, 1024, 1024), np.float16)
    path = save(tmp_path, {"gate_up": tensor})
    loaded = osl.load(path, mapping=gate_up())
    owners = []
    for array in loaded.values():
        while array.base is not None and isinstance(array.base, np.ndarray):
            array = array.base
        owners.append(array)
    assert owners[0] is not owners[1]


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_leaves_of_one_tensor(tmp_path_factory, data):
    """Slices of one tensor, overlapping or not, reversed or not: each gets its own."""
    shape = data.draw(st.sampled_from([(24,), (6, 16), (3, 8, 12), (40, 600)]))
    tensor = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    path = save(tmp_path_factory.mktemp("slices"), {"t": tensor})
    rules, leaves = [], {}
    for number in range(data.draw(st.integers(1, 5))):
        expr, value = osl.tensor("t"), tensor
        for axis, extent in enumerate(shape):
            start = data.draw(st.integers(0, extent - 1))
            step = data.draw(st.sampled_from([1, 2, 3, 4, -1, -2]))
            expr = expr.slice(axis, start, None, step)
            value = value[(slice(None),) * axis + (slice(start, None, step),)]
        if data.draw(st.booleans()):
            expr, value = expr.transpose(), value.transpose()
        rules.append(osl.rule(f"leaf{number}", expr))
        leaves[f"leaf{number}"] = value
    latency = data.draw(st.sampled_from([0.0, 1e-9, 1e-5]))
    options = osl.ReadOptions(latency_seconds={"local": latency})
    loaded = osl.load(path, mapping=osl.Mapping(rules), options=options)
    for name, value in leaves.items():
        assert_same_bits(loaded[name], value)


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
@pytest.mark.parametrize("kind", ["padded", "decoded"])
def test_shards_that_are_computed_one_by_one_read_their_tensor_once(tmp_path, spec, kind):
    tensor = random_tensor((1024, 2048), np.dtype(ml_dtypes.float8_e5m2))
    path = save(tmp_path, {"t": tensor})
    expr, value = osl.tensor("t").pad(0, 0, 64), np.pad(tensor, ((0, 64), (0, 0)))
    if kind == "decoded":
        scale = np.full((8, 16), 2, np.float32)
        path = save(tmp_path, {"t": tensor, "scale": scale})
        expr = osl.dequantize_block(osl.tensor("t"), osl.tensor("scale"), dtype="float16")
        with np.errstate(all="ignore"):
            value = (tensor.astype(np.float32) * 2).astype(np.float16)
    mesh = mesh_of(x=4, y=2)
    tree = abstract_of({"leaf": value}, NamedSharding(mesh, spec))
    mapping = osl.Mapping([osl.rule("leaf", expr)])
    with recording() as storage:
        loaded = osl.load(path, tree, mapping=mapping)
    assert_same_bits(np.asarray(loaded["leaf"]), value)
    assert sum(b - a for _, a, b in storage.tensor_ranges()) <= 1.05 * tensor.nbytes


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, None, "x")], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shards_of_all_devices_are_decoded_together(tmp_path, spec, dtype):
    """Each of a stack's tensors, and its scales, is one read of all of them."""
    layers, shape = 3, (256, 384)
    values = random_tensor((layers, *shape), np.dtype(ml_dtypes.float8_e5m2))
    scales = np.arange(1, 1 + layers * 6, dtype=np.float32).reshape(layers, 2, 3)
    tensors = {f"t.{i}": values[i] for i in range(layers)}
    path = save(tmp_path, {**tensors, **{f"scale.{i}": scales[i] for i in range(layers)}})
    decoded = osl.dequantize_block(osl.tensor("t.{i}"), osl.tensor("scale.{i}"), dtype="float16")
    mapping = osl.Mapping([osl.rule("leaf", osl.stack(decoded.transpose(), over="i"))])
    with np.errstate(all="ignore"):
        expected = values.astype(np.float32) * scales.repeat(128, 1).repeat(128, 2)
        expected = expected.astype(np.float16).astype(dtype).transpose(0, 2, 1)
    tree = abstract_of({"leaf": expected}, NamedSharding(mesh_of(x=8), spec))
    assert len(osl.plan_load(path, tree, mapping=mapping).leaves) == 2 * layers
    loaded = osl.load(path, tree, mapping=mapping)
    assert_same_bits(np.asarray(loaded["leaf"]), expected)


FILLED = {
    "rows": (
        osl.tensor("t").pad(0, 0, 24, 7),
        lambda t: np.pad(t, ((0, 24), (0, 0)), constant_values=7),
    ),
    "both": (osl.tensor("t").pad(1, 8, 8), lambda t: np.pad(t, ((0, 0), (8, 8)))),
    "cast": (
        osl.tensor("t").cast("int32").pad(0, 24, 0, -1),
        lambda t: np.pad(t.astype(np.int32), ((24, 0), (0, 0)), constant_values=-1),
    ),
    "joined": (
        osl.concat([osl.fill((8, 16), 3, "float32"), osl.tensor("t").transpose()], 0),
        lambda t: np.concatenate([np.full((8, 16), 3, np.float32), t.T]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x"), P("x", "y")], ids=str)
@pytest.mark.parametrize("case", FILLED)
@pytest.mark.parametrize("on", ["cpu", "mmap", "accelerator"])
def test_filled_leaves(tmp_path, monkeypatch, case, spec, on):
    tensor = (np.arange(16 * 16) % 97).astype(np.float32).reshape(16, 16)
    path = save(tmp_path, {"t": tensor})
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    expr, reference = FILLED[case]
    if on == "accelerator":
        Accelerator(monkeypatch)
    value = reference(tensor)
    mesh = mesh_of(x=4, y=2)
    tree = abstract_of({"leaf": value}, NamedSharding(mesh, spec))
    mapping = osl.Mapping([osl.rule("leaf", expr)])
    # So small that tiles are taken apart, and nothing at all is read for some.
    small = {"memory_budget_bytes": 512, "latency_seconds": {"local": 0.0}}
    options = osl.ReadOptions(mmap=on == "mmap", **small if on == "accelerator" else {})
    with recording() as storage:
        loaded = osl.load(path, tree, mapping=mapping, options=options)
    assert_same_bits(np.asarray(loaded["leaf"]), value)
    assert sum(b - a for _, a, b in storage.tensor_ranges()) <= tensor.nbytes
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert_same_bits(osl.load(path, mapping=mapping)["leaf"], value)


def test_gate_and_up_of_mxfp4_read_their_blocks_once(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "blocks": rng.integers(0, 256, (2, 1024, 8, 16), np.uint8),
        "scales": rng.integers(120, 134, (2, 1024, 8), np.uint8),
    }
    path = save(tmp_path, tensors)
    decoded = osl.dequantize_mxfp4(osl.tensor("blocks"), osl.tensor("scales"), dtype="float32")
    whole = osl.load(path, mapping=osl.Mapping([osl.rule("all", decoded)]))["all"]
    mapping = osl.Mapping(
        [osl.rule(n, decoded.slice(1, i, None, 2)) for i, n in enumerate(("gate", "up"))]
    )
    leaves = {"gate": whole[:, ::2], "up": whole[:, 1::2]}
    tree = abstract_of(leaves, NamedSharding(mesh_of(x=8), P(None, "x")))
    with recording() as storage:
        loaded = osl.load(path, tree, mapping=mapping)
    for name, value in leaves.items():
        assert_same_bits(np.asarray(loaded[name]), value)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(b - a for _, a, b in storage.tensor_ranges()) <= 1.05 * stored


def test_copies_of_one_tensor_are_joined_as_memory_allows_in_linear_time():
    entry = TensorEntry("t", DTYPES["F32"], (8,), "f", 100, 132)
    shards = AddressableShards.private((Box((0,), (8,)),))
    planner = RegionPlanner(PROFILES["local"], 1 << 30, adopt=False)
    read = LeafRead.plain("t", entry, shards, np.dtype(np.float32))
    regions = [region for number in range(95) for region in planner.regions(number, read)]
    asked = []
    requests = [*requests_of(regions, lambda region: asked.append(region.leaf) or 3, 31)]
    assert [len(request.regions) for request in requests] == [10] * 9 + [5]
    assert len(asked) <= 2 * len(regions)
