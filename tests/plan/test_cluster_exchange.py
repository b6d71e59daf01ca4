"""What a cluster reads once, for all processes at once, against the plan of each."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from jax_versions import enable_x64
from many_pieces import Stored, write_holes

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import estimate
from orbax_safetensors_layout.options import PROFILES
from orbax_safetensors_layout.sharding import MeshShape, parse_rules

LATENCY, RATE = 0.1, 1e6
"""Of a storage whose gaps of 100 kB are read through."""
SPECS = ["fsdp,tensor", "tensor,fsdp", "-,fsdp", "-,fsdp+tensor", "fsdp", "replicated", "-,tensor"]
DTYPES = [np.float32, np.uint8, np.float64]


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from([(4, 1), (2, 2), (4, 2), (2, 4)]))
    devices = math.prod(sizes)
    hosts = draw(st.sampled_from([n for n in (2, 4, 8) if devices % n == 0]))
    tensors = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.sampled_from([(8, 16), (1024, 1536), (64, 8), (520, 1024)]))
        dtype = draw(st.sampled_from(DTYPES))
        spec = draw(st.sampled_from(SPECS))
        for copy in range(draw(st.integers(1, 3))):
            tensors[f"t{number}.{copy}"] = np.zeros(shape, dtype), spec
    costs = draw(st.sampled_from([1e-5, 0.1])), draw(st.sampled_from([1e3, 1e7, 1e9, 1e12]))
    return MeshShape(dict(zip(("fsdp", "tensor"), sizes, strict=True)), hosts), tensors, costs


@settings(max_examples=60, deadline=None)
@given(case=cases(), replicated=st.sampled_from(["auto", "read_once"]))
def test_every_process_reads_and_exchanges_what_its_own_plan_says(
    tmp_path_factory, case, replicated
):
    mesh, tensors, (latency, rate) = case
    folder = tmp_path_factory.mktemp("once")
    values = {name: values for name, (values, _) in tensors.items()}
    for part in range(2):
        names = [*values][part::2]
        if names:
            of_part = {name: values[name] for name in names}
            safetensors.numpy.save_file(of_part, folder / f"model-{part}.safetensors")
    options = osl.ReadOptions(
        replicated=replicated,
        latency_seconds={"local": latency},
        bandwidth_bytes_per_second={"local": rate},
    )
    rules = parse_rules([f"'{name}' = {spec}" for name, (_, spec) in tensors.items()])
    of_cluster = estimate(folder, mesh, rules, options=options)
    abstract_mesh = AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes))
    tree = {}
    for entry, spec in of_cluster.leaves:
        parts, like = P(*(names or None for names in spec)), values[entry.name]
        sharding = NamedSharding(abstract_mesh, parts)
        tree[entry.name] = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
    with enable_x64(True):
        for process, cost in enumerate(of_cluster.costs):
            expected = osl.plan_load(
                folder,
                tree,
                options=options,
                process_index=process,
                process_count=mesh.processes,
            ).cost()
            assert cost.tensors == expected.tensors
            assert cost.needed_bytes == expected.needed_bytes
            assert cost.exchanged_bytes == expected.exchanged_bytes
            assert cost.gathered_bytes == expected.gathered_bytes
            assert cost.exchange_rounds == expected.exchange_rounds
            assert cost.exchange_programs == expected.exchange_programs
            assert cost.files == expected.files
            if replicated == "auto":
                assert cost.read_bytes == expected.read_bytes
            assert (cost.requests > 0) == (expected.requests > 0)  # they are estimates


@pytest.mark.parametrize("spec", [P(None, "x"), P("data", "x")], ids=str)
@pytest.mark.parametrize("part", [1, 8, 64])
def test_columns_of_a_host_that_do_not_fit_the_budget_together_are_read_once(tmp_path, spec, part):
    """Its devices read rows instead, and exchange columns; where they fit, no further reads."""
    values = np.zeros((1024, 4096), np.float32)
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"t": values}, file)
    sharding = NamedSharding(AbstractMesh((4, 4), ("data", "x")), spec)
    tree = {"t": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
    options = osl.ReadOptions(
        memory_budget_bytes=values.nbytes // part,
        latency_seconds={"local": LATENCY},
        bandwidth_bytes_per_second={"local": RATE},
    )
    costs = [
        osl.plan_load(file, tree, options=options, process_index=n, process_count=4).cost()
        for n in range(4)
    ]
    assert sum(cost.read_bytes for cost in costs) == values.nbytes
    assert max(cost.read_bytes for cost in costs) == values.nbytes // 4
    shared = spec == P(None, "x")
    assert all(cost.exchanged_bytes > 0 for cost in costs) == (shared or part > 4)


@pytest.mark.parametrize("replicated", ["auto", "read_once"])
def test_leaves_that_take_no_tensor_are_planned_beside_others(tmp_path, replicated):
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"t": np.zeros((8, 4), np.float32)}, file)
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), P())
    tree = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
        for name, shape in {"t": (8, 4), "ones": (3,)}.items()
    }
    rules = [osl.rule("t", osl.tensor("t")), osl.rule("ones", osl.fill((3,), 1, "float32"))]
    options = osl.ReadOptions(
        replicated=replicated,
        bandwidth_bytes_per_second={"local": 1.0},
    )
    costs = [
        osl.plan_load(
            file,
            tree,
            mapping=osl.Mapping(rules),
            options=options,
            process_index=process,
            process_count=2,
        ).cost()
        for process in range(2)
    ]
    assert sum(cost.read_bytes for cost in costs) == 128


def test_columns_that_share_a_word_are_read_once(tmp_path):
    """Eight integers of 4 bits in 32: neighbours in a device's columns are at the same place."""
    weight = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    options = osl.WriteOptions(quantize=osl.Quantization("int4"))
    osl.save(tmp_path / "q", {"up_proj.weight": weight}, options=options)
    mapping = osl.dequantized(tmp_path / "q")
    sharding = NamedSharding(AbstractMesh((64,), ("x",)), P(None, "x"))  # four columns of each
    tree = {"up_proj.weight": jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16, sharding=sharding)}
    options = osl.ReadOptions(replicated="read_once")
    read = 0
    for process in range(16):
        plan = osl.plan_load(
            tmp_path / "q",
            tree,
            mapping=mapping,
            options=options,
            process_index=process,
            process_count=16,
        )
        read += plan.cost().read_bytes
    tensors = osl.metadata(tmp_path / "q").items()
    assert read == sum(t.nbytes for name, t in tensors if not name.endswith("_shape"))


