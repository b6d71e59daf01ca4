"""The costs of all processes at once, against the plan of each."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from orbax_safetensors_layout.format import DTYPES, NewTensor, TensorEntry
from orbax_safetensors_layout.options import PROFILES, ReadOptions, WriteOptions
from orbax_safetensors_layout.plan import (
    ClusterTensor,
    LeafRead,
    LeafWrite,
    plan_cluster,
    plan_cluster_writes,
    plan_reads,
    plan_writes,
)
from orbax_safetensors_layout.sharding import MeshShape, ProcessShards

CODES = ["F32", "BF16", "U8", "F64", "F4", "F6_E2M3", "F8_E4M3"]


def spec_for(shape, grid, draw):
    """Any sharding that fits: each axis of the mesh at most once."""
    left = list(grid.axes)
    spec = []
    for extent in shape:
        names = []
        for name in draw(st.permutations(left)):
            if extent % grid.ways([*names, name]) == 0 and draw(st.booleans()):
                names.append(name)
                left.remove(name)
        spec.append(tuple(names))
    return tuple(spec[: draw(st.integers(0, len(spec)))] if draw(st.booleans()) else spec)


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    devices = math.prod(sizes)
    processes = draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    grid = MeshShape(dict(zip("xyz", sizes, strict=False)), processes)
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(
            draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 12, 24, 48, 240]), max_size=3))
        )
        code = draw(st.sampled_from(CODES))
        if math.prod(shape) * DTYPES[code].bits % 8:
            code = "U8"
        kinds.append((shape, DTYPES[code], spec_for(shape, grid, draw)))
    leaves, ends = [], {}
    for number in range(draw(st.integers(1, 12))):
        shape, dtype, spec = draw(st.sampled_from(kinds))
        file = draw(st.sampled_from(["a", "b"]))
        start = ends.get(file, 8)
        ends[file] = start + math.prod(shape) * dtype.bits // 8
        entry = TensorEntry(f"t{number}", dtype, shape, file, start, ends[file])
        leaves.append(ClusterTensor(entry, spec))
    return grid, leaves


@st.composite
def profiles(draw):
    options = ReadOptions(
        latency_seconds={"local": draw(st.sampled_from([0.0, 1e-8, 1e-7, 1e-6, 1e-5]))},
        bandwidth_bytes_per_second={"local": 1e9},
        request_bytes=draw(st.sampled_from([None, 64, 1000])),
    )
    return options.profile("local"), draw(st.sampled_from([1, 500, 2**31]))


def each_by_itself(grid, leaves, profile, budget):
    """The cost of each process from its own plan, whose boxes JAX's shardings say."""
    mesh = AbstractMesh(tuple(grid.axes.values()), tuple(grid.axes))
    for process in range(grid.processes):
        shards = ProcessShards(process, grid.processes)
        reads = []
        for entry, spec in leaves:
            sharding = NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))
            local = shards.boxes(sharding, entry.shape)
            reads.append(LeafRead.plain(entry.name, entry, local, entry.dtype.numpy))
        yield plan_reads(reads, profile=profile, memory_budget_bytes=budget, adopt=False).cost()


@settings(max_examples=150, deadline=None)
@given(cases(), profiles())
def test_every_process_costs_what_its_own_plan_says(case, costs):
    (grid, leaves), (profile, budget) = case, costs
    cluster = plan_cluster(leaves, grid, profile=profile, memory_budget_bytes=budget)
    process_costs = [cluster.cost(process) for process in range(grid.processes)]
    expected = [*each_by_itself(grid, leaves, profile, budget)]
    # A process that holds only empty boxes is told of no tensors.
    assert process_costs == expected


def test_replicas_are_worked_out_once():
    grid = MeshShape({"data": 16, "fsdp": 8}, 32)
    entry = TensorEntry("w", DTYPES["F32"], (64, 64), "a", 8, 8 + 64 * 64 * 4)
    cluster = plan_cluster(
        [ClusterTensor(entry, (("fsdp",),))],
        grid,
        profile=PROFILES["local"],
        memory_budget_bytes=2**31,
    )
    assert len(cluster.costs) == 2  # a process has one half of a replica, or the other
    assert cluster.cost(0) == cluster.cost(30)
    assert sum(cluster.cost(p).needed_bytes for p in range(32)) == 16 * entry.nbytes


@pytest.mark.parametrize("process", [0, 17, 1023])
def test_a_large_mesh(process):
    grid = MeshShape({"fsdp": 1024, "tensor": 4}, 1024)
    shapes = [(4096, 256), (2048, 16), (1024,), (4, 4096, 64)]
    specs = [
        (("fsdp",), ("tensor",)),
        (("tensor",),),
        (("fsdp",),),
        (("tensor",), ("fsdp",)),
    ]
    leaves, at = [], 8
    for number in range(200):
        shape = shapes[number % 4]
        stop = at + math.prod(shape) * 2
        entry = TensorEntry(f"t{number}", DTYPES["BF16"], shape, "a", at, stop)
        leaves.append(ClusterTensor(entry, specs[number % 4]))
        at = stop
    profile = PROFILES["local"]
    cluster = plan_cluster(leaves, grid, profile=profile, memory_budget_bytes=2**31)
    mesh = AbstractMesh((1024, 4), ("fsdp", "tensor"))
    shards = ProcessShards(process, 1024)
    reads = []
    for entry, spec in leaves:
        sharding = NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))
        local = shards.boxes(sharding, entry.shape)
        reads.append(LeafRead.plain(entry.name, entry, local, np.dtype(jax.numpy.bfloat16)))
    expected = plan_reads(reads, profile=profile, memory_budget_bytes=2**31, adopt=False).cost()
    assert cluster.cost(process) == expected


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["hf", "sharded"]), st.sampled_from([1, 300, 10**9]))
def test_every_process_writes_what_its_own_plan_says(case, layout, max_file_bytes):
    grid, leaves = case
    options = WriteOptions(layout=layout, max_file_bytes=max_file_bytes)
    planned = plan_cluster_writes(leaves, grid, options)
    mesh = AbstractMesh(tuple(grid.axes.values()), tuple(grid.axes))
    for process in range(grid.processes):
        shards = ProcessShards(process, grid.processes)
        held = {}
        writes = []
        for entry, spec in leaves:
            if (entry.shape, spec) not in held:
                sharding = NamedSharding(mesh, PartitionSpec(*(names or None for names in spec)))
                held[entry.shape, spec] = shards.held(sharding, entry.shape)
            tensor = NewTensor(entry.name, entry.dtype, entry.shape)
            writes.append(LeafWrite(tensor, entry.dtype.numpy, held[entry.shape, spec]))
        plan = plan_writes(
            writes, options=options, process_index=process, process_count=grid.processes
        )
        cost = plan.cost()
        header = 0 if plan.pieces is None else len(plan.pieces.layout.header)
        assert planned[process].written_bytes == cost.written_bytes - header
        assert planned[process].read_bytes == cost.read_bytes
        assert planned[process].needed_bytes == cost.needed_bytes
        assert planned[process].files == cost.files
