"""Bins the files of a cluster plan: the share of each bin that each process reads and needs."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .cluster import ClusterPlan


class Coverage(NamedTuple):
    """The share of each bin of the concatenated files that each process reads."""

    # [processes, bins] the share of a bin's bytes that is read, from 0 to 1.
    read: npt.NDArray[np.float64]
    needed: npt.NDArray[np.float64]  # [processes, bins] the share that the shards consist of
    edges: tuple[tuple[str, int], ...]  # name and first byte of each file
    tensors: tuple[tuple[str, int, int], ...]  # name, first byte and length of each tensor
    total_bytes: int  # bytes of all files' tensors


def coverage(
    cluster: ClusterPlan, processes: Sequence[int], bins: int, *, files: str = "*"
) -> Coverage:
    """Return the coverage of some processes, in `bins` of equal size.

    Files whose name does not match the glob pattern `files` do not count. A region that is read in
    several runs is spread evenly over its span.
    """
    chosen = [
        (file, tensors)
        for file, tensors in cluster.files
        if fnmatch.fnmatchcase(file.rpartition("/")[2], files)
    ]
    distinct, rows = np.unique(cluster.distinct[list(processes)], return_inverse=True)
    row_of = np.full(len(cluster.costs), -1)
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
                own_rows = np.flatnonzero(row >= 0)
                for fetch in shape.fetches:
                    start = at + fetch.start + shape.shift[own_rows]
                    span = fetch.spread_bytes + fetch.read.requests.stop
                    nbytes, _ = fetch.cost(cluster.profile)
                    _spread(read, row[own_rows], start, span, nbytes, width)
                    _spread(needed, row[own_rows], start, span, fetch.needed_bytes, width)
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
    """Adds `nbytes` to the bins of `width` bytes that `span` bytes from each `start` on overlap."""
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
