"""Leaves made of pieces: what is planned for them, in which order it is read, what is refused."""

from __future__ import annotations

import dataclasses
import threading

import ml_dtypes
import numpy as np
import pytest
from boxes import grid_boxes
from checkpoints import assert_same_bits, random_tensor, save
from plans import read_all
from recording import RecordingStorage

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import DTYPES, TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box, row_major_strides
from orbax_safetensors_layout.plan import LeafRead, ReadPlan, plan_reads
from orbax_safetensors_layout.plan.leaf_reads import TensorPiece
from orbax_safetensors_layout.reading.jobs import jobs_of
from orbax_safetensors_layout.reading.plan_reader import PlanReader
from orbax_safetensors_layout.reading.tile_buffers import buffer_slices
from orbax_safetensors_layout.runtime import allocate
from orbax_safetensors_layout.sharding import AddressableShards

LOCAL = osl.ReadOptions().profile("local")


def cells(shape, *grid) -> AddressableShards:
    """All cells of a grid."""
    boxes = tuple(grid_boxes(shape, grid))
    return AddressableShards(boxes, (False,) * len(boxes))


def stacked(entries, local, shape, strides, name="stack") -> LeafRead:
    """One leaf of equal views, one a tensor, along a new leading dimension."""
    sources = tuple(
        TensorPiece(
            entry,
            Box((i, *[0] * len(shape)), (i + 1, *shape)),
            AffineView(0, (1, *shape), (0, *strides)),
        )
        for i, entry in enumerate(entries)
    )
    stored = sources[0].entry.dtype
    return LeafRead(name, (len(sources), *shape), stored, sources, local, stored.numpy)


def plan(leaves, *, budget=1 << 31, adopt=True, profile=LOCAL, in_order=False) -> ReadPlan:
    return plan_reads(
        leaves, profile=profile, memory_budget_bytes=budget, adopt=adopt, in_order=in_order
    )


def made_up(name="t", shape=(4, 6), code="F32", file="f", start=8) -> TensorEntry:
    dtype = DTYPES[code]
    size = int(np.prod(shape)) * dtype.bits // 8
    return TensorEntry(name, dtype, tuple(shape), file, start, start + size)


