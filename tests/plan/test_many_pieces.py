"""Many tensors in pieces over many files: read and converted, with one plan for all alike."""

from __future__ import annotations

import json
import sys
import threading
import tracemalloc

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from many_pieces import differing, tensors_of_experts, values_of, write
from meshes import mesh_of
from programs import run_alone
from recording import recording
from sampling import every

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main

TENSORS = tensors_of_experts(layers=2, experts=4)
FILES = 8


@pytest.fixture(params=[False, True], ids=["split", "scattered"])
def folder(request, tmp_path):
    write(tmp_path / "pieces", TENSORS, FILES, scattered=request.param)
    return tmp_path / "pieces"


def abstract_pieces(mesh):
    def struct(tensor, dtype):
        spec = P("x") if tensor.shape[0] % 8 == 0 else P()
        return jax.ShapeDtypeStruct(tensor.shape, dtype, sharding=NamedSharding(mesh, spec))

    dtypes = {"U8": np.uint8, "F16": np.float16, "F32": np.float32}
    return {tensor.name: struct(tensor, dtypes[tensor.dtype]) for tensor in TENSORS}


def whole_file(path):
    return {
        name: value
        for file in sorted(path.glob("*.safetensors"))
        for name, value in safetensors.numpy.load_file(file).items()
    }


def test_all_ways_to_read_them(folder, tmp_path):
    assert not [*differing(osl.load(folder), TENSORS)]
    with recording() as storage:
        loaded = osl.load(folder, abstract_pieces(mesh_of(x=8)))
        cost = osl.plan_load(folder, abstract_pieces(mesh_of(x=8))).cost()
    assert not [*differing({name: np.asarray(v) for name, v in loaded.items()}, TENSORS)]
    ranges = storage.tensor_ranges()
    assert sum(stop - start for _, start, stop in ranges) == cost.read_bytes
    assert len(ranges) == cost.requests
    osl.convert(folder, tmp_path / "converted", format="hf")
    assert not [*differing(whole_file(tmp_path / "converted"), TENSORS)]
    osl.consolidate(folder, tmp_path / "consolidated")
    assert not [*differing(whole_file(tmp_path / "consolidated"), TENSORS)]


@pytest.mark.parametrize("call", [osl.load, osl.plan_load])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["plain", "mapped"])
def test_headers_are_fetched_together(tmp_path, call, is_mapped):
    """Each waits until all have been asked for; one after the other none would come."""
    write(tmp_path / "pieces", TENSORS, FILES)
    experts = osl.tensor("model.layers.0.mlp.experts.{e}.gate_proj.weight")
    rule = osl.rule("experts", osl.stack(experts.transpose(), over="e"))
    mapping = osl.Mapping([rule], strict=False) if is_mapped else None
    asked = threading.Barrier(FILES, timeout=60)
    with recording() as storage:
        storage.before_read = lambda file, start, stop: (
            start or (asked.wait() if file.endswith(".safetensors") else None)
        )
        call(tmp_path / "pieces", mapping=mapping)
    headers = [file for file, start, _ in storage.ranges if not start]
    assert len([file for file in headers if file.endswith(".safetensors")]) == FILES


def test_a_few_of_them(folder):
    only = "*.layers.1.mlp.experts.3.*"
    numbers = [n for n, tensor in enumerate(TENSORS) if ".layers.1.mlp.experts.3." in tensor.name]
    loaded = osl.load(folder, only=only)
    assert {name: value.tobytes() for name, value in loaded.items()} == {
        TENSORS[n].name: values_of(n, TENSORS[n]).tobytes() for n in numbers
    }


@pytest.mark.parametrize("process", [0, 5])
def test_each_process_of_the_cluster_that_saved_reads_its_own_file(tmp_path, process):
    write(tmp_path / "pieces", [t for t in TENSORS if t.shape[0] % FILES == 0], FILES)
    tensors = abstract_pieces(AbstractMesh((FILES,), ("x",)))
    split = {name: leaf for name, leaf in tensors.items() if leaf.shape[0] % FILES == 0}
    planned = osl.plan_load(tmp_path / "pieces", split, process_index=process, process_count=FILES)
    cost = planned.cost()
    assert cost.files == 1
    total = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in split.values())
    assert cost.read_bytes == cost.needed_bytes == total // FILES


