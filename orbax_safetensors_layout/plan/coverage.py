"""The bytes of a checkpoint's files that each process of a cluster needs, and those it reads."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.geometry import Ints

from .cluster import ClusterPlan


class Coverage(NamedTuple):
    """The share of each bin of the concatenated files that each process reads."""

    read: npt.NDArray[np.float64]  # [processes, bins] the share of a bin's bytes that is read
    needed: npt.NDArray[np.float64]  # [processes, bins] the share that the shards consist of
    edges: tuple[tuple[str, int], ...]  # name and first byte of each file
    tensors: tuple[tuple[str, int, int], ...]  # name, first byte and length of each tensor
    total_bytes: int  # bytes of all files' tensors


def coverage(
    cluster: ClusterPlan, processes: Sequence[int], bins: int, *, files: str = "*"
) -> Coverage:
    """Return the coverage of the files of a glob; runs count as evenly over their span."""
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
    exchanged = {id(cluster.classes[number]) for number in cluster.exchanged}
    for file, tensors in chosen:
        edges.append((file, at))
        for entry, tensor_class in tensors:
            if once := id(tensor_class) in exchanged:
                holding, count = cluster.holders(tensor_class)
                row = row_of[holding][row_of[holding] >= 0]
                start = np.full(len(row), at)
                _add_bytes(read, row, start, entry.nbytes, entry.nbytes // count, width)
            for shards in tensor_class.shard_classes:
                row = row_of[shards.processes]
                own_rows = np.flatnonzero(row >= 0)
                for alone in shards.requests:
                    request = alone.request
                    start = at + request.start + shards.shift[own_rows]
                    span = request.added_bytes + request.read.requests.stop
                    if not once:
                        _add_bytes(read, row[own_rows], start, span, alone.read_bytes, width)
                    _add_bytes(needed, row[own_rows], start, span, request.needed_bytes, width)
            places.append((entry.name, at, entry.nbytes))
            at += entry.nbytes
    rows = rows.reshape(-1)
    return Coverage(
        (read / width)[rows], (needed / width)[rows], tuple(edges), tuple(places), total
    )


def _add_bytes(
    shares: npt.NDArray[np.float64], row: Ints, start: Ints, span: int, nbytes: int, width: float
) -> None:
    """Adds `nbytes` to the bins of `width` bytes that `span` bytes from each `start` on overlap."""
    if not span or not len(row):
        return
    first, last = start / width, (start + span) / width
    most = shares.shape[1] - 1
    low, high = np.minimum(first.astype(int), most), np.minimum(last.astype(int), most)
    density = nbytes / span * width
    for step in range(int((high - low).max()) + 1):
        number = np.minimum(low + step, high)
        inside = np.minimum(last, number + 1) - np.maximum(first, number)
        weight = np.where(low + step <= high, np.maximum(inside, 0.0), 0.0)
        np.add.at(shares, (row, number), weight * density)