@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 1, 1), (1, 8, 1), (2, 4, 1), (1, 1, 1)])
def test_stacked_layers_are_read_straight_into_their_shards(tmp_path, grid):
    layers, shape = 4, (64, 48)
    tensors = {f"{i}": random_tensor(shape, np.float32, i) for i in range(layers)}
    path = save(tmp_path, tensors, files=3)
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
    local = cells((layers, *shape), *grid)
    leaf = stacked([entries[n] for n in tensors], local, shape, row_major_strides(shape))
    planned = plan([leaf])
    regions = [region for batch in planned.batches for region in batch.regions]
    assert len(regions) == layers
    assert all(region.read.direct for region in regions)
    assert planned.cost().peak_host_bytes == 0
    with RecordingStorage() as storage:
        values = read_all(planned, storage)
    full = np.stack([*tensors.values()])
    for number, box in enumerate(local.boxes):
        assert_same_bits(values[0, number], full[box.slices])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("grid", [(1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (4, 2, 1, 1)])
def test_equal_experts_share_their_geometry(grid, transposed):
    layers, experts, shape = 4, 8, (64, 32)
    local = cells((layers, experts, *shape), *grid)
    strides = (1, 64) if transposed else (32, 1)
    sources = tuple(
        TensorPiece(
            made_up(f"{layer}.{expert}", (64, 32), "BF16", f"f{layer}"),
            Box((layer, expert, 0, 0), (layer + 1, expert + 1, *shape)),
            AffineView(0, (1, 1, *shape), (0, 0, *strides)),
        )
        for layer in range(layers)
        for expert in range(experts)
    )
    bf16 = DTYPES["BF16"]
    leaf = LeafRead("e", (layers, experts, *shape), bf16, sources, local, bf16.numpy)
    regions = [region for batch in plan([leaf]).batches for region in batch.regions]
    assert len(regions) == layers * experts
    assert len({id(region.read) for region in regions}) == 1


def test_a_large_transposed_head_split(tmp_path):
    """Rows of a multiple of 4 KiB: padded, staged in the order of the file, one copy a block."""
    heads, head_dim, hidden = 8, 64, 4096
    tensors = {f"{i}": random_tensor((heads * head_dim, hidden), np.uint16, i) for i in range(2)}
    path = save(tmp_path, tensors, files=2)
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
    shape = (hidden, heads, head_dim)
    expected = np.stack([t.T.reshape(shape) for t in tensors.values()])
    for grid in ((1, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (2, 2, 2, 1), (1, 1, 1, 4)):
        local = cells(expected.shape, *grid)
        leaf = stacked([*entries.values()], local, shape, (1, head_dim * hidden, hidden))
        planned = plan([leaf])
        with RecordingStorage() as storage:
            values = read_all(planned, storage)
            read = sorted(storage.ranges)
        for number, box in enumerate(local.boxes):
            assert_same_bits(values[0, number], expected[box.slices])
        assert sum(stop - start for _, start, stop in read) == expected.nbytes
        assert len(read) == planned.cost().requests


def test_long_rows_are_cut_so_that_the_copy_writes_whole_lines(tmp_path):
    """Rows of 512 KiB, of which four fit a staging buffer: blocks are bounded in both ways."""
    tensor = random_tensor((128, 1 << 18), np.uint16)
    path = save(tmp_path, {"t": tensor})
    with Catalog.open(path) as catalog:
        (entry,) = catalog.all_entries().values()
    shape = (1 << 18, 128)
    source = TensorPiece(entry, Box.whole(shape), AffineView(0, shape, (1, 1 << 18)))
    local = AddressableShards.whole(shape)
    leaf = LeafRead("t", shape, entry.dtype, (source,), local, entry.dtype.numpy)
    planned = plan([leaf])
    (region,) = planned.batches[0].regions
    rows, columns = region.read.blocking.lengths
    assert rows * 2 >= 128
    assert columns * 2 > LOCAL.max_gap_bytes
    with RecordingStorage() as storage:
        values = read_all(planned, storage)
        assert len(storage.ranges) == planned.cost().requests
    assert_same_bits(values[0, 0], tensor.T)


@pytest.mark.parametrize("strides", [(1, 128), (128, 1)])
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 4, 1), (1, 1, 4)])
def test_the_budget_bounds_open_tiles(tmp_path, strides, grid):
    """As on an accelerator: tiles of all layers of all files are not open at once."""
    layers, shape = 6, (128, 128)
    names = [f"{i}.{k}" for i in range(layers) for k in "abcdef"]
    tensors = {name: random_tensor(shape, np.float32, i) for i, name in enumerate(names)}
    path = save(tmp_path, tensors, files=layers)
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
    local = cells((layers, *shape), *grid)
    leaves = [
        stacked([entries[f"{i}.{k}"] for i in range(layers)], local, shape, strides, k)
        for k in "abcdef"
    ]
    tile_bytes = layers * 128 * 128 * 4
    budget = 2 * tile_bytes + 1000
    planned = plan(leaves, budget=budget, adopt=False)
    staging = LOCAL.concurrency * LOCAL.staging_bytes * 9 // 8
    assert planned.cost().peak_host_bytes <= budget + staging
    lock = threading.Lock()
    opened: set[str] = set()
    released: list[str] = []
    most = []
    kinds = {(e.file, e.start): n[-1] for n, e in entries.items()}

    def before_read(file, start, stop):
        with lock:
            opened.update(
                kind for (f, at), kind in kinds.items() if f == file and start <= at < stop
            )
            most.append(len(opened) - len(released))

    def deliver(number, boxes, values):
        expected = np.stack([tensors[f"{i}.{leaves[number].name}"] for i in range(layers)])
        if strides[0] == 1:
            expected = expected.transpose(0, 2, 1)
        for box, value in zip(boxes, values, strict=True):
            assert_same_bits(value, expected[local.boxes[box].slices])
        return lambda: released.append(leaves[number].name)

    with RecordingStorage() as storage:
        storage.before_read = before_read
        PlanReader(planned, storage, deliver=deliver, convert=lambda n, v: v).run()
    assert sorted(set(released)) == [*"abcdef"]
    assert max(most) <= 3
    # Where arrays keep their buffers, the files come one after the other.
    files = [batch.file for batch in plan(leaves).batches]
    assert files == sorted(set(files))


@pytest.mark.parametrize("in_order", [False, True])
def test_leaves_are_read_file_by_file_or_in_their_order(in_order):
    """The parts of a file come in the order in which it can be appended."""
    whole = AddressableShards((Box((0, 0), (4, 6)),), (False,))
    leaves = [
        LeafRead(
            f"t{number}",
            (4, 6),
            DTYPES["F32"],
            (TensorPiece(made_up(file="ab"[number % 2], start=96 * number), whole.boxes[0], view),),
            whole,
            np.dtype(np.float32),
        )
        for number, view in enumerate([AffineView.row_major((4, 6))] * 12)
    ]
    reads = plan(leaves, budget=4 * 3 * 96, adopt=False, in_order=in_order)
    order = [region.leaf for batch in reads.batches for region in batch.regions]
    assert sorted(order) == list(range(12))
    if in_order:
        assert [sorted(order[i : i + 3]) for i in range(0, 12, 3)] == [
            [i, i + 1, i + 2] for i in range(0, 12, 3)
        ]
    else:
        assert order == [*range(0, 12, 2), *range(1, 12, 2)]