def test_tensors_of_equal_pieces_share_their_geometry(folder):
    plan = osl.plan_load(folder)
    regions = [region for batch in plan.batches for region in batch.regions]
    kinds = {(tensor.shape, tensor.dtype) for tensor in TENSORS}
    layouts = {id(region.layout) for region in regions}
    assert len(regions) >= len(TENSORS)
    assert len(layouts) <= len(kinds)
    if "scattered" not in str(folder):
        assert len({id(region.read) for region in regions}) <= 2 * len(kinds)


@pytest.mark.parametrize(
    ("layers", "experts"), [(4, 64), pytest.param(61, 250, marks=pytest.mark.soak)]
)
def test_a_plan_of_whole_tensors_takes_little_memory_for_each(tmp_path, layers, experts):
    """Of 92,000 tensors in 64 files a plan keeps 0.8 kB each, and takes 3 kB in the making."""
    tensors = tensors_of_experts(layers, experts, rows=8)
    write(tmp_path / "warm", TENSORS, FILES, scattered=True)
    write(tmp_path / "pieces", tensors, 64, scattered=True)
    osl.plan_load(tmp_path / "warm")
    tracemalloc.start()
    try:
        plan = osl.plan_load(tmp_path / "pieces")
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_500 * len(tensors)
    assert peak < 4_500 * len(tensors)
    cost = plan.cost()
    assert (cost.tensors, cost.files, cost.over_read) == (len(tensors), 64, 1.0)
    assert cost.needed_bytes == sum(values_of(0, tensor).nbytes for tensor in tensors)


def test_the_estimate_of_a_cluster(folder, capsys):
    arguments = ["plan", str(folder), "--mesh", "x=8", "--hosts", "8", "--json", "-q"]
    assert main([*arguments, "--replicated", "each"]) == 0
    report = json.loads(capsys.readouterr().out)
    mesh = AbstractMesh((8,), ("x",))
    tree = abstract_pieces(mesh)
    for name, leaf in tree.items():
        if len(leaf.shape) < 2:  # vectors are not split by the rule `auto`
            sharding = NamedSharding(mesh, P())
            tree[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    for process in report["processes"]:
        plan = osl.plan_load(
            folder,
            tree,
            options=osl.ReadOptions(replicated="each"),
            process_index=process["process"],
            process_count=8,
        )
        assert process["read_bytes"] == plan.cost().read_bytes
        assert process["requests"] == plan.cost().requests


def test_a_piece_of_another_shape_is_named(folder):
    file = sorted(folder.glob("*.safetensors"))[3]
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = next(n for n, entry in header.items() if entry.get("dtype") == "U8")
    header[name]["shape"] = [1, *header[name]["shape"]]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(osl.InvalidManifestError, match="does not hold the piece") as caught:
        osl.load(folder)
    assert (caught.value.file, caught.value.tensor) == (str(file), name)
    assert str(caught.value.found).startswith("U8 [1, ")
    others = [tensor.name for tensor in TENSORS if not name.startswith(tensor.name)]
    assert set(osl.load(folder, only=others)) == set(others)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is asked of /proc")
@pytest.mark.parametrize(
    ("doing", "most_bytes"),
    every(3, [("convert", 75e6), ("plan", 50e6), ("consolidate", 75e6)]),
)
def test_memory_is_bounded(tmp_path, doing, most_bytes):
    """Of 75,000 pieces; where all headers and plans are kept it is 83 MB, a kilobyte a piece."""
    write(tmp_path / "pieces", tensors_of_experts(24, 16), 64)
    assert int(run_alone("many_pieces_peak.py", tmp_path / "pieces", doing)) < most_bytes
