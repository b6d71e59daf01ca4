"""Write plans for tests: arrays that processes hold in any way, and what must be true of plans."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from boxes import grid_boxes
from hypothesis import strategies as st

from orbax_safetensors_layout.format import DTYPES, NewTensor, piece_name
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.plan import FileWrite, LeafWrite, WritePlan, plan_writes
from orbax_safetensors_layout.reading.plan_reader import PlanReader
from orbax_safetensors_layout.sharding import GlobalShards

DATA_ALIGNMENT = 4096


@st.composite
def held_boxes(draw, processes: int) -> GlobalShards:
    """Any equal division of any array, each cell on any processes (not all need to hold any)."""
    rank = draw(st.integers(0, 3))
    grid = [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in range(rank)]
    shape = [g * draw(st.integers(0 if g == 1 else 1, 4)) for g in grid]
    if not math.prod(shape):
        grid = [1] * rank
    processes_of_box = st.sets(st.integers(0, processes - 1), min_size=1)
    boxes = tuple(grid_boxes(shape, grid))
    kind = draw(st.sampled_from(["any", "one", "same"]))
    if kind == "same":
        holders = [tuple(sorted(draw(processes_of_box)))] * len(boxes)
    elif kind == "one":
        holders = [(draw(st.integers(0, processes - 1)),) for _ in boxes]
    else:
        holders = [tuple(sorted(draw(processes_of_box))) for _ in boxes]
    return GlobalShards(boxes, tuple(holders))


def shape_of(held: GlobalShards) -> tuple[int, ...]:
    return tuple(map(max, zip(*(box.stop for box in held.boxes), strict=True)))


@st.composite
def leaf_writes(draw, processes: int, max_size: int = 6) -> list[LeafWrite]:
    kinds = draw(st.lists(held_boxes(processes), min_size=1, max_size=4))
    leaves = []
    for number in range(draw(st.integers(0, max_size))):
        held = draw(st.sampled_from(kinds))
        code = draw(st.sampled_from(["F32", "BF16", "I8", "F64", "BOOL", "F4", "F6_E2M3"]))
        if DTYPES[code].packed and math.prod(shape_of(held)) % 8:
            code = "U8"
        name = draw(st.sampled_from([f"t{number}", f"t{number}@", f"t{number}@0", f"a.{number}"]))
        dtype = DTYPES[code]
        leaves.append(LeafWrite(NewTensor(name, dtype, shape_of(held)), dtype.numpy, held))
    return leaves


def all_plans(
    leaves: Sequence[LeafWrite], options: WriteOptions, processes: int
) -> list[WritePlan]:
    """The plan of each process, which all agree on what is shared."""
    plans = [
        plan_writes(leaves, options=options, process_index=index, process_count=processes)
        for index in range(processes)
    ]
    for plan in plans:
        assert plan.files == plans[0].files
        assert plan.stored == plans[0].stored
    return plans


def check_plans(plans: Sequence[WritePlan], options: WriteOptions) -> None:
    """Every byte of every tensor is written once, by a process that holds it."""
    leaves = plans[0].leaves
    owned = [(name, owner) for name, owner, _ in plans[0].files]
    assert [(file.name, plan.process_index) for plan in plans for file in plan.own] == sorted(
        owned, key=lambda pair: pair[1]
    )
    seen: list[int] = []
    for plan in plans:
        for file in plan.own:
            tensors = next(t for name, _, t in plan.files if name == file.name)
            assert {entry[:3] for entry in file.layout.tensors} == set(tensors)
            seen += _check_file(plan, file)
    if options.layout == "hf":
        assert sorted(seen) == [n for n, leaf in enumerate(leaves) if leaf.tensor.nbytes]
        gathered = {n for plan in plans for file in plan.own for n in file.gathered}
    else:
        assert not seen
        assert not owned
        gathered = set(range(len(leaves)))
    if not gathered and options.layout == "hf":
        assert plans[0].stored is None
        assert all(plan.pieces is None for plan in plans)
        return
    _check_pieces(plans, gathered, options)


def _check_file(plan: WritePlan, file: FileWrite) -> list[int]:
    """Parts and gathered leaves are the file's tensors, without gap; the leaves."""
    by_name = {leaf.tensor.name: number for number, leaf in enumerate(plan.leaves)}
    parts = {part.leaf: part for part in file.parts}
    assert len(parts) == len(file.parts)
    assert not parts.keys() & set(file.gathered)
    position = len(file.layout.header)
    assert position % DATA_ALIGNMENT == 0
    numbers = []
    for entry in file.layout.tensors:
        number = by_name[entry.name]
        assert entry.start == position
        position = entry.stop
        if number in parts:
            part = parts[number]
            assert (part.start, part.stop, part.dtype) == (entry.start, entry.stop, entry.dtype)
            assert part.tile.box == Box.whole(entry.shape)
            _check_part(plan, part)
        elif entry.nbytes:
            assert number in file.gathered
        if entry.nbytes:
            numbers.append(number)
    assert position == file.layout.size
    return numbers


