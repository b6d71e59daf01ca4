"""Leaves whose pieces overlap or interlace in their tensor, against what numpy makes of them."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from accelerators import Accelerator
from checkpoints import assert_same_bits, save
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from meshes import any_sharding, mesh_of

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.format import DTYPES, TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box, Gather
from orbax_safetensors_layout.options import PROFILES
from orbax_safetensors_layout.plan import LeafRead
from orbax_safetensors_layout.plan.leaf_reads import TensorPiece
from orbax_safetensors_layout.plan.planner import RegionPlanner
from orbax_safetensors_layout.sharding import AddressableShards

TINY = osl.ReadOptions(memory_budget_bytes=1 << 12, request_bytes=1 << 12)
NO_GAPS = osl.ReadOptions(latency_seconds={"local": 0.0})
OPTIONS = {
    "default": osl.ReadOptions(),
    "without gaps": NO_GAPS,
    "tiny": TINY,
    "tiny, without gaps": osl.ReadOptions(
        memory_budget_bytes=1 << 12, request_bytes=1 << 12, latency_seconds={"local": 0.0}
    ),
}
CASTS = [(np.float32, ml_dtypes.bfloat16), (np.int32, np.float32), (np.uint8, np.int32)]
STEPS = [
    "windows",
    "windows",
    "again",
    "again",
    "stack",
    "take",
    "fold",
    "slice",
    "transpose",
    "merge",
]
EXTENTS = [1, 2, 3, 8, 12, 24, 48, 64, 96]
MOST = 1 << 15


def restored(tensors, expr, array, *, sharding=None, dtype=None, options=None):
    leaf = jax.ShapeDtypeStruct(array.shape, dtype or array.dtype, sharding=sharding)
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), tensors)
        mapping = osl.Mapping([osl.rule("leaf", expr)])
        return osl.load(path, {"leaf": leaf}, mapping=mapping, options=options)["leaf"]


@st.composite
def ranges_in(draw, extent):
    """Indices as a few ranges, that overlap or come again."""
    indices: list[int] = []
    length = draw(st.integers(1, extent))
    for _ in range(draw(st.integers(2, 4))):
        start = draw(st.integers(0, extent - 1))
        step = draw(st.sampled_from([1, 1, 1, 2, -1]))
        indices += range(extent)[start::step][:length]
    return indices


@st.composite
def windows_in(draw, shape, axis):
    """Indices of windows of an axis, which overlap, and the shape with a row for each."""
    extent = shape[axis]
    length = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
    step = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, 32) if n <= length]))
    count = min(draw(st.integers(2, 4)), (extent - length) // step + 1)
    indices = [step * number + i for number in range(count) for i in range(length)]
    return indices, (*shape[:axis], count, length, *shape[axis + 1 :])


@st.composite
def overlapping(draw):
    """A tensor, an expression that has its elements several times, and the array of numpy."""
    shape = draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3))
    while math.prod(shape) > MOST:
        shape[shape.index(max(shape))] = 4
    stored, _ = dtypes = draw(st.sampled_from(CASTS))
    tensor = (np.arange(math.prod(shape)) % 251).astype(stored).reshape(shape)
    expr, array = osl.tensor("t"), tensor
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=6)):
        rank = array.ndim
        axis = draw(st.integers(0, rank - 1))
        extent, above = array.shape[axis], (slice(None),) * axis
        start = draw(st.integers(0, extent - 1))
        stop = draw(st.integers(start + 1, extent))
        if step == "windows":
            indices, folded = draw(windows_in(array.shape, axis))
            if array.size // extent * len(indices) <= MOST:
                expr = expr.take(axis, indices).reshape(*folded)
                array = np.take(array, indices, axis).reshape(folded)
        elif step == "take":
            indices = draw(ranges_in(extent))
            if array.size // extent * len(indices) <= MOST:
                expr, array = expr.take(axis, indices), np.take(array, indices, axis)
        elif step == "fold":
            inner = draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
            folded = (*array.shape[:axis], extent // inner, inner, *array.shape[axis + 1 :])
            expr, array = expr.reshape(*folded), array.reshape(folded)
        elif step == "merge" and rank > 1:
            axis = min(axis, rank - 2)
            merged = (*array.shape[:axis], -1, *array.shape[axis + 2 :])
            array = array.reshape(merged)
            expr = expr.reshape(*array.shape)
        elif step == "again" and 2 * array.size <= MOST:
            parts = [
                (expr, array),
                (expr.slice(axis, start, stop), array[(*above, slice(start, stop))]),
            ]
            parts = parts if draw(st.booleans()) else parts[::-1]
            expr = osl.concat([part for part, _ in parts], axis)
            array = np.concatenate([part for _, part in parts], axis)
        elif step == "stack" and 2 * array.size <= MOST:
            cell = (*array.shape[:axis], 1, *array.shape[axis:])
            turned = expr.slice(axis, None, None, -1) if draw(st.booleans()) else expr
            other = array if turned is expr else np.flip(array, axis)
            expr = osl.concat([expr.reshape(*cell), turned.reshape(*cell)], axis)
            array = np.stack([array, other], axis)
        elif step == "slice":
            by = draw(st.sampled_from([1, 2, 3]))
            expr, array = expr.slice(axis, start, stop, by), array[(*above, slice(start, stop, by))]
        elif step == "transpose":
            axes = draw(st.permutations(range(rank)))
            expr, array = expr.transpose(*axes), array.transpose(axes)
    return {"t": tensor}, expr, np.ascontiguousarray(array), draw(st.sampled_from(dtypes))


def check_any(data):
    tensors, expr, array, dtype = data.draw(overlapping())
    options = OPTIONS[data.draw(st.sampled_from([*OPTIONS]))]
    sharding = any_sharding(data, array.shape)
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            Accelerator(patch)
        loaded = restored(tensors, expr, array, sharding=sharding, dtype=dtype, options=options)
    assert_same_bits(np.asarray(loaded), array.astype(dtype))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_numpy_makes_of_any_expression(data):
    check_any(data)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_numpy_makes_of_many_expressions(data):
    check_any(data)


def windows(columns, starts, length):
    """Windows of the columns, which overlap, each a row of its own."""
    indices = [start + i for start in starts for i in range(length)]
    rows = columns.shape[0]
    shape = rows, len(starts), length
    return osl.tensor("t").take(1, indices).reshape(*shape), columns[:, indices].reshape(shape)


def test_windows_that_overlap_and_come_again():
    columns = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    expr, array = windows(columns, (0, 16, 32), 32)
    expr = osl.concat([expr, expr.slice(1, 0, 2)], 1)
    expected = np.concatenate([array, array[:, :2]], 1)
    assert_same_bits(np.asarray(restored({"t": columns}, expr, expected)), expected)


@pytest.mark.parametrize("on", ["cpu", "accelerator"])
def test_windows_of_more_rows_than_the_budget_holds(monkeypatch, on):
    """Each part of the rows is written to: of memory that nothing was read into, nothing comes."""
    rows, again = 16_640, 512
    columns = np.random.default_rng(0).integers(1, 100, (rows, 48)).astype(np.float32)
    expr, array = windows(columns, (0, 16), 32)
    expr = osl.concat([expr, expr.slice(0, 0, again)], 0)
    expected = np.concatenate([array, array[:again]])
    dtype = np.dtype(ml_dtypes.bfloat16 if on == "cpu" else np.float32)
    sharding = None
    if on == "accelerator":
        Accelerator(monkeypatch)
        sharding = NamedSharding(mesh_of(x=8), PartitionSpec("x"))
    request = {"sharding": sharding, "dtype": dtype}
    options = osl.ReadOptions(memory_budget_bytes=256 << 10)
    loaded = restored({"t": columns}, expr, expected, **request, options=options)
    assert_same_bits(np.asarray(loaded), expected.astype(dtype))


def test_a_part_that_no_piece_fills_is_refused():
    """Pieces that say they are where they do not lie: the second box would have no bytes."""
    entry = TensorEntry("t", DTYPES["F32"], (4,), "f", 0, 16)
    slabs = Gather(0, np.arange(4), np.arange(4)[::-1].copy())
    piece = TensorPiece(entry, Box((0,), (1,)), AffineView(0, (1,), (1,)), slabs)
    shards = AddressableShards.private((Box((0,), (2,)), Box((2,), (4,))))
    read = LeafRead("leaf", (4,), entry.dtype, (piece,), shards, np.dtype(np.float32))
    planner = RegionPlanner(PROFILES["local"], 8, adopt=False)
    with pytest.raises(osl.MismatchError, match="do not fill a part of it") as caught:
        planner.regions(0, read)
    assert (caught.value.tensor, caught.value.file, caught.value.found) == ("leaf", "f", 0)
