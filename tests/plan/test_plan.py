"""Plans of clusters that one does not have, against those of devices that one has."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import save
from hypothesis import given, strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from meshes import mesh_of
from random_trees import MESHES, specs
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.sharding import ProcessShards, box_of


@given(st.data())
def test_an_abstract_mesh_gives_the_boxes_of_a_concrete_one(data):
    axes = data.draw(st.sampled_from(MESHES))
    rank = data.draw(st.integers(0, 4))
    spec = data.draw(specs(axes, rank))
    ways = [math.prod(axes[n] for n in (p or ())) for p in spec]
    shape = tuple(w * data.draw(st.integers(1, 3)) for w in ways)
    mesh = mesh_of(**axes)
    abstract = NamedSharding(AbstractMesh(tuple(axes.values()), tuple(axes)), spec)
    concrete = NamedSharding(mesh, spec)
    assert set(ProcessShards(0, 1).boxes(abstract, shape).boxes) == set(
        ProcessShards().boxes(concrete, shape).boxes
    )
    # Blocks of devices in row-major order of the mesh are the processes.
    count = data.draw(st.sampled_from([1, 2, 4, 8]))
    index_map = concrete.devices_indices_map(shape)
    in_order = [box_of(index_map[device], shape) for device in mesh.devices.flat]
    per = 8 // count
    for process in range(count):
        local = ProcessShards(process, count).boxes(abstract, shape)
        devices_of_process = in_order[process * per : (process + 1) * per]
        others = in_order[: process * per] + in_order[(process + 1) * per :]
        assert set(local.boxes) == set(devices_of_process)
        assert [box in others for box in local.boxes] == list(local.shared)


def test_costs_add_up_over_processes(tmp_path):
    tensors = {"w": np.zeros((64, 32), np.float32), "b": np.zeros(32, np.float32)}
    path = save(tmp_path, tensors)
    mesh = AbstractMesh((8, 2), ("fsdp", "tensor"))

    def leaf(shape, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    tree = {"w": leaf((64, 32), "fsdp", "tensor"), "b": leaf((32,))}
    costs = [osl.plan_load(path, tree, process_index=p, process_count=4).cost() for p in range(4)]
    assert [c.needed_bytes for c in costs] == [64 * 32 + 128] * 4
    total = sum(costs, osl.Cost())
    assert total.needed_bytes == 64 * 32 * 4 + 4 * 128
    assert (total.tensors, total.files, total.over_read) == (8, 4, 1.0)


def test_the_time_of_a_share_and_what_it_is_estimated_by(tmp_path):
    values = np.zeros((2048, 1024), np.float32)
    path = save(tmp_path, {"w": values})
    options = osl.ReadOptions(
        latency_seconds={"local": 0.1}, bandwidth_bytes_per_second={"local": 1e6}, concurrency=4
    )
    sharding = NamedSharding(AbstractMesh((4,), ("x",)), PartitionSpec())
    leaf = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
    texts = []
    for tree in (None, {"w": leaf}):
        plan = osl.plan_load(path, tree, options=options, process_index=1, process_count=4)
        cost = plan.cost()
        reads = cost.requests * 0.1 / 4
        for rate, arguments in ((1e6, ()), (1e8, (1e8,))):
            gathers = 3e9 if tree else math.inf
            least = reads + cost.read_bytes / rate + cost.exchanged_bytes / gathers
            assert least <= plan.seconds(*arguments) < least + 1
        texts.append(str(plan).splitlines()[-1])
    assert texts[0].endswith(": 100 ms a request, 4 at once, 1.00 MB/s a host")
    assert "; exchange 3.00 GB/s gathered a host, 2 ms a round, 200 ms a program" in texts[1]


def test_processes_must_divide_the_devices(tmp_path):
    path = save(tmp_path, {"w": np.zeros(8, np.float32)})
    sharding = NamedSharding(AbstractMesh((8,), ("x",)), PartitionSpec("x"))
    leaf = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)
    with pytest.raises(osl.MismatchError, match="3 processes do not divide 8 devices"):
        osl.plan_load(path, {"w": leaf}, process_count=3)


def deepseek():
    """The index that `benchmarks/plan.py` makes: sparse files with real headers."""
    path = Path(__file__).parents[2] / "benchmarks" / "deepseek.py"
    spec = importlib.util.spec_from_file_location("deepseek", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_deepseek_sized_index_is_planned_from_its_headers(tmp_path):
    """Its time and memory are measured by `benchmarks/plan.py`; here the numbers must be right."""
    deepseek().make_deepseek_index(tmp_path)
    tensors = osl.metadata(tmp_path)
    assert len(tensors) == 91_991
    mesh = AbstractMesh((128, 8), ("fsdp", "tensor"))
    by_shape: dict[tuple[int, ...], NamedSharding] = {}
    tree = {}
    for name, tensor in tensors.items():
        if tensor.shape not in by_shape:
            last = tensor.shape[-1]
            axes = next(a for a in (("fsdp", "tensor"), "fsdp", "tensor", None) if divides(last, a))
            spec = PartitionSpec(*[None] * (len(tensor.shape) - 1), axes)
            by_shape[tensor.shape] = NamedSharding(mesh, spec)
        tree[name] = jax.ShapeDtypeStruct(
            tensor.shape, tensor.dtype, sharding=by_shape[tensor.shape]
        )
    options = osl.ReadOptions(replicated="each")
    plan = osl.plan_load(tmp_path, tree, options=options, process_index=5, process_count=128)
    expected = 0
    for tensor in tensors.values():
        axes = by_shape[tensor.shape].spec[-1]
        # Process 5 holds one `fsdp` row: one of 128 parts where that axis splits the tensor.
        expected += tensor.nbytes // (128 if axes and "fsdp" in axes else 1)
    cost = plan.cost()
    assert cost.needed_bytes == expected
    assert cost.files == 163
    assert cost.tensors == len(tensors)


def divides(extent: int, axes) -> bool:
    sizes = {"fsdp": 128, "tensor": 8}
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return extent % math.prod(sizes[name] for name in names) == 0


def test_there_must_be_such_a_process(tmp_path):
    path = save(tmp_path, {"w": np.zeros(8, np.float32)})
    with pytest.raises(
        ValueError, match=r"process_index must be an integer below process_count=2.*not 7"
    ):
        osl.plan_load(path, {"w": np.zeros(8, np.float32)}, process_index=7, process_count=2)
    for wrong in ({"process_index": "0"}, {"process_count": "1"}, {"process_count": 1.0}):
        with pytest.raises(ValueError, match="must be an integer below process_count"):
            osl.plan_load(path, {"w": np.zeros(8, np.float32)}, **wrong)


def test_an_unconstrained_dimension_is_not_split(tmp_path):
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED, "x"))
    (box,) = ProcessShards(1, 8).boxes(sharding, (4, 16)).boxes
    assert box.shape == (4, 2)


def test_planned_requests_are_those_that_are_made(tmp_path):
    """Also where rows are longer than a staging buffer."""
    shape = (5, 3 << 20)
    path = save(tmp_path, {"t": np.zeros(shape, np.uint8)})
    mesh = mesh_of(x=8)
    for spec, options in (
        ((None, "x"), osl.ReadOptions()),
        ((None, "x"), osl.ReadOptions(request_bytes=100_000)),
        ((), osl.ReadOptions(request_bytes=1 << 20)),
    ):
        leaf = jax.ShapeDtypeStruct(
            shape, np.uint8, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        with recording() as storage:
            osl.load(path, {"t": leaf}, options=options)
        cost = osl.plan_load(path, {"t": leaf}, options=options).cost()
        assert cost.requests == len(storage.tensor_ranges())
        assert cost.read_bytes == sum(b - a for _, a, b in storage.tensor_ranges()) == 15 << 20
        if spec and options.request_bytes is None:
            assert cost.requests <= 2 * 15, "a block takes several shards of a long row"


def test_a_concrete_mesh_is_planned_for_the_processes_that_there_are(tmp_path):
    path = save(tmp_path, {"w": np.zeros(8, np.float32)})
    sharding = NamedSharding(mesh_of(x=8), PartitionSpec("x"))
    leaf = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)
    with pytest.raises(osl.MismatchError, match="takes an AbstractMesh"):
        osl.plan_load(path, {"w": leaf}, process_index=3, process_count=8)


def test_a_small_budget_does_not_make_tiny_requests(tmp_path):
    path = save(tmp_path, {"w": np.zeros(200_000, np.uint8)})
    assert osl.plan_load(path, options=osl.ReadOptions(memory_budget_bytes=1)).cost().requests <= 4
