"""Exchange rounds: every byte is read once, in balance, from few files; all plan the same."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import llama_like, save
from hypothesis import given, settings, strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES, TensorEntry
from orbax_safetensors_layout.geometry import cover, row_major_strides
from orbax_safetensors_layout.plan import (
    ExchangeLimits,
    ExchangePolicy,
    HostRate,
    LeafKind,
    SharedLeaf,
    exchange_plan,
    plan_exchange,
)
from orbax_safetensors_layout.reading import ExchangeStep, fingerprint_of
from orbax_safetensors_layout.sharding import ProcessShards

F32 = np.dtype(np.float32)
NO_LIMITS = ExchangeLimits(1 << 30, 1 << 30, 25_000)
MESHES = [(2, 1, 1), (4, 2, 1), (8, 1, 4), (2, 6, 3), (16, 1, 16)]
"""Sizes of the axes `data` and `fsdp`, and processes."""


@st.composite
def problems(draw):
    data, fsdp, processes = draw(st.sampled_from(MESHES))
    mesh = AbstractMesh((data, fsdp), ("data", "fsdp"))
    shards = ProcessShards(0, processes)
    leaves = []
    for number in range(draw(st.integers(1, 12))):
        spec = draw(st.sampled_from([(), ("fsdp",), (None, "fsdp"), ("data",)]))
        ways = [math.prod({"data": data, "fsdp": fsdp}[n] for n in [p] if n) for p in spec]
        extents = draw(st.sampled_from([(), (1,), (3, 5), (40, 2), (2, 300), (7, 1, 9)]))
        rank = max(len(ways), len(extents))
        ways += [1] * (rank - len(ways))
        extents += (1,) * (rank - len(extents))
        shape = tuple(w * e for w, e in zip(ways, extents, strict=True))
        replicas = shards.replicas(NamedSharding(mesh, PartitionSpec(*spec)), shape)
        dtype = np.dtype(draw(st.sampled_from([np.int8, ml_dtypes.bfloat16, np.float64])))
        place = (f"file {draw(st.integers(0, 3))}", number)
        direct = draw(st.booleans())
        strides = tuple(stride * dtype.itemsize for stride in row_major_strides(shape))
        if draw(st.booleans()):
            strides = strides[::-1]
        shape = replicas.boxes[0].shape
        leaves.append(SharedLeaf(number, replicas, shape, dtype, direct, place, strides))
    most = draw(st.sampled_from([1, 100, 10_000, 1 << 30]))
    stage, gap = draw(st.sampled_from([1, 1000, 1 << 30])), draw(st.sampled_from([0, 100]))
    return leaves, processes, ExchangeLimits(most, stage, gap)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_every_byte_is_read_once_and_fits_its_round(problem):
    leaves, processes, limits = problem
    stages = plan_exchange(leaves, limits)
    assert stages == plan_exchange(leaves, limits)
    rounds = [step for stage in stages for step in stage]
    travelling = Counter(item.leaf for step in rounds for lane in step.lanes for item in lane)
    assert travelling == Counter(range(len(leaves)))
    owned = defaultdict(list)
    for step in rounds:
        held = {}
        for process in range(processes):
            for leaf, box, row, column, offset in step.fragments(process):
                assert step.form.grid.processes[row][column] == process
                owned[leaf, row].append(box)
                nbytes = box.size * leaves[leaf].dtype.itemsize
                if step.form.is_packed:
                    assert offset + nbytes <= step.form.slot_bytes
                    before = held.setdefault((row, column), [])
                    assert all(offset >= stop or offset + nbytes <= start for start, stop in before)
                    before.append((offset, offset + nbytes))
                else:
                    fits = zip(box.shape, step.form.part_shape, strict=True)
                    assert all(extent <= most for extent, most in fits)
                    # It stands where the gather expects it.
                    part = column % step.form.parts * step.form.part_shape[step.form.axis]
                    whole = leaves[leaf].replicas.boxes[row]
                    assert box.start[step.form.axis] == whole.start[step.form.axis] + part
        filled = len(step.lanes) * math.prod(step.form.shape) * step.form.dtype.itemsize
        alone = sum(map(len, step.lanes)) == 1
        assert alone or filled <= max(limits.round_bytes, 64 * step.form.grid.columns)
    for (leaf, row), boxes in owned.items():
        assert cover(boxes, leaves[leaf].replicas.boxes[row])


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_stages_are_as_small_as_they_can_be(problem):
    leaves, processes, limits = problem
    for stage in plan_exchange(leaves, limits):
        held = [
            sum(step.form.slot_bytes * len(step.form.grid.slots(process)) for step in stage)
            for process in range(processes)
        ]
        assert len(stage) == 1 or max(held) <= limits.stage_bytes


def shared(count, shape, *, devices=8, processes=4, files=4, dtype=np.float32, spec=()):
    mesh = AbstractMesh((devices,), ("x",))
    shards = ProcessShards(0, processes)
    replicas = shards.replicas(NamedSharding(mesh, PartitionSpec(*spec)), shape)
    strides = tuple(stride * np.dtype(dtype).itemsize for stride in row_major_strides(shape))
    per_file = -(-count // files)
    box = replicas.boxes[0].shape
    return [
        SharedLeaf(n, replicas, box, np.dtype(dtype), True, (f"{n // per_file}", n), strides)
        for n in range(count)
    ]


@pytest.mark.parametrize("shape", [(64,), (512, 1024)])
def test_processes_read_equally_much_each_from_its_own_files(shape):
    """Layers of a model: 32 alike in 4 files, for 4 processes of 2 devices."""
    leaves = shared(32, shape)
    (stage,) = plan_exchange(leaves, NO_LIMITS)
    read, files = Counter(), defaultdict(set)
    for step in stage:
        for process in range(4):
            for leaf, box, *_ in step.fragments(process):
                read[process] += box.size
                files[process].add(leaves[leaf].place[0])
    assert set(read.values()) == {8 * math.prod(shape)}
    assert [files[process] for process in range(4)] == [{"0"}, {"1"}, {"2"}, {"3"}]


def test_processes_that_read_in_other_steps_are_told_apart():
    """As with other memory budgets: the rounds are the same, but they would wait for each other."""
    leaves = shared(32, (512, 1024))
    entry = SimpleNamespace(entry=TensorEntry("t", DTYPES["F32"], (), "folder/file", 0, 4))
    regions = [SimpleNamespace(name=str(n), dtype=F32, source=entry) for n in range(len(leaves))]
    resolved = [SimpleNamespace(region=region) for region in regions]
    storage = SimpleNamespace(kind="local", version=lambda file: None)
    catalog = SimpleNamespace(path="folder", files=["folder/file"], storage=storage, layout="hf")
    plans = [
        plan_exchange(leaves, NO_LIMITS),
        plan_exchange(leaves, NO_LIMITS._replace(stage_bytes=1)),
    ]
    assert [step for stage in plans[0] for step in stage] == [
        s for stage in plans[1] for s in stage
    ]
    assert len(plans[0]) < len(plans[1])
    step, other = (
        fingerprint_of(
            [ExchangeStep([], None, stage) for stage in plan],
            resolved,
            osl.ReadOptions(),
            catalog,
            None,
        )
        for plan in plans
    )
    assert step.digest != other.digest
    assert step.description != other.description


def test_pieces_of_two_saves_are_told_apart():
    leaves = shared(4, (512, 1024))
    entry = SimpleNamespace(entry=TensorEntry("t", DTYPES["F32"], (), "folder/file", 0, 4))
    regions = [SimpleNamespace(name=str(n), dtype=F32, source=entry) for n in range(len(leaves))]
    resolved = [SimpleNamespace(region=region) for region in regions]
    steps = [ExchangeStep([], None, stage) for stage in plan_exchange(leaves, NO_LIMITS)]

    def fingerprint(save_id):
        pieces = SimpleNamespace(save_id=save_id, files=("file",))
        catalog = SimpleNamespace(
            path="folder",
            files=["folder/file"],
            storage=SimpleNamespace(kind="local"),
            layout="sharded",
            manifest=lambda: SimpleNamespace(pieces=pieces),
        )
        return fingerprint_of(steps, resolved, osl.ReadOptions(), catalog, None)

    first, again, other = map(fingerprint, "aab")
    assert first.digest == again.digest == other.digest
    assert first.content == again.content != other.content


def test_few_programs_serve_many_leaves():
    """Two for each shape of large leaves and one for all small ones, whatever their number."""
    groups = [shared(61, (512, 1024)), shared(13, (1024, 1024)), shared(300, (77,))]
    leaves = [
        leaf._replace(number=number)
        for number, leaf in enumerate(itertools.chain.from_iterable(groups))
    ]
    stages = plan_exchange(leaves, ExchangeLimits(64 << 20, 1 << 40, 0))
    rounds = [step for stage in stages for step in stage]
    forms = {step.form for step in rounds}
    assert len({(form.lanes, form.part_shape, form.is_packed, form.dtype) for form in forms}) == 5
    assert len(rounds) == (7 + 5) + (1 + 5) + 1
    (stage,) = plan_exchange(shared(69, (512, 1024)), NO_LIMITS)
    assert [len(step.lanes) for step in stage] == [8] * 9  # three lanes have nothing at last


@pytest.mark.parametrize(
    ("shape", "strides", "devices", "axis"),
    [
        ((1024, 768), (768, 1), 8, 0),
        ((1024, 768), (1, 1024), 8, 1),  # transposed: the second dimension is the file's first
        ((3, 1 << 20), (1 << 20, 1), 8, 1),  # evenly, and the gaps are long
        ((3, 1 << 18), (1 << 18, 1), 8, 1),
        ((100, 5000), (5000, 1), 256, 0),  # along the other, everyone would read all of it
        ((2, 1 << 20, 256), (1 << 28, 256, 1), 64, 1),
        ((1, 1 << 20), (sys.maxsize, 1), 8, 1),
    ],
)
def test_a_split_is_even_and_nobody_reads_what_another_does(shape, strides, devices, axis):
    (leaf,) = shared(1, shape, devices=devices)
    strides = tuple(4 * stride for stride in strides)
    (stage,) = plan_exchange([leaf._replace(strides=strides)], NO_LIMITS)
    assert stage[0].form.axis == axis


@pytest.mark.parametrize("gaps", [{}, {"latency_seconds": {"local": 0.0}}])
@pytest.mark.parametrize(
    "spec", [(), ("fsdp",), (None, "fsdp"), ("data", "fsdp"), (None, ("data", "fsdp"))]
)
def test_plans_of_all_processes_read_the_checkpoint_once(tmp_path, spec, gaps):
    """On a cluster that one does not have; and more than once where each reads for itself."""
    tensors = {n: t for n, t in llama_like(layers=4, hidden=64).items() if t.ndim == 2}
    path = save(tmp_path, tensors, files=4)
    mesh = AbstractMesh((8, 4), ("data", "fsdp"))
    tree = {
        name: jax.ShapeDtypeStruct(
            t.shape, t.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )
        for name, t in tensors.items()
    }
    total = sum(tensor.nbytes for tensor in tensors.values())

    def plans(how):
        options = osl.ReadOptions(replicated=how, **gaps)
        return [
            osl.plan_load(path, tree, options=options, process_index=p, process_count=8)
            for p in range(8)
        ]

    once, each = plans("read_once"), plans("each")
    ranges = sorted(r for plan in once for r in plan.ranges())
    assert sum(stop - start for _, start, stop in ranges) == total
    assert sum(plan.cost().read_bytes for plan in once) == total
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ranges))
    largest = max(tensor.nbytes for tensor in tensors.values())  # small ones are not split
    assert max(plan.cost().read_bytes for plan in once) <= total / 8 + largest
    if len(spec) < 2 or (gaps and spec == (None, "fsdp")):
        assert sum(plan.cost().read_bytes for plan in each) == 8 * total


def test_processes_that_share_a_host_share_its_rates():
    options = osl.ReadOptions()
    alone, shared = (ExchangePolicy.of(options, "local", "cpu", processes) for processes in (1, 8))
    assert shared.rates.storage.bytes_per_second == alone.rates.storage.bytes_per_second / 8
    one, eight = (exchange.rates.exchange().seconds(10**9, 3) for exchange in (alone, shared))
    assert eight == pytest.approx(8 * one)
    # 85 MB/s a stream, 32 streams; the network of a host carries little more.
    stored = [ExchangePolicy.of(options, "gs", "tpu", processes).rates for processes in (1, 8)]
    assert stored[1].storage.bytes_per_second < stored[0].storage.bytes_per_second / 4
    assert stored[1].exchange() == stored[0].exchange()


def test_cpu_devices_exchange_more_slowly_the_more_of_a_host_there_are():
    mesh = AbstractMesh((2, 8), ("data", "fsdp"))
    pairs, everyone = (
        ProcessShards(0, 8).replicas(NamedSharding(mesh, spec), (16,)).grid
        for spec in (PartitionSpec("fsdp"), PartitionSpec())
    )
    options = osl.ReadOptions()
    on_one, on_eight = (ExchangePolicy.of(options, "https", "cpu", n).rates for n in (8, 1))
    one_round = 10**7, 1
    assert on_one.exchange(everyone).seconds(*one_round) == pytest.approx(
        8 * on_one.exchange(pairs).seconds(*one_round)
    )
    # On hosts of their own each sends to its two devices at once.
    assert on_eight.exchange(everyone) == on_eight.exchange(pairs)


def test_programs_are_compiled_while_tensors_are_read():
    rates = ExchangePolicy.of(osl.ReadOptions(), "https", "tpu").rates.exchange()
    compiling = 2 * rates.program_seconds
    assert rates.seconds(0, 1, 2, reading=compiling / 2) == compiling + rates.round_seconds
    assert rates.seconds(0, 1, 2, reading=2 * compiling) == 2 * compiling + rates.round_seconds


def test_programs_that_cut_rows_take_longer_the_more_parts_there_are():
    mesh = AbstractMesh((8,), ("fsdp",))
    whole = ProcessShards(0, 4).replicas(NamedSharding(mesh, PartitionSpec()), (16,)).grid
    rates = ExchangePolicy.of(osl.ReadOptions(), "https", "cpu", 4).rates
    plain, two, eight = (
        rates.exchange(whole._replace(cuts=cuts)).program_seconds for cuts in ((), (2,), (2, 4))
    )
    assert plain < two < eight


def test_what_takes_no_longer_than_a_round_is_not_planned():
    exchange = ExchangePolicy.of(
        osl.ReadOptions(bandwidth_bytes_per_second={"local": 1e6}), "local", "tpu"
    )
    seconds = exchange.rates.exchange().seconds(0, rounds=1, programs=1)
    assert not exchange.load_may_gain(int(seconds * 1e6) - 1, 2)
    assert exchange.load_may_gain(int(seconds * 1e6) + 1, 2)
    once = ExchangePolicy.of(osl.ReadOptions(replicated="read_once"), "local", "tpu")
    assert once.load_may_gain(0, 2)


def test_a_request_of_all_is_no_faster_than_that_of_a_part():
    """A load of a few requests takes as long as one of them, whoever reads the others."""
    options = osl.ReadOptions(
        bandwidth_bytes_per_second={"https": 4e6}, latency_seconds={"https": 0.02}, concurrency=8
    )
    exchange = ExchangePolicy.of(options, "https", "cpu")
    assert not exchange.load_may_gain(8 << 20, 2)  # eight streams, of a MiB or of two halves
    assert exchange.load_may_gain(16 << 20, 2)


@pytest.mark.parametrize(
    ("request_bytes", "programs", "chosen"),
    [(0, 1.5, {0}), (10**6, 1.5, set()), (10**6, 0.9, {0, 1}), (10**5, 1.5, {0})],
)
def test_a_part_of_a_load_is_exchanged_where_that_saves_more_than_a_request(
    request_bytes, programs, chosen
):
    """Streams idle between what is read through gaps and what is exchanged."""
    storage = HostRate(0, 8e6, stream_bytes_per_second=1e6, least_request_bytes=request_bytes)
    rates = exchange_plan.ExchangeRates(storage, 1 << 20, "cpu")
    alone = exchange_plan._Work(10e6, 40e6)
    once = exchange_plan._Work(5e6, 20e6, 0, programs, 0.001)
    assert rates._chosen([alone] * 2, [once] * 2, (0, 0)) == chosen


def test_what_is_read_faster_than_gathered_is_not_planned():
    options = osl.ReadOptions(bandwidth_bytes_per_second={"local": 1e9})
    exchange = ExchangePolicy.of(options, "local", "cpu")
    mesh = AbstractMesh((2,), ("data",))
    replicas = ProcessShards(0, 2).replicas(NamedSharding(mesh, PartitionSpec()), (16,))
    stored = 10**8
    kind = LeafKind.of(replicas, stored, 4)
    assert kind.gathered_bytes == 64
    equal = int(stored * exchange.rates.exchange(replicas.grid).bytes_per_second / 1e9)
    # An exchange reads half of it.
    slow, fast = (kind._replace(gathered_bytes=int(equal / 2 * n)) for n in (1.01, 0.99))
    assert not exchange.may_gain(slow, 2)
    assert exchange.may_gain(fast, 2)
    for beside in (0, stored):  # bytes that are read whoever reads the others
        assert not exchange.load_may_gain(stored + beside, 2, [(slow, 1)])
        assert exchange.load_may_gain(stored + beside, 2, [(fast, 1)])
    # Where rows may be read several times, reading has no such bound.
    for budget, gains in ((stored, False), (stored - 1, True)):
        again = ExchangePolicy.of(
            osl.ReadOptions(bandwidth_bytes_per_second={"local": 1e9}, memory_budget_bytes=budget),
            "local",
            "tpu",
        )
        assert again.may_gain(slow, 2)
        assert again.load_may_gain(stored, 2, [(slow, 1)]) == gains


def test_columns_of_arrays_beyond_the_range_of_64_bits():
    """The bytes of a flat array times its elements exceed 64 bits."""
    (leaf,) = shared(1, (3 << 32,), processes=8)
    ((step,),) = plan_exchange([leaf], NO_LIMITS)
    assert step.column_bytes({0: leaf.box_bytes}).tolist() == [leaf.box_bytes // 8] * 8
