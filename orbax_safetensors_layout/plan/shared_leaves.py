"""Finds the arrays that several processes need bytes of, and how these may be read once.

Columns of a matrix of short rows are read through the gaps between them, so N processes would read
everything N times. Boxes that are neighbours in the rows of a file are therefore merged, read in
contiguous parts, each by one process, and exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.sharding import ReplicaGrid, Replicas

from .exchange_rounds import ExchangeLimits, SharedLeaf, rank_of


class SharedLeaves:
    """The leaves of a load that an exchange may take; `merges` columns."""

    def __init__(self, limits: ExchangeLimits, *, merges: bool) -> None:
        self._limits = limits
        self._merges = merges
        self._leaves: list[SharedLeaf] = []
        # By what arrays have in common; the key keeps the replicas, so an id stays its own.
        self._merged: dict[tuple[object, ...], tuple[Replicas, Any]] = {}

    def __iter__(self) -> Iterator[SharedLeaf]:
        return iter(self._leaves)

    def add(
        self,
        number: int,
        replicas: Replicas,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype,
        place: tuple[str, int],
        *,
        in_device_memory: bool = True,
        tied: tuple[int, ...] = (),
    ) -> None:
        """Adds a leaf, if several processes need the same of it; the fields of `SharedLeaf`."""
        is_direct = in_device_memory and stays_on_devices(dtype)
        key = (id(replicas), shape, strides, dtype.itemsize, is_direct)
        if key not in self._merged:
            most = None if is_direct else self._limits.round_bytes // dtype.itemsize
            gap_bytes = self._limits.gap_bytes
            merged = _merge_boxes(replicas, shape, strides, gap_bytes, most) if self._merges else None
            self._merged[key] = replicas, merged
        _, merged = self._merged[key]
        if merged is not None or replicas.grid.is_shared:
            boxes, cut_axes = merged or (replicas, ())
            leaf = SharedLeaf(number, boxes, dtype, is_direct, place, strides, cut_axes, tied)
            self._leaves.append(leaf)


def stays_on_devices(dtype: np.dtype) -> bool:
    """Whether bits become values of a dtype on the device; others pass through the host.

    Not complex numbers, booleans, elements of less than a byte, nor of eight, which not all
    backends take apart.
    """
    name = dtype.name
    is_plain = dtype.type.__module__ == "numpy" and dtype.kind in "iuf" and dtype.itemsize <= 4
    return is_plain or name == "bfloat16" or name.startswith("float8")


def _merge_boxes(
    replicas: Replicas,
    shape: Sequence[int],
    strides: Sequence[int],
    gap_bytes: int,
    most_elements: int | None,  # of merged boxes that pass through the host, whole
) -> tuple[Replicas, tuple[int, ...]] | None:
    """Merges boxes; returns the axes of which a device keeps its part. None if no gaps are read."""
    axes = _cut_axes(replicas.boxes[0].shape, shape, strides, gap_bytes)
    if not axes:
        return None
    merged: dict[Box, list[tuple[tuple[int, ...], int]]] = {}
    for row, box in enumerate(replicas.boxes):
        wide = box
        for axis in axes:
            wide = wide.along(axis, 0, shape[axis])
        place = tuple(box.start[axis] for axis in axes)
        merged.setdefault(wide, []).append((place, row))
    cuts = tuple(shape[axis] // replicas.boxes[0].shape[axis] for axis in axes)
    if any(len(rows) != math.prod(cuts) for rows in merged.values()):
        return None  # each process holds only a part of the array
    boxes = sorted(merged)
    rows = [[row for _, row in sorted(merged[box])] for box in boxes]
    old = replicas.grid

    def in_turn(values: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
        columns = (zip(*[values[row] for row in of_box], strict=True) for of_box in rows)
        return tuple(tuple(itertools.chain.from_iterable(of_box)) for of_box in columns)

    grid = ReplicaGrid(in_turn(old.devices), in_turn(old.processes), cuts)
    if not grid.parts_processes:
        return None
    if most_elements is None:
        return Replicas(tuple(boxes), grid), axes
    uncut = Replicas(tuple(boxes), grid._replace(cuts=()))
    return (uncut, ()) if boxes[0].size <= most_elements else None


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
