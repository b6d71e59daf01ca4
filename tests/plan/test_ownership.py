"""Each box is written once, by one of its holders, and none writes much more than the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from plans import grid_boxes, held_boxes

from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.plan.ownership import PieceWriters, file_owners
from orbax_safetensors_layout.sharding import GlobalShards


def replicated(shape, processes):
    return GlobalShards((Box.whole(shape),), (tuple(range(processes)),))


def members(held, tiles):
    """(process, box number) of every box that is written."""
    return [(owned.process, number) for owned in tiles for number in owned.tile.members]


def check_tile(held, owned):
    """The members are the cells of the tile's grid, in C order."""
    box, grid, numbers = owned.tile
    assert math.prod(grid) == len(numbers)
    for cell, number in zip(np.ndindex(*grid), numbers, strict=True):
        size = owned.tile.member_shape
        start = tuple(a + n * i for a, n, i in zip(box.start, size, cell, strict=True))
        stop = tuple(a + n for a, n in zip(start, size, strict=True))
        assert held.boxes[number] == Box(start, stop)


@settings(deadline=None)
@given(
    st.lists(held_boxes(processes=5), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from([0, 3, 1000]),
)
def test_each_box_is_written_by_one_of_its_holders(arrays, itemsize, below):
    writers = PieceWriters(5, replicate_below_bytes=below)
    again = PieceWriters(5, replicate_below_bytes=below)
    for held in arrays:
        before = writers.load.copy()
        tiles = writers.choose(held, itemsize)
        assert tiles == again.choose(held, itemsize)
        numbers = members(held, tiles)
        assert len(set(numbers)) == len(numbers)
        for process, number in numbers:
            assert process in held.holders[number]
        for owned in tiles:
            check_tile(held, owned)
        everyone = sum(box.size for box in held.boxes) * itemsize <= below
        if everyone:
            assert set(numbers) == {(p, n) for n, all_ in enumerate(held.holders) for p in all_}
            assert (writers.load == before).all()
        else:
            assert sorted(number for _, number in numbers) == list(range(len(held.boxes)))
            added = np.zeros(5, np.int64)
            for process, number in numbers:
                added[process] += held.boxes[number].size * itemsize
            assert (writers.load == before + added).all()


def test_arrays_that_are_written_alike_share_their_tiles():
    held = GlobalShards(tuple(grid_boxes((8, 4), (8, 1))), tuple((n // 2,) for n in range(8)))
    writers = PieceWriters(4)
    assert writers.choose(held, 4) is writers.choose(held, 2)


@pytest.mark.parametrize("processes", [2, 3, 8, 64, 256])
def test_replicated_arrays_are_spread(processes):
    """Each is written once, and all write as many as the others."""
    writers = PieceWriters(processes)
    held = replicated((10, 10), processes)
    for _ in range(3 * processes):
        (owned,) = writers.choose(held, 4)
        assert owned.tile.box == Box.whole((10, 10))
    assert (writers.load == 3 * 400).all()


def test_replicated_arrays_are_spread_over_more_than_256_processes():
    processes = 512
    writers = PieceWriters(processes)
    held = replicated((10, 10), processes)
    for _ in range(3 * processes):
        writers.choose(held, 4)
    assert writers.load.max() <= 1.3 * writers.load.mean()


@pytest.mark.parametrize("processes", [2, 8, 64])
def test_replicated_arrays_of_many_sizes_are_spread(processes):
    writers = PieceWriters(processes)
    rng = np.random.default_rng(0)
    for size in rng.integers(1, 1_000_000, 20 * processes).tolist():
        writers.choose(replicated((size,), processes), 2)
    assert writers.load.max() <= 1.3 * writers.load.mean()


def test_partially_replicated_arrays_are_spread():
    """Two replicas of four shards on eight processes: of each pair either may write."""
    boxes = tuple(grid_boxes((8, 8), (4, 1)))
    held = GlobalShards(boxes, tuple((n, n + 4) for n in range(4)))
    writers = PieceWriters(8)
    for _ in range(40):
        writers.choose(held, 4)
    assert writers.load.max() <= 1.3 * writers.load.mean()


def test_the_load_that_is_there_counts():
    """Those that write whole files leave the pieces to the others."""
    writers = PieceWriters(4)
    writers.load[:] = [0, 4000, 4000, 0]
    held = replicated((100,), 4)
    for _ in range(20):
        writers.choose(held, 4)
    assert writers.load.tolist() == [4000, 4000, 4000, 4000]


def test_a_process_that_holds_nothing_writes_nothing():
    held = GlobalShards(tuple(grid_boxes((8,), (2,))), ((1,), (3,)))
    writers = PieceWriters(6)
    assert members(held, writers.choose(held, 1)) == [(1, 0), (3, 1)]


@given(held_boxes(processes=4))
def test_who_holds_the_whole_array(held):
    for process in range(4):
        own_boxes = [box for box, all_ in zip(*held, strict=True) if process in all_]
        whole = sum(box.size for box in own_boxes) == sum(box.size for box in held.boxes)
        assert held.held_by(process) == (whole and len(own_boxes) == len(held.boxes))


@st.composite
def files(draw):
    processes = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(0, 1000), max_size=30))
    held = [[draw(st.integers(0, size)) for _ in range(processes)] for size in sizes]
    return sizes, np.array(held, np.int64).reshape(len(sizes), processes), processes


@settings(deadline=None)
@given(files())
@example(([], np.zeros((0, 3), np.int64), 3))
@example(([0, 0], np.zeros((2, 3), np.int64), 3))
def test_files_have_owners_and_no_process_many_more(case):
    sizes, held, processes = case
    owners = file_owners(sizes, held, processes)
    assert len(owners) == len(sizes)
    assert owners == file_owners(sizes, held, processes)
    load = [0] * processes
    for owner, size in zip(owners, sizes, strict=True):
        load[owner] += size
    # A file more than a tenth above the even share only for want of a smaller load elsewhere.
    assert max(load) <= max(1.1 * sum(sizes) / processes, sum(sizes) / processes + max([*sizes, 0]))


def test_files_go_to_those_that_hold_them():
    held = np.array([[0, 100], [100, 0], [10, 90], [90, 10]])
    assert file_owners([100] * 4, held, 2) == (1, 0, 1, 0)


@pytest.mark.parametrize("processes", [2, 8, 64, 256])
def test_equal_files_are_shared_out_evenly(processes):
    count = 4 * processes
    held = np.ones((count, processes), np.int64)
    owners = file_owners([100] * count, held, processes)
    assert np.bincount(owners, minlength=processes).tolist() == [4] * processes
    held[:, 0] = 100  # the first holds everything, and still writes no more than a tenth more
    owners = file_owners([100] * count, held, processes)
    assert np.bincount(owners, minlength=processes).max() <= 5
