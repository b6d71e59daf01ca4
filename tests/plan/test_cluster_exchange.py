"""What a cluster reads once, for all processes at once, against the plan of each."""

import math

import jax
import numpy as np
import safetensors.numpy
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax_versions import enable_x64

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import estimate
from orbax_safetensors_layout.sharding import MeshShape, parse_rules

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
    file = tmp_path_factory.mktemp("once") / "model.safetensors"
    safetensors.numpy.save_file({name: values for name, (values, _) in tensors.items()}, file)
    options = osl.ReadOptions(
        replicated=replicated,
        latency_seconds={"local": latency},
        bandwidth_bytes_per_second={"local": rate},
    )
    rules = parse_rules([f"'{name}' = {spec}" for name, (_, spec) in tensors.items()])
    of_cluster = estimate(file, mesh, rules, options=options)
    abstract_mesh = AbstractMesh(tuple(mesh.axes.values()), tuple(mesh.axes))
    tree = {}
    for placed, (name, (values, _)) in zip(of_cluster.placed, tensors.items(), strict=True):
        spec = PartitionSpec(*(names or None for names in placed.spec))
        sharding = NamedSharding(abstract_mesh, spec)
        tree[name] = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
    with enable_x64(True):
        for process, cost in enumerate(of_cluster.costs):
            expected = osl.plan_load(
                file,
                tree,
                options=options,
                process_index=process,
                process_count=mesh.processes,
            ).cost()
            assert cost.tensors == expected.tensors
            assert cost.needed_bytes == expected.needed_bytes
            assert cost.exchanged_bytes == expected.exchanged_bytes
            if replicated == "auto":
                assert cost.read_bytes == expected.read_bytes
            assert (cost.requests > 0) == (expected.requests > 0)  # they are estimates
