"""Copies of transposed arrays against numpy's own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from orbax_safetensors_layout.geometry import copy_elements

DTYPES = [np.uint8, np.bool_, np.int16, ml_dtypes.bfloat16, np.float32, np.int64, np.complex128]


def filled(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    memory = np.random.default_rng(0).integers(0, 2, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return memory.view(dtype).reshape(shape)


@st.composite
def strided(draw, shape):
    """A part of a larger array, of a shape, with its axes in any order, steps and directions."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    before = [draw(st.sampled_from([0, 0, 3])) for _ in shape]
    extents = [before[a] + (shape[a] * abs(steps[a])) for a in order]
    whole = np.transpose(
        filled(tuple(extents), draw(st.shared(st.sampled_from(DTYPES), key="d"))),
        np.argsort(order) if shape else (),
    )
    inner = whole[(*(slice(b, None) for b in before), ...)]
    return inner[(*(slice(None, None, step) for step in steps), ...)]


sizes = st.sampled_from([1, 2, 3, 7, 8, 33, 64, 100, 257])
shapes = st.lists(sizes, max_size=5).map(tuple).filter(lambda shape: np.prod(shape) <= 300_000)


@settings(max_examples=300)
@given(st.data(), shapes)
def test_any_two_arrays(data, shape):
    target, source = data.draw(strided(shape)), data.draw(strided(shape))
    expected = source.copy()
    copy_elements(target, source)
    assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [(1, 0, 2), (2, 1, 0), (2, 0, 1), (0, 2, 1)])
@pytest.mark.parametrize("shape", [(3, 700, 300), (512, 2, 257), (1024, 1024, 1), (2049, 5, 64)])
def test_transposed(shape, axes, dtype):
    source = filled(shape, dtype).transpose(axes)
    target = np.empty(source.shape, dtype)
    copy_elements(target, source)
    assert target.tobytes() == source.tobytes()
    back = np.empty(shape, dtype).transpose(axes)
    copy_elements(back, target)
    assert back.tobytes() == target.tobytes()


def test_repeated_and_other_dtypes():
    row = np.arange(50_000, dtype=np.float32)
    target = np.empty((50_000, 3), np.float32)
    copy_elements(target, np.broadcast_to(row[:, None], target.shape))
    assert (target == row[:, None]).all()
    halves = np.empty((3, 50_000), np.float16)
    copy_elements(halves.T, target * 0 + 2)
    assert (halves == 2).all()


def test_what_lies_between_strides_is_kept():
    target = np.zeros((600, 600), np.int16)
    copy_elements(target[1::2, ::3], np.ones((200, 300), np.int16).T)
    expected = np.zeros((600, 600), np.int16)
    expected[1::2, ::3] = 1
    assert (target == expected).all()
