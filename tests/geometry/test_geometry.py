"""Boxes, tiles and strided runs against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from boxes import boxes_in
from hypothesis import given, settings, strategies as st

from orbax_safetensors_layout.geometry import (
    AffineView,
    Box,
    StridedRuns,
    Tile,
    cover,
    packed_box,
    row_major_strides,
    tile,
    unpack_box,
)

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def shape_and_box(draw):
    shape = draw(shapes)
    return shape, draw(boxes_in(shape))


def bytes_of(runs: StridedRuns) -> list[int]:
    return [b for o in runs.offsets().tolist() for b in range(o, o + runs.run_bytes)]


@given(shape_and_box(), st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_runs_are_exactly_the_bytes_of_the_box(case, itemsize, base):
    shape, box = case
    elements = np.arange(math.prod(shape)).reshape(shape)[box.slices].ravel()
    expected = [base + e * itemsize + i for e in elements.tolist() for i in range(itemsize)]
    runs = StridedRuns.of(AffineView.row_major(shape).restrict(box), itemsize, base)
    assert bytes_of(runs) == expected
    assert runs.total_bytes == len(expected)
    assert runs.stop == expected[-1] + 1


@given(shape_and_box(), st.integers(0, 12))
def test_coalescing_reads_through_small_gaps_only(case, max_gap):
    shape, box = case
    runs = StridedRuns.of(AffineView.row_major(shape).restrict(box), 4)
    joined = runs.coalesce(max_gap)
    needed, read = set(bytes_of(runs)), bytes_of(joined)
    assert needed <= set(read)
    assert len(read) == len(set(read)) == joined.total_bytes
    gaps = sorted(set(read) - needed)
    for _, group in itertools.groupby(enumerate(gaps), lambda p: p[1] - p[0]):
        assert len(list(group)) <= max_gap
    if max_gap == 0:
        assert joined.total_bytes == runs.total_bytes


def test_huge_regions_cost_nothing_to_describe():
    view = AffineView.row_major((1 << 20, 1 << 20, 8)).restrict(
        Box((0, 0, 3), (1 << 20, 1 << 20, 5))
    )
    runs = StridedRuns.of(view, 2)
    assert runs == StridedRuns(6, 4, ((1 << 40, 16),))
    assert runs.coalesce(12).levels == ()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=4), st.data())
def test_grids_of_equal_boxes_tile_to_one(dims, data):
    grid = tuple(g for g, _ in dims)
    member = tuple(n for _, n in dims)
    cells = list(itertools.product(*map(range, grid)))
    boxes = [
        Box(
            tuple(c * n for c, n in zip(cell, member, strict=True)),
            tuple((c + 1) * n for c, n in zip(cell, member, strict=True)),
        )
        for cell in data.draw(st.permutations(cells))
    ]
    (tiling,) = tile(boxes)
    assert tiling.grid == grid
    assert tiling.box == Box.whole(tuple(g * n for g, n in dims))
    assert tiling.member_shape == member
    for number, cell in zip(tiling.members, cells, strict=True):
        assert boxes[number].start == tuple(c * n for c, n in zip(cell, member, strict=True))


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_tiles_cover_each_box_once(cells):
    boxes = [Box((2 * i, 3 * j), (2 * i + 2, 3 * j + 3)) for i, j in sorted(cells)]
    tiles = tile(boxes)
    assert sorted(m for t in tiles for m in t.members) == list(range(len(boxes)))
    for tiling in tiles:
        assert cover([boxes[m] for m in tiling.members], tiling.box)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=3),
    st.integers(1, 40),
    st.sampled_from([1, 8]),
)
def test_slabs_are_a_tile_in_its_order(dims, most, group):
    grid, member = tuple(g for g, _ in dims), tuple(n for _, n in dims)
    cells = list(itertools.product(*map(range, grid)))
    boxes = [
        Box(
            tuple(i * n for i, n in zip(cell, member, strict=True)),
            tuple((i + 1) * n for i, n in zip(cell, member, strict=True)),
        )
        for cell in cells
    ]
    whole = Box.whole(tuple(g * n for g, n in dims))
    numbers = np.arange(whole.size).reshape(whole.shape)
    slabs = [*Tile(whole, grid, tuple(range(len(boxes)))).slabs(most, group)]
    covered = []
    for slab in slabs:
        assert len(covered) % group == 0 or len(slabs) == 1
        covered += numbers[slab.box.slices].ravel().tolist()
        parts = [boxes[n].intersect(slab.box) for n in slab.members]
        assert {part.shape for part in parts} == {slab.member_shape}
        assert cover(parts, slab.box)
        assert parts == sorted(parts)
        assert slab.box.size <= most or group > 1
    assert covered == list(range(whole.size))


def test_overlapping_boxes_stay_alone():
    boxes = [Box((0,), (4,)), Box((2,), (6,)), Box((4,), (8,))]
    assert [t.box for t in tile(boxes)] == boxes


def test_unlike_boxes_stay_apart():
    boxes = [Box((0,), (4,)), Box((4,), (6,)), Box((6,), (8,))]
    assert [t.box for t in tile(boxes)] == [Box((0,), (4,)), Box((4,), (8,))]


def test_box_algebra():
    a, b = Box((0, 0), (4, 4)), Box((2, 3), (6, 5))
    assert a.intersect(b) == Box((2, 3), (4, 4))
    assert a.intersect(Box((4, 0), (5, 4))) is None
    assert a.contains(Box((1, 1), (4, 4)))
    assert not a.contains(b)
    assert (a.size, b.shape) == (16, (4, 2))
    assert row_major_strides(()) == ()


def pack(elements: np.ndarray, bits: int) -> np.ndarray:
    """Little-endian bit stream, one bit at a time: the oracle."""
    stream = [(int(e) >> i) & 1 for e in elements.ravel() for i in range(bits)]
    stream += [0] * (-len(stream) % 8)
    return np.packbits(np.array(stream, np.uint8), bitorder="little")


@given(shape_and_box(), st.sampled_from([4, 6]))
def test_packed_boxes_hold_their_elements(case, bits):
    shape, box = case
    if math.prod(shape) * bits % 8:
        shape, box = (*shape, 4), Box((*box.start, 1), (*box.stop, 3))
    elements = np.random.default_rng(0).integers(0, 1 << bits, shape).astype(np.uint8)
    packed = packed_box(shape, bits, box)
    stored = pack(elements, bits).reshape(packed.shape)
    data = np.ascontiguousarray(stored[packed.box.slices])
    np.testing.assert_array_equal(unpack_box(data, bits, packed), elements[box.slices])


@given(shape_and_box(), st.data())
def test_runs_of_reversed_and_repeated_dimensions(case, data):
    shape, box = case
    view = AffineView.row_major(shape).restrict(box)
    kinds = [data.draw(st.sampled_from([1, -1, 0])) for _ in shape]
    strides = tuple(k * s for k, s in zip(kinds, view.strides, strict=True))
    turned = sum(
        s * (n - 1) for k, s, n in zip(kinds, view.strides, view.shape, strict=True) if k < 0
    )
    view = AffineView(view.offset + turned, view.shape, strides)
    kept = tuple(slice(a, b if k else a + 1) for k, a, b in zip(kinds, *box, strict=True))
    elements = np.arange(math.prod(shape)).reshape(shape)[kept].ravel()
    runs = StridedRuns.of(view, 2)
    assert bytes_of(runs) == [2 * e + i for e in elements.tolist() for i in range(2)]
    assert view.bounds == (elements.min(), elements.max() + 1)


def test_interlaced_dimensions_are_refused():
    with pytest.raises(ValueError, match="interlace"):
        StridedRuns.of(AffineView(0, (3, 3), (1, 2)), 4)


@given(shapes, st.data())
def test_boxes_cover_each_index_once_or_not(shape, data):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    hits = np.zeros(shape, int)
    for box in boxes:
        hits[box.slices] += 1
    assert cover(boxes, Box.whole(shape)) == bool((hits == 1).all())
    edges = [sorted({0, n, data.draw(st.integers(0, n))}) for n in shape]
    grid = [
        Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))
        for cell in itertools.product(*map(itertools.pairwise, edges))
    ]
    assert cover(grid, Box.whole(shape))