def _check_part(plan: WritePlan, part) -> None:
    """The members divide the tile as its grid says, and the process holds each of them."""
    held = plan.leaves[part.leaf].held
    expected = [
        tuple(a + b for a, b in zip(part.tile.box.start, cell.start, strict=True))
        for cell in grid_boxes(part.tile.box.shape, part.tile.grid)
    ]
    assert [held.boxes[number].start for number in part.tile.members] == expected
    for number in part.tile.members:
        assert held.boxes[number].shape == part.tile.member_shape
        assert plan.process_index in held.holders[number]


def _check_pieces(plans: Sequence[WritePlan], numbers: set[int], options: WriteOptions) -> None:
    stored = plans[0].stored
    assert stored is not None
    leaves = plans[0].leaves
    assert stored.tensors.keys() == {leaves[number].tensor.name for number in numbers}
    files = {plan.pieces.name: plan for plan in plans if plan.pieces is not None}
    assert set(stored.files) == set(files)
    assert list(stored.files) == sorted(stored.files)
    pieces = {
        name: {entry.name: entry for entry in plan.pieces.layout.tensors}
        for name, plan in files.items()
    }
    named: set[tuple[str, str]] = set()
    for number in numbers:
        tensor = leaves[number].tensor
        count = np.zeros(tensor.shape, np.int64)
        for box in stored.boxes(tensor.name):
            file = stored.files[box.file]
            entry = pieces[file][piece_name(tensor.name, tensor.shape, box)]
            dtype = DTYPES["U8"] if tensor.dtype.packed else tensor.dtype  # one element a byte
            assert (entry.shape, entry.dtype) == (box.box.shape, dtype)
            assert (file, entry.name) not in named
            named.add((file, entry.name))
            count[box.box.slices] += 1
        if count.size:
            whole = sum(box.size for box in leaves[number].held.boxes)
            replicates = options.layout == "sharded" and (
                whole * -(-tensor.dtype.bits // 8) <= options.replicate_below_bytes
            )
            if replicates:
                expected = np.zeros_like(count)
                for box, holders in zip(*leaves[number].held, strict=True):
                    expected[box.slices] = len(holders)
                assert (count == expected).all()
            else:
                assert (count == 1).all()
    assert named == {(file, name) for file, entries in pieces.items() for name in entries}
    for name, plan in files.items():
        position = len(plan.pieces.layout.header)
        parts = {(part.start, part.stop): part for part in plan.pieces.parts}
        assert len(parts) == len(plan.pieces.parts)
        for entry in plan.pieces.layout.tensors:
            assert entry.start == position
            position = entry.stop
            if entry.nbytes:
                part = parts.pop((entry.start, entry.stop))
                tensor = plan.leaves[part.leaf].tensor
                assert entry.name == piece_name(tensor.name, tensor.shape, part.tile.box)
                _check_part(plan, part)
        assert not parts
        assert position == plan.pieces.layout.size
        assert name == plan.pieces.name


def read_all(plan, storage):
    """Execute a read plan; return what is delivered, by leaf and box."""
    values: dict[tuple[int, int], np.ndarray] = {}

    def deliver(number, boxes, parts):
        for box, part in zip(boxes, parts, strict=True):
            assert (number, box) not in values, "delivered once"
            values[number, box] = part.copy()

    PlanReader(plan, storage, deliver=deliver, convert=lambda n, v: v).run()
    return values