def test_a_tile_larger_than_the_budget_is_read_by_itself(tmp_path):
    tensors = {f"{i}": random_tensor((64, 64), np.float32, i) for i in range(4)}
    path = save(tmp_path, tensors, files=2)
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
    leaf = stacked([entries[n] for n in tensors], cells((4, 64, 64), 1, 2, 1), (64, 64), (64, 1))
    planned = plan([leaf], budget=100, adopt=False)
    assert planned.cost().peak_host_bytes == 4 * 32 * 64 * 4
    with RecordingStorage() as storage:
        values = read_all(planned, storage)
    assert_same_bits(np.concatenate([values[0, 0], values[0, 1]], 1), np.stack([*tensors.values()]))


def test_small_parts_of_many_leaves_share_requests(tmp_path):
    """Norms of all layers: one request a file, whatever the leaves."""
    tensors = {f"{i}.{k}": random_tensor((33,), np.float32, i) for i in range(8) for k in "ab"}
    path = save(tmp_path, tensors, files=2)
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
    leaves = [
        stacked(
            [entries[f"{i}.{k}"] for i in range(8)],
            AddressableShards.whole((8, 33)),
            (33,),
            (1,),
            k,
        )
        for k in "ab"
    ]
    for adopt in (True, False):
        planned = plan(leaves, adopt=adopt)
        with RecordingStorage() as storage:
            values = read_all(planned, storage)
            assert len(storage.ranges) == 2 == planned.cost().requests
        for number, k in enumerate("ab"):
            assert_same_bits(values[number, 0], np.stack([tensors[f"{i}.{k}"] for i in range(8)]))


def test_a_repeated_element_is_read_once(tmp_path):
    tensor = random_tensor((5, 7), np.int16)
    path = save(tmp_path, {"t": tensor})
    with Catalog.open(path) as catalog:
        (entry,) = catalog.all_entries().values()
    shape = (5, 3, 7, 4)
    source = TensorPiece(entry, Box.whole(shape), AffineView(28, shape, (-7, 0, 1, 0)))
    local = cells(shape, 1, 3, 1, 2)
    leaf = LeafRead("t", shape, entry.dtype, (source,), local, entry.dtype.numpy)
    planned = plan([leaf])
    assert planned.cost().read_bytes == planned.cost().needed_bytes == tensor.nbytes
    with RecordingStorage() as storage:
        values = read_all(planned, storage)
        assert sum(b - a for _, a, b in storage.ranges) == tensor.nbytes
    expected = np.broadcast_to(tensor[::-1, None, :, None], shape)
    for number, box in enumerate(local.boxes):
        assert_same_bits(values[0, number], np.ascontiguousarray(expected[box.slices]))


def test_a_plan_of_pieces_prints():
    leaf = stacked(
        [made_up(f"t{i}", (4, 6), start=8 + 96 * i) for i in range(3)],
        AddressableShards.whole((3, 6, 4)),
        (6, 4),
        (1, 6),
        "layers.kernel",
    )
    planned = plan([leaf])
    assert planned.by_tensor() == [("layers.kernel", 288, 288)]
    assert "layers.kernel  [3, 6, 4]  F32       288   288" in str(planned)
    assert "1 tensors, 288 bytes needed" in str(planned)


def test_a_failing_read_names_file_and_tensor(tmp_path):
    tensors = {f"t{i}": random_tensor((100,), np.float32, i) for i in range(2)}
    path = save(tmp_path, tensors, files=2)
    with Catalog.open(path) as catalog:
        entries = catalog.all_entries()
    leaf = stacked([*entries.values()], AddressableShards.whole((2, 100)), (100,), (1,))

    def before_read(file, start, stop):
        if file == entries["t1"].file:
            raise osl.StorageError("the disk broke", file=file)

    with RecordingStorage() as storage:
        storage.before_read = before_read
        with pytest.raises(osl.StorageError, match="the disk broke") as caught:
            read_all(plan([leaf]), storage)
    assert (caught.value.file, caught.value.tensor) == (entries["t1"].file, "t1")


def one(entry, box, view, shape=(4, 6)) -> LeafRead:
    source = TensorPiece(entry, box, view)
    local = AddressableShards.whole(shape)
    return LeafRead("the.leaf", shape, entry.dtype, (source,), local, entry.dtype.numpy)


