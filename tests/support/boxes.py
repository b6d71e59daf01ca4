"""Boxes: the cells of grids, and any inside a shape."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from orbax_safetensors_layout.geometry import Box


def grid_boxes(shape: Sequence[int], grid: Sequence[int]) -> Iterator[Box]:
    """The equal cells that divide a shape, in C order."""
    parts = [n // g for n, g in zip(shape, grid, strict=True)]
    for cell in itertools.product(*map(range, grid)):
        start = tuple(i * n for i, n in zip(cell, parts, strict=True))
        yield Box(start, tuple(a + n for a, n in zip(start, parts, strict=True)))


@st.composite
def boxes_in(draw, shape: Sequence[int]) -> Box:
    """Any box inside a shape that has elements."""
    start = [draw(st.integers(0, n - 1)) for n in shape]
    stop = [draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
    return Box(tuple(start), tuple(stop))