def _estimated(file, *, hosts=4, rate=RATE, replicated="auto"):
    options = osl.ReadOptions(
        replicated=replicated,
        latency_seconds={"local": LATENCY},
        bandwidth_bytes_per_second={"local": rate},
    )
    return estimate(
        file, MeshShape({"x": hosts}, hosts), parse_rules(["'.*' = replicated"]), options=options
    )


def test_the_time_counts_what_is_gathered_rounds_and_programs(tmp_path):
    """A large tensor and small ones: a round each, of a program each."""
    values = np.zeros((2048, 1024), np.float32)
    small = {f"s{n}": np.zeros((64, 1024), np.float32) for n in range(5)}
    safetensors.numpy.save_file({"t": values, **small}, tmp_path / "m.safetensors")
    of_all = _estimated(tmp_path / "m.safetensors")
    cost = of_all.costs[0]
    assert (cost.exchange_rounds, cost.exchange_programs) == (2, 2)
    needed = values.nbytes + sum(value.nbytes for value in small.values())
    assert needed <= cost.gathered_bytes < 1.2 * needed
    assert cost.exchanged_bytes == cost.gathered_bytes * 3 // 4
    seconds, rate = of_all.seconds()[0], of_all.rate
    reads = cost.requests * LATENCY / of_all.profile.streams + cost.read_bytes / RATE
    gathers = cost.gathered_bytes / 3e9 + 2 * 0.002
    assert rate.exchange == (3e9, 0.002, 0.2)
    assert seconds == pytest.approx(max(reads, 2 * 0.2) + gathers)  # compiled while it is read


@pytest.mark.parametrize("rate", [1e6, 1e7, 3e7, 1e8, 1e9])
def test_the_choice_is_what_the_estimated_times_say(tmp_path, rate):
    values = np.zeros((2048, 1024), np.float32)
    safetensors.numpy.save_file({"t": values}, tmp_path / "m.safetensors")
    auto, *fixed = (
        max(_estimated(tmp_path / "m.safetensors", rate=rate, replicated=how).seconds())
        for how in ("auto", "each", "read_once")
    )
    assert auto <= 1.03 * min(fixed)


