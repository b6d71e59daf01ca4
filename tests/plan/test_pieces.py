"""Leaves made of pieces of several tensors: read, against numpy on the full tensors."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from boxes import grid_boxes
from checkpoints import assert_same_bits, random_tensor, save
from hypothesis import HealthCheck, given, settings, strategies as st
from plans import read_all
from recording import RecordingStorage

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.geometry import AffineView, Box, row_major_strides
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan import LeafRead, coalesce, plan_reads, regions
from orbax_safetensors_layout.plan.leaf_reads import TensorPiece
from orbax_safetensors_layout.reading import staged_blocks
from orbax_safetensors_layout.sharding import AddressableShards

DTYPES = [*map(np.dtype, ["u1", "i2", "f4", "c8", ml_dtypes.bfloat16])]


class Piece(NamedTuple):
    """A view of a tensor, as numpy makes it and as an AffineView says it."""

    tensor: str
    shape: tuple[int, ...]
    view: AffineView

    def of(self, tensor: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(tensor).reshape(-1)
        strides = [s * flat.itemsize for s in self.view.strides]
        return np.lib.stride_tricks.as_strided(flat[self.view.offset :], self.view.shape, strides)


@st.composite
def views(draw, shape):
    """The shape of a tensor, and a view of it of `shape`: permuted, sliced, reversed, repeated."""
    rank = len(shape)
    order = draw(st.permutations(range(rank)))
    extra = draw(st.integers(0, 1))
    base, steps = [], [None] * rank
    for position, axis in enumerate(order):
        n = shape[axis]
        kind = draw(st.sampled_from(["plain", "plain", "slice", "reverse", "repeat"]))
        if kind == "repeat":
            base.append(1)
            steps[axis] = (position, 0, 0)
            continue
        step = draw(st.integers(1, 3)) if kind == "slice" else 1
        first = draw(st.integers(0, 2)) if kind == "slice" else 0
        base.append(first + (n - 1) * step + 1 + (draw(st.integers(0, 2)) if first else 0))
        steps[axis] = (position, first, step)
        if kind == "reverse":
            steps[axis] = (position, n - 1, -1)
    if extra:
        base.append(draw(st.integers(1, 3)))
    strides = row_major_strides(base)
    offset = sum(first * strides[position] for position, first, _ in steps)
    if extra:
        offset += draw(st.integers(0, base[-1] - 1))
    affine = AffineView(
        offset, tuple(shape), tuple(step * strides[position] for position, _, step in steps)
    )
    return tuple(base), affine


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def local_boxes(draw, shape):
    """Some cells of a grid, as one process of a mesh holds them."""
    grid = [draw(st.sampled_from(divisors(n))) for n in shape]
    cells = list(grid_boxes(shape, grid))
    chosen = draw(st.lists(st.sampled_from(cells), unique=True, min_size=1, max_size=len(cells)))
    if draw(st.booleans()):
        chosen = cells
    return AddressableShards(tuple(chosen), tuple(draw(st.booleans()) for _ in chosen))


@st.composite
def leaves(draw):
    """(tensors by name, [(leaf shape, {box: piece}, local boxes)])."""
    tensors: dict[str, np.ndarray] = {}
    dtype = draw(st.sampled_from(DTYPES))
    specs = []
    for _ in range(draw(st.integers(1, 2))):
        sizes = draw(
            st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=0, max_size=4)
        )
        shape = tuple(map(sum, sizes))
        edges = [[0, *itertools.accumulate(part)] for part in sizes]
        pieces = {}
        known: dict[tuple[int, ...], tuple[tuple[int, ...], AffineView]] = {}
        for cell in itertools.product(*(range(len(part)) for part in sizes)):
            start = tuple(e[c] for e, c in zip(edges, cell, strict=True))
            stop = tuple(e[c + 1] for e, c in zip(edges, cell, strict=True))
            box = Box(start, stop)
            if box.shape not in known or draw(st.booleans()):
                known[box.shape] = draw(views(box.shape))
            base, view = known[box.shape]
            alike = [name for name, tensor in tensors.items() if tensor.shape == base]
            name = draw(st.sampled_from(alike)) if alike and draw(st.booleans()) else None
            if name is None:
                name = f"t{len(tensors)}"
                tensors[name] = random_tensor(base, dtype, len(tensors))
            pieces[box] = Piece(name, box.shape, view)
        specs.append((shape, pieces, draw(local_boxes(shape))))
    return tensors, specs


def leaf_read(number, shape, pieces, local, entries) -> LeafRead:
    sources = tuple(TensorPiece(entries[p.tensor], box, p.view) for box, p in pieces.items())
    stored = sources[0].entry.dtype
    return LeafRead(f"leaf{number}", shape, stored, sources, local, stored.numpy)


def expected_leaf(shape, pieces, tensors):
    first = next(iter(tensors.values()))
    expected = np.empty(shape, first.dtype)
    for box, piece in pieces.items():
        expected[box.slices] = piece.of(tensors[piece.tensor])
    return expected


def needed_bytes(pieces, local, entries, itemsize) -> set[tuple[str, int]]:
    """Brute force: the same views of the tensors' element numbers."""
    needed = set()
    for box, piece in pieces.items():
        entry = entries[piece.tensor]
        numbers = piece.of(np.arange(math.prod(entry.shape)).reshape(entry.shape))
        for local_box in local.boxes:
            both = box.intersect(local_box) if box.start else box
            if both is not None:
                inside = tuple(
                    slice(a - o, z - o)
                    for a, z, o in zip(both.start, both.stop, box.start, strict=True)
                )
                needed.update(
                    (entry.file, entry.start + int(n) * itemsize + i)
                    for n in np.unique(numbers[inside])
                    for i in range(itemsize)
                )
    return needed


