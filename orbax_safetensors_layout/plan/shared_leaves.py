"""Finds the arrays that several processes need bytes of, and how these may be read once.

Columns of a matrix of short rows are read through the gaps between them, so N processes would read
everything N times. Boxes that are neighbours in the rows of a file are therefore merged, read in
contiguous parts, each by one process, and exchanged.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.sharding import ReplicaGrid, Replicas

from .exchange_plan import ExchangePolicy, rank_of
from .exchange_rounds import SharedLeaf


class _Merged(NamedTuple):
    """Boxes of which devices keep their parts; all but the first as in `SharedLeaf`."""

    replicas: Replicas
    shape: tuple[int, ...]
    cut_axes: tuple[int, ...] = ()
    share: float = 1.0
    row_requests: int = 0  # a request for each row; if 0, gaps between rows are read through
    is_merged: bool = True


class SharedLeaves:
    """The leaves of a load that an exchange may take; with `merges` also columns."""

    def __init__(self, exchange: ExchangePolicy, *, merges: bool) -> None:
        self._exchange = exchange
        self._merges = merges
        self._leaves: list[SharedLeaf] = []
        # By what arrays have in common; the value keeps the replicas, so an id stays its own.
        self._merged: dict[tuple[object, ...], tuple[Replicas, _Merged | None]] = {}

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
        stored_bytes: int,
        in_device_memory: bool = True,
        tied: tuple[int, ...] = (),
        joint_axes: tuple[int, ...] = (),
        is_decoded: bool = False,
    ) -> None:
        """Adds a leaf of `stored_bytes`, if several processes need the same of it.

        Of one that `is_decoded` all boxes are held until they are complete. The others are fields
        of `SharedLeaf`.
        """
        is_direct = in_device_memory and stays_on_devices(dtype)
        key = (id(replicas), shape, strides, dtype.itemsize, is_direct, is_decoded)
        if key not in self._merged:
            limits = self._exchange.limits
            most = None if is_direct else limits.round_bytes // dtype.itemsize
            together = sys.maxsize if is_decoded else limits.together_bytes // dtype.itemsize
            self._merged[key] = replicas, self._merge(replicas, shape, strides, most, together)
        _, merged = self._merged[key]
        if merged is not None:
            boxes, box_shape, cut_axes, share, requests, is_merged = merged
            array = number, boxes, box_shape, dtype, is_direct, place, strides
            stored = stored_bytes / (math.prod(shape) * dtype.itemsize)
            if not requests and _gap_bytes(replicas.boxes[0].shape, shape, strides):
                box_bytes = stored_bytes / len(boxes.boxes)
                requests = int(box_bytes * share / self._exchange.limits.gap_request_bytes)
            cost = share, requests, 0 if is_merged else requests, stored
            self._leaves.append(SharedLeaf(*array, cut_axes, tied, joint_axes, *cost))

    def _merge(
        self,
        replicas: Replicas,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        most_elements: int | None,  # of merged boxes that pass through the host, whole
        together: int,  # elements of boxes of a process that are read together
    ) -> _Merged | None:
        """Merges boxes between whose rows are gaps that would be read, or many requests made."""
        is_shared = replicas.grid.is_shared
        short = self._exchange.limits.gap_bytes
        by_cost = self._exchange.rates is not None and not is_shared
        box = replicas.boxes[0].shape
        gaps = _gap_bytes(box, shape, strides)
        # A process reads what its devices need between them.
        own = _gap_bytes(_held_shape(replicas), shape, strides)
        near = (axis for axis, gap in gaps.items() if own.get(axis, gap) <= short)
        considered = [tuple(near)]
        if by_cost:
            least = min((gap for gap in own.values() if gap > short), default=0)
            considered.append(tuple(axis for axis, gap in own.items() if gap <= least))
        for number, axes in enumerate(considered if self._merges else []):
            merged = _merge_boxes(replicas, shape, axes) if axes else None
            if merged is None:
                continue
            alone: tuple[float, int] = (1.0, 0)
            if not merged.grid.parts_processes:
                times = _times_read(replicas, merged.grid.cuts, together)
                if number or times == 1:
                    continue
                alone = float(times), 0
            elif number:
                alone = merged.grid.own_share, _rows(box, strides, axes)
            if most_elements is None:
                return _Merged(merged, merged.boxes[0].shape, axes, *alone)
            if merged.boxes[0].size <= most_elements:
                uncut = merged._replace(grid=merged.grid._replace(cuts=()))
                return _Merged(uncut, uncut.boxes[0].shape, (), *alone)
        if not is_shared:
            return None
        rows = _rows(box, strides, [axis for axis, gap in own.items() if gap > short])
        return _Merged(replicas, box, row_requests=rows, is_merged=False)


@functools.lru_cache
def stays_on_devices(dtype: np.dtype) -> bool:
    """Whether bits become values of a dtype on the device; others pass through the host.

    Not complex numbers, booleans, elements of less than a byte, nor of eight, which not all
    backends take apart.
    """
    name = dtype.name
    is_plain = dtype.type.__module__ == "numpy" and dtype.kind in "iuf" and dtype.itemsize <= 4
    return is_plain or name == "bfloat16" or name.startswith("float8")


def _merge_boxes(replicas: Replicas, shape: Sequence[int], axes: Sequence[int]) -> Replicas | None:
    """Merges boxes along axes; returns None where these are only a part of the array."""
    merged: dict[Box, list[tuple[tuple[int, ...], int]]] = {}
    for row, box in enumerate(replicas.boxes):
        wide = box
        for axis in axes:
            wide = wide.along(axis, 0, shape[axis])
        place = tuple(box.start[axis] for axis in axes)
        merged.setdefault(wide, []).append((place, row))
    cuts = tuple(shape[axis] // replicas.boxes[0].shape[axis] for axis in axes)
    if any(len(rows) != math.prod(cuts) for rows in merged.values()):
        return None
    boxes = sorted(merged)
    rows = [[row for _, row in sorted(merged[box])] for box in boxes]

    def in_turn(values: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
        columns = (zip(*[values[row] for row in of_box], strict=True) for of_box in rows)
        return tuple(tuple(itertools.chain.from_iterable(of_box)) for of_box in columns)

    old = replicas.grid
    return Replicas(tuple(boxes), ReplicaGrid(in_turn(old.devices), in_turn(old.processes), cuts))


def _times_read(replicas: Replicas, cuts: Sequence[int], together: int) -> int:
    """Return how often a process reads the rows of its boxes, of which so much fits at once."""
    fit = max(1, together // replicas.boxes[0].size)
    return -(-min(math.prod(cuts), replicas.grid.most_boxes) // fit)


def _rows(box: Sequence[int], strides: Sequence[int], axes: Collection[int]) -> int:
    """Counts the rows of a box between which it has gaps along some axes; without axes 0."""
    if not axes:
        return 0
    inner = min(strides[axis] for axis in axes)
    return math.prod(n for n, stride in zip(box, strides, strict=True) if stride > inner)


def _held_shape(replicas: Replicas) -> tuple[int, ...]:
    """Return how many indices of each dimension the boxes of a process have."""
    process = replicas.grid.processes[0][0]
    rows = zip(replicas.boxes, replicas.grid.processes, strict=True)
    own = [box for box, processes in rows if process in processes]
    starts = zip(*(box.start for box in own), strict=True)
    return tuple(len({*of_axis}) * n for of_axis, n in zip(starts, own[0].shape, strict=True))


def _gap_bytes(box: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> dict[int, int]:
    """Return the split dimensions along which a box has gaps with values of others: their bytes."""
    gaps = {}
    rank = rank_of(strides)
    for at, axis in enumerate(rank):
        repeats = any(box[outer] > 1 for outer in rank[:at])
        gap = strides[axis] * (shape[axis] - box[axis])
        if repeats and 0 < gap < sys.maxsize:
            gaps[axis] = gap
    return gaps
