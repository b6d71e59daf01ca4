"""Which part of the files each process reads: a picture of a fleet, in bins."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .cluster import ClusterPlan


class Coverage(NamedTuple):
    """How much of each part of the files each process reads.

    Attributes:
        read: [processes, bins] the share of a bin's bytes that is read, from 0 to 1.
        needed: [processes, bins] the share that the shards consist of.
        edges: Name and first byte of each file, with all files one after the other.
        tensors: Name, first byte and length of each tensor.
        total_bytes: Bytes of all files' tensors.
    """

    read: npt.NDArray[np.float64]
    needed: npt.NDArray[np.float64]
    edges: tuple[tuple[str, int], ...]
    tensors: tuple[tuple[str, int, int], ...]
    total_bytes: int


def coverage(
    fleet: ClusterPlan, processes: Sequence[int], bins: int, *, files: str = "*"
) -> Coverage:
    """What some processes read of a fleet's tensors.

    A region that is read in several runs is spread evenly over its span.

    Args:
        fleet: The fleet.
        processes: The processes.
        bins: Into how many parts of equal size the files, one after the other, are cut.
        files: Glob pattern of the names of the files that count.
    """
    chosen = [
        (file, tensors)
        for file, tensors in fleet.files()
        if fnmatch.fnmatchcase(file.rpartition("/")[2], files)
    ]
    distinct, rows = np.unique(fleet.distinct[list(processes)], return_inverse=True)
    row_of = np.full(len(fleet.costs), -1)
    row_of[distinct] = np.arange(len(distinct))
    total = sum(entry.nbytes for _, tensors in chosen for entry, _ in tensors)
    width = max(total, 1) / bins
    read, needed = np.zeros((2, len(distinct), bins))
    edges, places = [], []
    at = 0
    for file, tensors in chosen:
        edges.append((file, at))
        for entry, kind in tensors:
            for shape in kind.shapes:
                row = row_of[shape.processes]
                mine = np.flatnonzero(row >= 0)
                for fetch in shape.fetches:
                    start = at + fetch.start + shape.shift[mine]
                    span = fetch.spread_bytes + fetch.read.requests.stop
                    nbytes, _ = fetch.cost(fleet.profile)
                    own = sum(region.read.runs.total_bytes for region in fetch.regions)
                    _spread(read, row[mine], start, span, nbytes, width)
                    _spread(needed, row[mine], start, span, own, width)
            places.append((entry.name, at, entry.nbytes))
            at += entry.nbytes
    rows = rows.reshape(-1)
    return Coverage(
        (read / width)[rows], (needed / width)[rows], tuple(edges), tuple(places), total
    )


def _spread(
    read: npt.NDArray[np.float64],
    row: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    span: int,
    nbytes: int,
    width: float,
) -> None:
    """Adds `nbytes` to the bins of `width` bytes that `span` bytes from each `start` on touch."""
    if not span or not len(row):
        return
    first, last = start / width, (start + span) / width
    most = read.shape[1] - 1
    low, high = np.minimum(first.astype(int), most), np.minimum(last.astype(int), most)
    density = nbytes / span * width
    for step in range(int((high - low).max()) + 1):
        number = np.minimum(low + step, high)
        inside = np.minimum(last, number + 1) - np.maximum(first, number)
        weight = np.where(low + step <= high, np.maximum(inside, 0.0), 0.0)
        np.add.at(read, (row, number), weight * density)
