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


@st.composite
def view_of_numbers(draw):
    """A tensor of numbers, and a view of it: cut, turned, repeated, with axes apart or as one."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    view, has_merged = numbers, False
    for kind in draw(st.lists(st.sampled_from(["order", "cut", "turn", "apart", "one", "repeat"]))):
        axis = draw(st.integers(0, max(0, view.ndim - 1)))
        if kind == "repeat" and view.ndim < 8:
            view = np.broadcast_to(view[..., None], (*view.shape, draw(st.integers(1, 3))))
        elif kind == "order":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif view.ndim and kind == "turn":
            view = np.flip(view, axis)
        elif view.ndim and kind == "cut":
            start = draw(st.integers(0, view.shape[axis] - 1))
            stop = draw(st.integers(start + 1, view.shape[axis]))
            cut = slice(start, stop, draw(st.integers(1, 2)))
            view = view[(*[slice(None)] * axis, cut)]
        elif view.ndim and kind == "apart":
            part = draw(st.sampled_from([n for n in range(1, 7) if view.shape[axis] % n == 0]))
            view = view.reshape(*view.shape[:axis], part, -1, *view.shape[axis + 1 :])
        elif kind == "one" and axis + 1 < view.ndim:
            merged = view.reshape(*view.shape[:axis], -1, *view.shape[axis + 2 :])
            if np.shares_memory(merged, numbers):
                view, has_merged = merged, True
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return numbers, view, AffineView(int(view.flat[0]), view.shape, strides), has_merged


@given(view_of_numbers())
def test_the_region_that_a_view_has_elements_of(case):
    numbers, values, view, has_merged = case
    region = view.region_in(numbers.shape)
    alone = numbers[region.slices].ravel()
    within = view.within(numbers.shape, region)
    low, high = within.bounds
    assert low >= 0
    assert high <= alone.size
    memory = np.lib.stride_tricks.as_strided(
        alone[within.offset :], within.shape, [8 * stride for stride in within.strides]
    )
    assert (memory == values).all()
    places = np.unravel_index(values, numbers.shape) if numbers.ndim else ()
    needed = Box(tuple(int(p.min()) for p in places), tuple(int(p.max()) + 1 for p in places))
    assert region.contains(needed)
    assert has_merged or region == needed


def test_regions_of_layers_heads_and_rows():
    layers = (4, 6, 8)
    one = AffineView.row_major(layers).restrict(Box((2, 0, 0), (3, 6, 8)))
    assert one.region_in(layers) == Box((2, 0, 0), (3, 6, 8))
    transposed = AffineView(2 * 8, (8, 4), (1, 48))  # of [4, 6, 8] the index 2 of the axis between
    assert transposed.region_in(layers) == Box((0, 2, 0), (4, 3, 8))
    assert transposed.within(layers, Box((0, 2, 0), (4, 3, 8))) == AffineView(0, (8, 4), (1, 8))
    as_one = AffineView(48 + 20, (10,), (1,))  # rows 2 to 3 of the layer 1, in a row
    assert as_one.region_in(layers) == Box((1, 2, 0), (2, 4, 8))
    across = AffineView(40, (16,), (1,))  # the last row of a layer, and the first of the next
    assert across.region_in(layers) == Box((0, 0, 0), (2, 6, 8))


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
