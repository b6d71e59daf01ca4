"""Costs of all processes of a cluster as vectors, added up class by class and file by file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.sharding import Ints, Spec

from .coalesce import MAX_GROUP_BUFFERS, Request, SmallRequest
from .cost import Cost
from .reads import staging_bytes


class ClusterTensor(NamedTuple):
    """One tensor that is loaded as it is stored, and its sharding."""

    entry: TensorEntry
    spec: Spec


class ShardClass(NamedTuple):
    """Processes that read each tensor of a class in the same way, but for the offset.

    Attributes:
        processes: [n] the processes, counted among those that differ.
        fetches: Requests of the first process; `start` is relative to the tensor.
        shift: [n] bytes from the first process's requests to those of each.
        held: Host bytes of the tiles of each request.
        elements: Elements of the distinct shards of one process.
    """

    processes: Ints
    fetches: tuple[Request, ...]
    shift: Ints
    held: tuple[int, ...]
    elements: int


class TensorClass(NamedTuple):
    """Tensors of one shape, dtype and spec.

    Attributes:
        tensors: Number of tensors.
        first: The first of them.
        shapes: The shards of processes.
        shard_elements: Elements of one device's shard.
    """

    tensors: int
    first: ClusterTensor
    shapes: tuple[ShardClass, ...]
    shard_elements: int


class _Small(NamedTuple):
    """A fetch that may share a request; by itself it takes `alone_requests` of `alone_bytes`."""

    request: SmallRequest
    alone_requests: int
    alone_bytes: int


class CostVectors:
    """Adds up the costs of processes, as vectors."""

    def __init__(self, processes: int, profile: StorageProfile) -> None:
        self._profile = profile
        zeros = [np.zeros(processes, np.int64) for _ in range(7)]
        self._tensors, self._needed, self._read, self._requests, *zeros = zeros
        self._files, self._held, self._most_held = zeros
        self._staged = np.zeros(processes, bool)
        self._padded = np.zeros(processes, bool)
        self._small: dict[int, list[tuple[ShardClass, int, _Small]]] = {}

    def add_kind(self, kind: TensorClass) -> None:
        """Adds the part of a class that does not depend on neighbours in a file."""
        small = self._small[id(kind)] = []
        for shape in kind.shapes:
            rows = shape.processes
            self._tensors[rows] += kind.tensors
            for number, (fetch, held) in enumerate(zip(shape.fetches, shape.held, strict=True)):
                read = fetch.read
                self._needed[rows] += kind.tensors * fetch.needed_bytes
                self._held[rows] += kind.tensors * held
                self._staged[rows] |= not read.direct
                self._padded[rows] |= not read.direct and bool(read.blocking.pad_bytes)
                nbytes, requests = fetch.cost(self._profile)
                request = SmallRequest.of(fetch, self._profile)
                if request is not None:
                    small.append((shape, number, _Small(request, requests, nbytes)))
                    continue
                self._read[rows] += kind.tensors * nbytes
                self._requests[rows] += kind.tensors * requests
                self._most_held[rows] = np.maximum(self._most_held[rows], held)

    def add_file(self, tensors: Sequence[tuple[TensorEntry, TensorClass]]) -> None:
        """Adds the small fetches of a file, and the file."""
        opened = np.zeros(len(self._files), bool)
        for kind in {id(kind): kind for _, kind in tensors}.values():
            for shape in kind.shapes:
                opened[shape.processes] = True
        self._files += opened
        group = _Groups(len(opened), self._profile.max_gap_bytes)
        for entry, kind in tensors:
            for shape, number, small in self._small[id(kind)]:
                group.add(entry.start, shape, number, small)
        self._read += group.read
        self._requests += group.requests
        np.maximum(self._most_held, group.most_held, out=self._most_held)

    def costs(self, memory_budget_bytes: int) -> tuple[Cost, ...]:
        """Return the cost of each process; the budget is that of `plan_reads`."""
        most = np.maximum(self._most_held, memory_budget_bytes)
        staging = staging_bytes(self._profile, padded=False)
        padded = staging_bytes(self._profile, padded=True)
        peak = np.minimum(self._held, most) + np.where(
            self._staged, np.where(self._padded, padded, staging), 0
        )
        columns = (self._tensors, self._needed, self._read, self._requests, self._files, peak)
        return tuple(Cost(*row) for row in np.stack(columns, 1).tolist())


class _Groups:
    """`coalesce.coalesced` of one file for all processes."""

    def __init__(self, processes: int, max_gap_bytes: int) -> None:
        self._max_gap_bytes = max_gap_bytes
        self._processes = processes
        zeros = [np.zeros(processes, np.int64) for _ in range(10)]
        self.read, self.requests, self.most_held, *zeros = zeros
        self._first, self._end, self._limit, self._buffers, self._held, *zeros = zeros
        # Changes when a region that was alone is joined by another.
        self._more_requests, self._more_bytes = zeros
        self._shared = np.full(processes, -1)  # of the pending group; -1 where there is none

    def add(self, base: int, shape: ShardClass, number: int, small: _Small) -> None:
        """Adds fetch `number` of a class for a tensor at byte `base`."""
        fetch, request = shape.fetches[number], small.request
        shared = fetch.regions[0].layout.shared
        everyone = len(shape.processes) == self._processes
        rows: slice | Ints = slice(None) if everyone else shape.processes
        start = shape.shift + (base + fetch.start)
        stop = start + request.length
        gap = start - self._end[rows]
        limit = np.minimum(self._limit[rows], request.limit)
        join = (
            (self._shared[rows] == shared)
            & (gap >= 0)
            & (gap <= self._max_gap_bytes)
            & (stop - self._first[rows] <= limit)
            & (self._buffers[rows] + request.buffers <= MAX_GROUP_BUFFERS)
        )
        joined = gap + request.length + self._more_bytes[rows]
        self.read[rows] += np.where(join, joined, small.alone_bytes)
        self._more_bytes[rows] = np.where(join, 0, request.length - small.alone_bytes)
        self.requests[rows] += np.where(join, self._more_requests[rows], small.alone_requests)
        self._more_requests[rows] = np.where(join, 0, 1 - small.alone_requests)
        self._first[rows] = np.where(join, self._first[rows], start)
        self._limit[rows] = np.where(join, limit, request.limit)
        self._buffers[rows] = np.where(join, self._buffers[rows], 0) + request.buffers
        self._held[rows] = np.where(join, self._held[rows], 0) + shape.held[number]
        self.most_held[rows] = np.maximum(self.most_held[rows], self._held[rows])
        self._shared[rows] = shared
        self._end[rows] = stop
