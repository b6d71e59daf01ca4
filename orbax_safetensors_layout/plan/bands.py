"""Bands: boxes that are neighbours in the rows of a file, read together by all that hold them.

A process that reads the columns of a matrix of short rows reads through the gaps between them, and
so the columns of all others: cheaper for it than a request a row, but N processes then read
everything N times. Where each byte is to be read once, such boxes are one band, read in contiguous
parts, each by one process, and exchanged among the devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.sharding import ReplicaGrid, Replicas

from .exchange_rounds import rank_of


class Bands(NamedTuple):
    """The bands of an array.

    Attributes:
        replicas: The bands, and the devices that hold a part of each; see `ReplicaGrid.cuts`.
        axes: The dimensions along which a band is made of several boxes.
    """

    replicas: Replicas
    axes: tuple[int, ...]

    def uncut(self) -> Bands:
        """Return the same where every device gathers whole bands, and the host takes parts."""
        return Bands(self.replicas._replace(grid=self.replicas.grid._replace(cuts=())), ())


def bands_of(
    replicas: Replicas, shape: Sequence[int], strides: Sequence[int], gap_bytes: int
) -> Bands | None:
    """Return the bands of an array whose boxes would be read through gaps; None without any.

    Args:
        replicas: Its boxes; all of one shape.
        shape: Its shape.
        strides: Its byte strides in the file.
        gap_bytes: The longest gap that is read through.
    """
    axes = _cut_axes(replicas.boxes[0].shape, shape, strides, gap_bytes)
    if not axes:
        return None
    bands: dict[Box, list[tuple[tuple[int, ...], int]]] = {}
    for row, box in enumerate(replicas.boxes):
        start, stop = list(box.start), list(box.stop)
        for axis in axes:
            start[axis], stop[axis] = 0, shape[axis]
        place = tuple(box.start[axis] for axis in axes)
        bands.setdefault(Box(tuple(start), tuple(stop)), []).append((place, row))
    cuts = tuple(shape[axis] // replicas.boxes[0].shape[axis] for axis in axes)
    if any(len(rows) != math.prod(cuts) for rows in bands.values()):
        return None  # each process holds only a part of the array
    wide = sorted(bands)
    rows = [[row for _, row in sorted(bands[band])] for band in wide]
    old = replicas.grid
    grid = ReplicaGrid(
        tuple(_in_turn([old.devices[row] for row in band]) for band in rows),
        tuple(_in_turn([old.processes[row] for row in band]) for band in rows),
        cuts,
    )
    return Bands(Replicas(tuple(wide), grid), axes) if grid.parts_processes else None


def _cut_axes(
    box: Sequence[int], shape: Sequence[int], strides: Sequence[int], gap_bytes: int
) -> tuple[int, ...]:
    """Return the split dimensions along which a box has short gaps with the values of others."""
    axes = []
    rank = rank_of(strides)
    for at, axis in enumerate(rank):
        repeats = any(box[outer] > 1 for outer in rank[:at])
        gap = strides[axis] * (shape[axis] - box[axis])
        if repeats and 0 < gap <= gap_bytes:
            axes.append(axis)
    return tuple(axes)


def _in_turn(rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(zip(*rows, strict=True)))