WHOLE = Box.whole((4, 6))


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (one(made_up(), Box((0, 0), (4, 5)), AffineView(0, (4, 5), (6, 1))), "do not cover it"),
        (one(made_up(), WHOLE, AffineView(0, (4, 5), (6, 1))), "cannot fill"),
        (one(made_up(), WHOLE, AffineView(1, (4, 6), (6, 1))), "leaves the tensor 't'"),
        (one(made_up(), WHOLE, AffineView(0, (4, 6), (-6, 1))), "leaves the tensor 't'"),
        (one(made_up(), WHOLE, AffineView(0, (4, 6), (1, 1))), "interlace"),
    ],
)
def test_pieces_that_do_not_make_the_leaf_are_refused(leaf, text):
    with pytest.raises(osl.MismatchError, match=text) as caught:
        plan([leaf])
    assert caught.value.tensor == "the.leaf"


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (2, 6)), Box((1, 0), (3, 6))],  # overlap and gap
        [Box((0, 0), (2, 6)), Box((0, 0), (2, 6))],
        [Box((0, 0), (2, 6)), Box((3, 0), (5, 6))],
        [Box((0, 0), (4, 6)), Box((0, 0), (4, 6))],
    ],
)
def test_boxes_that_do_not_tile_the_leaf_are_refused(boxes):
    sources = tuple(TensorPiece(made_up(), b, AffineView(0, b.shape, (6, 1))) for b in boxes)
    f32 = DTYPES["F32"]
    leaf = LeafRead("the.leaf", (4, 6), f32, sources, AddressableShards.whole((4, 6)), f32.numpy)
    with pytest.raises(osl.MismatchError, match="do not cover it, each index once") as caught:
        plan([leaf])
    assert caught.value.tensor == "the.leaf"


def test_tensors_of_several_dtypes_do_not_make_a_leaf():
    entries = [made_up("a"), made_up("b", code="I32", file="g")]
    leaf = stacked(entries, AddressableShards.whole((2, 4, 6)), (4, 6), (6, 1), "the.leaf")
    with pytest.raises(osl.DtypeMismatchError, match="'b' is not F32") as caught:
        plan([leaf])
    assert (caught.value.tensor, caught.value.file) == ("the.leaf", "g")


def test_packed_elements_stay_where_they_are():
    entries = [made_up(n, code="F4") for n in "ab"]
    leaf = stacked(entries, AddressableShards.whole((2, 4, 6)), (4, 6), (6, 1), "the.leaf")
    with pytest.raises(osl.UnsupportedDtypeError, match="Load the tensor by itself") as caught:
        plan([leaf])
    assert caught.value.tensor == "the.leaf"
    with pytest.raises(osl.UnsupportedDtypeError, match="Load the tensor by itself"):
        plan([one(made_up(code="F4"), WHOLE, AffineView(0, (4, 6), (1, 4)))])
    assert ml_dtypes.float4_e2m1fn is DTYPES["F4"].numpy.type
    plain = LeafRead.plain("p", entries[0], AddressableShards.whole((4, 6)), DTYPES["F4"].numpy)
    assert plan([plain]).cost().needed_bytes == 12


def test_requests_to_a_far_storage_share_no_job_where_no_gaps_are_joined():
    far = dataclasses.replace(
        LOCAL, latency_seconds=0.05, bandwidth_bytes_per_second=1e3, streams_share=False
    )
    columns = made_up(shape=(32, 400), code="U8")
    near = [made_up(f"{i}", (8,), "U8", start=columns.stop + 20 * i) for i in range(4)]
    local = AddressableShards((Box((0, 0), (32, 100)),), (False,))
    reads = [LeafRead.plain("t", columns, local, np.dtype("u1"))]
    reads += [LeafRead.plain(e.name, e, cells(e.shape, 1), np.dtype("u1")) for e in near]
    planned = [
        plan_reads(reads, profile=far, memory_budget_bytes=1 << 30, adopt=True, joins_gaps=joins)
        for joins in (False, True)
    ]
    assert [plan.profile for plan in planned] == [far, far]
    of_each = [[*plan.groups()] for plan in planned]
    assert [len(groups) for groups in of_each] == [5, 2]
    assert [len(group.regions) for group in ReadPlan.joined(planned).groups()] == [1] * 6 + [4]
    slices = buffer_slices(of_each[0][0], {}, allocate, allocate)
    jobs = [*jobs_of(of_each[0][0], slices, planned[0].profile)]
    assert [len(job.numbers) for job in jobs] == [1] * 32