CASES = (
    leaves(),
    st.integers(1, 3),
    st.sampled_from([0.0, 1e-8, 1e-5]),
    st.sampled_from([1, 7, 64, 1000, 1 << 20]),
    st.sampled_from([None, 1, 100, 1000]),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(*CASES)
def test_every_box_is_what_numpy_makes_of_it(case, files, latency, most_bytes, budget):
    check(case, files, latency, most_bytes, budget)


@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
@given(*CASES)
def test_so_it_is_where_small_regions_are_treated_as_large_ones(
    case, files, latency, most_bytes, budget
):
    """Padded rows, blocks cut in two dimensions, scattered reads, copies taken apart."""
    with (
        mock.patch.multiple(regions, _CONFLICT_BYTES=1, _LINE_BYTES=8, _LEAST_REQUEST_BYTES=1),
        mock.patch.object(regions, "_DIRECT_SPAN_BYTES", 1),
        mock.patch.object(coalesce, "_MAX_UNPADDED_BYTES", 0),
        mock.patch.object(staged_blocks, "_LONG_LOOP", 2),
    ):
        check(case, files, latency, most_bytes, budget)


def check(case, files, latency, most_bytes, budget):
    tensors, specs = case
    profile = StorageProfile(
        latency_seconds=latency,
        bandwidth_bytes_per_second=2.4e9,
        request_bytes=most_bytes,
        staging_bytes=most_bytes,
        concurrency=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), tensors, files=min(files, len(tensors)))
        with Catalog.open(path) as catalog:
            entries = catalog.all_entries()
        reads = [
            leaf_read(number, shape, pieces, local, entries)
            for number, (shape, pieces, local) in enumerate(specs)
        ]
        plan = plan_reads(
            reads, profile=profile, memory_budget_bytes=budget or 1 << 30, adopt=budget is None
        )
        with RecordingStorage() as storage:
            values = read_all(plan, storage)
            ranges = storage.ranges
    for number, (shape, pieces, local) in enumerate(specs):
        expected = expected_leaf(shape, pieces, tensors)
        for index, box in enumerate(local.boxes):
            assert_same_bits(values.pop((number, index)), expected[box.slices])
    assert not values
    cost = plan.cost()
    assert cost.requests == len(ranges)
    if not latency:
        itemsize = next(iter(tensors.values())).itemsize
        needed = set().union(*(needed_bytes(p, b, entries, itemsize) for _, p, b in specs))
        read = [(file, byte) for file, a, z in ranges for byte in range(a, z)]
        assert set(read) == needed
        assert {(f, b) for f, a, z in plan.ranges() for b in range(a, z)} == needed
        assert len(needed) <= len(read) == cost.read_bytes <= cost.needed_bytes