@st.composite
def loads(draw):
    """Tensors, and rates at which programs take as long to compile as some of them to be read."""
    fsdp, hosts = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([2, 4]))
    mesh = MeshShape({"fsdp": fsdp, "tensor": 2}, hosts)
    shapes = [(1024, 1536), (4096, 512), (512, 8192), (64, 8), (2048, 2048)]
    tensors, specs = [], {}
    for number in range(draw(st.integers(2, 4))):
        shape, spec = draw(st.sampled_from(shapes)), draw(st.sampled_from(SPECS))
        for copy in range(draw(st.integers(1, 4))):
            dtype = draw(st.sampled_from(["F32", "U8"]))
            tensors.append(Stored(f"t{number}.{copy}", shape, dtype))
            specs[f"t{number}.{copy}"] = spec
    rates = {
        "latency_seconds": 1e-5,
        "bandwidth_bytes_per_second": draw(st.sampled_from([1e7, 2e7, 5e7, 1e9])),
        "shared_bandwidth_bytes_per_second": draw(st.sampled_from([1e9, 25e9])),
    }
    options = {name: {"local": rate} for name, rate in rates.items()}
    rules = parse_rules([f"'{name}' = {spec}" for name, spec in specs.items()])
    return mesh, tensors, rules, options


@settings(max_examples=150, deadline=None)
@given(case=loads())
def test_auto_takes_hardly_longer_than_the_better_of_the_others(tmp_path_factory, case):
    """Programs are compiled while all tensors are read, not only those that need them."""
    mesh, tensors, rules, options = case
    file = tmp_path_factory.mktemp("auto") / "model.safetensors"
    write_holes(file, tensors)
    auto, *fixed = (
        max(estimate(file, mesh, rules, options=of_load).seconds())
        for how in ("auto", "each", "read_once")
        for of_load in [osl.ReadOptions(replicated=how, **options)]
    )
    assert auto <= 1.05 * min(fixed) + 1e-3


def _of_columns(tmp_path, mesh, spec, shape, options):
    """The plan of the first of 4 processes that load 8 matrices."""
    write_holes(tmp_path / "m.safetensors", [Stored(f"t{n}", shape, "F32") for n in range(8)])
    sharding = NamedSharding(AbstractMesh(mesh, ("data", "x")), spec)
    leaf = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
    tree = {f"t{n}": leaf for n in range(8)}
    file = tmp_path / "m.safetensors"
    return osl.plan_load(file, tree, options=options, process_index=0, process_count=4)


@pytest.mark.parametrize("mib", [32, 64, 128, 256, 512, 2048])
def test_rows_that_a_host_reads_again_for_each_of_its_columns_count(tmp_path, mib):
    """Of the 4 columns that each host has, as others do, few fit a budget together."""
    auto, *fixed = (
        _of_columns(
            tmp_path,
            (16, 4),
            P(None, "x"),
            (8192, 8192),
            osl.ReadOptions(
                replicated=how,
                memory_budget_bytes=mib << 20,
                latency_seconds={"local": 0.03},
                bandwidth_bytes_per_second={"local": 1e9},
            ),
        ).seconds()
        for how in ("auto", "each", "read_once")
    )
    assert auto <= 1.05 * min(fixed)


@pytest.mark.parametrize("mib", [1, 4, 16, 64])
@pytest.mark.parametrize("latency", [0.001, 0.003, 0.01])
@pytest.mark.parametrize("rate", [1e8, 1e9, 1.4e9, 3e9])
def test_hosts_with_other_cpus_decide_the_same(tmp_path, monkeypatch, mib, latency, rate):
    local, costs = PROFILES["local"], []
    options = osl.ReadOptions(
        memory_budget_bytes=mib << 20,
        latency_seconds={"local": latency},
        bandwidth_bytes_per_second={"local": rate},
    )
    for concurrency in (8, 32):  # of 2 CPUs, and 64
        profile = dataclasses.replace(local, concurrency=concurrency)
        monkeypatch.setitem(PROFILES, "local", profile)
        plan = _of_columns(tmp_path, (1, 4), P(None, "x"), (2048, 2048), options)
        assert plan.profile.concurrency == concurrency
        costs.append(plan.exchange)
    assert costs[0] == costs[1]
