"""Plans of the largest published models: real headers and holes, on clusters of any size."""

import json
import sys
from pathlib import Path

import pytest
from programs import run_alone
from recording import RecordingStorage

from orbax_safetensors_layout.analysis import estimate
from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.options import PROFILES, ReadOptions
from orbax_safetensors_layout.plan import LeafRead, plan_reads
from orbax_safetensors_layout.reading.plan_reader import PlanReader
from orbax_safetensors_layout.sharding import AddressableShards, MeshShape, Partition, ShardingRule

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MOST_BYTES = 500e6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            run_alone("plan_large_make.py", BENCHMARKS, name, folders[name])
        return folders[name]

    return make


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is asked of /proc")
@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("deepseek", 1024),
        ("llama", 64),
        *(
            pytest.param(name, hosts, marks=pytest.mark.soak)
            for name, hosts in [
                ("deepseek", 64),
                ("deepseek", 256),
                ("llama", 256),
                ("llama", 1024),
            ]
        ),
    ],
)
def test_in_little_memory_and_without_jax(model, name, hosts):
    arguments = ["--mesh", f"fsdp={hosts},tensor=4", "--hosts", hosts]
    out = run_alone("plan_large.py", model(name), *arguments)
    peak, has_jax = json.loads(out.splitlines()[-1])
    assert peak < MOST_BYTES
    assert not has_jax
    assert f"{hosts * 4:,} devices on {hosts:,} hosts with 4 each" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "process"),
    [
        ("deepseek, 8 layers", 517),  # of 62: all kinds of tensors
        pytest.param("deepseek", 517, marks=pytest.mark.soak),
        pytest.param("llama", 3, marks=pytest.mark.soak),
    ],
)
def test_the_share_of_one_process_is_what_it_reads(model, name, process):
    grid = MeshShape({"fsdp": 1024, "tensor": 4}, 1024)
    rules = [ShardingRule.parse("'.*' = auto")]
    estimated = estimate(model(name), grid, rules, options=ReadOptions(replicated="each"))
    profile = PROFILES["local"]
    storage = RecordingStorage()
    with Catalog.open(model(name), storage=storage) as catalog:
        leaves = []
        local = {}
        for leaf in estimated.cluster.leaves:
            entry, spec = leaf
            if (entry.shape, spec) not in local:
                local[entry.shape, spec] = boxes_of(grid, spec, entry.shape, process)
            boxes = local[entry.shape, spec]
            leaves.append(LeafRead.plain(entry.name, entry, boxes, entry.dtype.numpy))
        plan = plan_reads(
            leaves,
            profile=profile,
            memory_budget_bytes=ReadOptions().memory_budget_bytes,
            adopt=False,
        )
        assert catalog.files
        storage.ranges.clear()
        held = [0]

        def deliver(number, boxes, parts):
            held[0] += sum(part.nbytes for part in parts)

        PlanReader(plan, storage, deliver=deliver, convert=lambda _, values: values).run()
    cost = estimated.costs[process]
    assert sum(stop - start for _, start, stop in storage.ranges) == cost.read_bytes
    assert len(storage.ranges) == cost.requests
    assert len({file for file, _, _ in storage.ranges}) == cost.files
    assert held[0] == cost.needed_bytes


def boxes_of(grid, spec, shape, process):
    """The boxes of a process, device by device."""
    cells = Partition.of(shape, spec, grid)
    by_device = list(map(tuple, cells.numbers.tolist()))
    numbers = sorted(set(by_device[process * 4 : process * 4 + 4]))
    others = set(by_device[: process * 4]) | set(by_device[process * 4 + 4 :])
    return AddressableShards(
        tuple(cells.box(cell) for cell in numbers), tuple(cell in others for cell in numbers)
    )
