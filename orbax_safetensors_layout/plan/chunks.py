"""The chunks that each process of a cluster reads of arrays that are stored in equal chunks.

Orbax reads every distinct shard of a process by itself, so chunks that several of them overlap are
read for each, but for those that TensorStore happens to be reading at the same moment.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.geometry import Box, Ints
from orbax_safetensors_layout.sharding import MeshShape, Partition, Placed, Spec

from .cluster import PlannedShares
from .cost import Cost, LeafCost


class ChunkedArray(NamedTuple):
    """An array that is stored in chunks of one shape, those at its end, too."""

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]  # extents of at least 1
    dtype: str  # its code
    itemsize: int  # bytes of an element

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.itemsize


class _ChunkReads(NamedTuple):
    """Chunks of an array that each process reads, and elements of its distinct shards."""

    chunks: Ints
    elements: Ints
    shard_bytes: int


def plan_chunks(
    arrays: Sequence[ChunkedArray],
    placed: Sequence[Placed],
    mesh: MeshShape,
    files: int | None,
) -> PlannedShares:
    """Plan the reads of all processes: of each distinct shard all chunks that it overlaps.

    `files` are those that the chunks are in; None where each is a file.
    """
    keys = [(array._replace(name=""), p.spec) for array, p in zip(arrays, placed, strict=True)]
    reads = {key: _chunk_reads(*key, mesh) for key in dict.fromkeys(keys)}
    tensors, needed, read, requests, parameters = np.zeros((5, mesh.processes), np.int64)
    for (array, _), count in collections.Counter(keys).items():
        of_array = reads[array, _]
        tensors += count * (of_array.chunks > 0)
        needed += count * of_array.elements * array.itemsize
        read += count * of_array.chunks * array.chunk_bytes
        requests += count * of_array.chunks
        parameters += count * of_array.elements
    opened = requests if files is None else np.minimum(requests, files)
    columns = np.stack([tensors, needed, read, requests, opened, read], 1)
    leaf_costs = []
    for array, key in zip(arrays, keys, strict=True):
        worst = int(reads[key].chunks.argmax())
        own, chunks = int(reads[key].elements[worst]), int(reads[key].chunks[worst])
        nbytes = own * array.itemsize, chunks * array.chunk_bytes
        leaf_costs.append(LeafCost(array.name, array.shape, array.dtype, key[1], *nbytes, chunks))
    return PlannedShares(
        parameters=sum(math.prod(array.shape) for array in arrays),
        processes=tuple(range(mesh.processes)),
        costs=tuple(Cost(*row) for row in columns.tolist()),
        process_parameters=tuple(parameters.tolist()),
        leaf_costs=tuple(leaf_costs),
        shards=tuple((a.name, reads[key].shard_bytes) for a, key in zip(arrays, keys, strict=True)),
        placed=tuple(placed),
    )


def _chunk_reads(array: ChunkedArray, spec: Spec, mesh: MeshShape) -> _ChunkReads:
    partition = Partition.of(array.shape, spec, mesh)
    _, first, number = np.unique(partition.rows, axis=0, return_index=True, return_inverse=True)
    shards = [partition.local(process) for process in first.tolist()]
    chunks = [sum(_count(array, box) for box in local.boxes) for local in shards]
    elements = [local.elements for local in shards]
    of_process = number.reshape(-1)
    shard_bytes = math.prod(partition.shape) * array.itemsize
    return _ChunkReads(np.array(chunks)[of_process], np.array(elements)[of_process], shard_bytes)


def _count(array: ChunkedArray, box: Box) -> int:
    """Count the chunks that a box overlaps."""
    axes = zip(box.start, box.stop, array.chunk, strict=True)
    return math.prod(-(-stop // step) - start // step for start, stop, step in axes)
