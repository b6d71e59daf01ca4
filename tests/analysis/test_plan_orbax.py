"""`plan` of what Orbax saved: chunks counted one by one, and what a real restore reads."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import mesh_of, place
from orbax_calls import save_pytree
from programs import run_processes

from orbax_safetensors_layout.analysis import estimate
from orbax_safetensors_layout.cli import main
from orbax_safetensors_layout.plan import ChunkedArray, plan_chunks
from orbax_safetensors_layout.sharding import MeshShape, ShardingRule, ShardingRules

AXES = {"x": 4, "y": 2}
SPECS = [(), (("x",),), ((), ("x",)), (("y",), ("x",)), (("x", "y"),), ((), ("y", "x"))]


def chunks_of(shape, chunk, sharding, hosts):
    """For each host the chunks of its distinct shards, and the elements that it has."""
    grid = [-(-n // step) for n, step in zip(shape, chunk, strict=True)]
    indices = np.indices(shape)
    cells = [along // step for along, step in zip(indices, chunk, strict=True)]
    number = np.ravel_multi_index(cells, grid) if grid else np.zeros((), int)
    index_of = sharding.devices_indices_map(shape)
    devices = np.array(jax.devices()).reshape(hosts, -1)
    counts = []
    for own in devices:
        shards = {str(index_of[device]): number[index_of[device]] for device in own}.values()
        chunks = sum(np.unique(shard).size for shard in shards)
        counts.append((chunks, sum(shard.size for shard in shards)))
    return counts


@given(st.data())
def test_chunks_are_counted_one_by_one(data):
    spec = data.draw(st.sampled_from(SPECS))
    shape = tuple(data.draw(st.sampled_from([8, 16, 24, 40])) for _ in range(max(len(spec), 1)))
    shape += tuple(data.draw(st.lists(st.integers(1, 5), max_size=1)))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    hosts = data.draw(st.sampled_from([1, 2, 4, 8]))
    rule = ShardingRule(".*", spec)
    mesh = MeshShape(AXES, hosts)
    arrays = [ChunkedArray(name, shape, chunk, "F32", 4) for name in "ab"]
    placer = ShardingRules([rule], mesh)
    shares = plan_chunks(arrays, [placer.place(name, shape) for name in "ab"], mesh, 3)
    sharding = NamedSharding(mesh_of(**AXES), P(*(part or None for part in spec)))
    counted = chunks_of(shape, chunk, sharding, hosts)
    for cost, held, (chunks, elements) in zip(
        shares.costs, shares.process_parameters, counted, strict=True
    ):
        assert cost.read_bytes == 2 * 4 * chunks * math.prod(chunk)
        assert cost.requests == 2 * chunks
        assert cost.files == min(3, 2 * chunks)
        assert cost.needed_bytes == 2 * 4 * elements
        assert held == 2 * elements
        assert cost.tensors == 2
    worst = max(chunks for chunks, _ in counted)
    assert {leaf.requests for leaf in shares.leaf_costs} == {worst}


def test_arrays_without_dimensions_or_elements():
    mesh = MeshShape(AXES, 4)
    arrays = [ChunkedArray("step", (), (), "I32", 4), ChunkedArray("none", (0, 8), (1, 8), "U8", 1)]
    placed = ShardingRules([], mesh)
    shares = plan_chunks(arrays, [placed.place(a.name, a.shape) for a in arrays], mesh, None)
    assert {(c.tensors, c.needed_bytes, c.read_bytes, c.files) for c in shares.costs} == {
        (1, 4, 4, 1)
    }


TREE = {
    "rows": (np.arange(64 * 48, dtype=np.float32).reshape(64, 48), P(("x", "y"))),
    "columns": (np.arange(64 * 64, dtype=np.int32).reshape(64, 64), P(None, ("x", "y"))),
    "blocks": (np.arange(32 * 32, dtype=np.float32).reshape(32, 32), P("x", "y")),
    "whole": (np.arange(512, dtype=np.float16), P()),
}
RULES = ["'rows|columns' = x", "'blocks' = -,x", "'.*' = replicated"]


def saved(folder, **options):
    tree = {name: place(value, spec) for name, (value, spec) in TREE.items()}
    return save_pytree(folder / "saved", tree, **options)


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_real_restore_reads_what_was_planned(tmp_path, hosts):
    """TensorStore's own count, of files that are chunks; their metadata come on top."""
    path = saved(tmp_path, use_ocdbt=False, use_compression=False)
    mesh = MeshShape(AXES, hosts)
    rules = [ShardingRule.parse(rule) for rule in RULES]
    planned = estimate(path, mesh, rules)
    placer = ShardingRules(rules, mesh)
    specs = {
        name: (value.shape, value.dtype.name, placer.place(name, value.shape).spec)
        for name, (value, _) in TREE.items()
    }
    measured = run_processes(
        "plan_orbax_restore.py",
        processes=hosts,
        devices=8 // hosts,
        path=str(path),
        mesh=AXES,
        specs=specs,
    )
    metadata = sum(file.stat().st_size for file in path.rglob(".zarray"))
    for cost, read in zip(planned.costs, measured, strict=True):
        assert cost.needed_bytes < read <= cost.read_bytes + metadata
        if hosts == 4:  # with one shard of each split array; else some reads are shared
            assert read == cost.read_bytes + metadata
    assert sum(cost.read_bytes for cost in planned.costs) > planned.checkpoint_bytes


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_the_command_line(tmp_path, capsys, use_ocdbt):
    path = saved(tmp_path, use_ocdbt=use_ocdbt)
    rules = [part for rule in RULES for part in ("--spec", rule)]
    arguments = ["plan", str(path), "--mesh", "x=4,y=2", "--hosts", "4", *rules]
    assert main([*arguments, "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    nbytes = {name: value.nbytes for name, (value, _) in TREE.items()}
    # A host's rows of `columns` are in all chunks; its columns of `blocks` are in half of them.
    read = nbytes["rows"] // 4 + nbytes["columns"] + nbytes["blocks"] // 2 + nbytes["whole"]
    needed = sum(nbytes[name] for name in ("rows", "columns", "blocks")) // 4 + nbytes["whole"]
    assert [host["read_bytes"] for host in report["processes"]] == [read] * 4
    assert [host["needed_bytes"] for host in report["processes"]] == [needed] * 4
    assert all(host["requests"] > 2 + 8 + 4 for host in report["processes"])
    assert report["checkpoint_bytes"] == sum(nbytes.values())
    assert report["complete"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "chunks   read whole, for each shard" in out
    assert "Chunks are read whole" in out
    assert "over-read" in out


def test_a_step_of_a_manager_and_what_cannot_be_planned(tmp_path, capsys):
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones((8, 8), np.float32)}))
    step = str(tmp_path / "3")
    assert main(["plan", step, "--mesh", "x=2", "--hosts", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["read_bytes"] == 2 * 256
    for more in (["--abstract", "builtins:dict"], ["--save"], ["--plot", str(tmp_path / "x.png")]):
        assert main(["plan", step, "--mesh", "x=2", *more]) == 2
        assert "Traceback" not in capsys.readouterr().err
