"""Tensors put together from regions of leaves that a mapping spreads over them."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format.dtypes import DTYPES
from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.format.headers import Headers
from orbax_safetensors_layout.format.piece_catalog import PieceCatalog
from orbax_safetensors_layout.geometry.affine import AffineView
from orbax_safetensors_layout.geometry.box import Box
from orbax_safetensors_layout.geometry.packing import pack_bits
from orbax_safetensors_layout.mapping.values import apply_ops
from orbax_safetensors_layout.options import Progress, ReadOptions
from orbax_safetensors_layout.plan.leaves import LeafRead, LocalBoxes, Source
from orbax_safetensors_layout.plan.reads import plan_reads
from orbax_safetensors_layout.plan.scatter import Contribution
from orbax_safetensors_layout.plan.writes import WritePlan
from orbax_safetensors_layout.storage.base import Storage, join
from orbax_safetensors_layout.transfer.buffers import allocate
from orbax_safetensors_layout.transfer.host import HostValues
from orbax_safetensors_layout.transfer.read import read_leaves
from orbax_safetensors_layout.transfer.write import FileSet, OpenFile, WritePool, WriteStats


class _Tensor:
    """One tensor on its way to its file."""

    def __init__(
        self, entry: TensorEntry, file: OpenFile, files: FileSet, parts: Sequence[Contribution]
    ) -> None:
        self.entry = entry
        self.parts = parts
        self.left = len(parts)
        self._file = file
        self._files = files
        self._lock = threading.Lock()
        self._elements: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds while it is put together."""
        return math.prod(self.entry.shape) * self.entry.dtype.numpy.itemsize

    def add(self, part: Contribution, values: np.ndarray) -> None:
        """Puts the values of a region where they belong."""
        with self._lock:
            if self._elements is None:
                dtype = self.entry.dtype.numpy
                self._elements = allocate(self.nbytes).view(dtype)
        if part.ops:
            values = apply_ops(values, part.ops)
        values = values.reshape(part.view.shape)
        _writable_view(self._elements, part.view)[...] = values

    def write(self) -> None:
        """Writes it, complete; the last of a file completes that."""
        assert self._elements is not None
        data = self._elements.view(np.uint8)
        if self.entry.dtype.packed:
            data = pack_bits(data, self.entry.dtype.bits)
        self._file.writer.write_at(self.entry.start, [data])
        self._elements = None
        self._files.written(self._file.plan.name)


def _writable_view(elements: np.ndarray, view: AffineView) -> np.ndarray:
    strides = tuple(stride * elements.itemsize for stride in view.strides)
    return np.lib.stride_tricks.as_strided(elements[view.offset :], view.shape, strides)


def scatter(
    plan: WritePlan,
    parts: dict[str, list[Contribution]],
    files: FileSet,
    pool: WritePool,
    values: HostValues,
    storage: Storage,
    pieces_folder: str,
    *,
    memory_budget_bytes: int,
    progress: Callable[[Progress], None] | None,
    check: Callable[[], None],
) -> WriteStats:
    """Completes the files that this process owns.

    Args:
        plan: The plan.
        parts: What the tensors are made of.
        files: The files, begun.
        pool: Threads that write.
        values: The leaves, for a process that holds all of them.
        storage: Where files and pieces are.
        pieces_folder: The folder that the names of the files of pieces are relative to.
        memory_budget_bytes: Host bytes that tensors may hold while they are put together; one
            tensor may be larger.
        progress: Told after each tensor.
        check: Called before each tensor; raises where another process has failed.
    """
    unfinished = files.unfinished()
    tensors = [
        _Tensor(entry, file, files, parts[entry.name])
        for file in unfinished
        for entry in file.plan.layout.tensors
        if entry.nbytes
    ]
    for file in unfinished:
        files.expect(file.plan.name, sum(bool(e.nbytes) for e in file.plan.layout.tensors))
    tell = _Teller(tensors, progress)
    read = 0
    if plan.stored is None:
        _from_host(plan, tensors, pool, values, memory_budget_bytes, tell, check)
    else:
        stored = _stored(plan, storage, pieces_folder)
        read = _from_pieces(plan, tensors, pool, storage, stored, memory_budget_bytes, tell, check)
    pool.join()
    written = sum(tensor.entry.nbytes for tensor in tensors)
    return WriteStats(bytes_written=written, bytes_read=read)


class _Teller:
    """Tells of each tensor that is written."""

    def __init__(
        self, tensors: Sequence[_Tensor], progress: Callable[[Progress], None] | None
    ) -> None:
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(tensor.entry.nbytes for tensor in tensors)
        self._lock = threading.Lock()

    def written(self, tensor: _Tensor) -> None:
        with self._lock:
            self._done_bytes += tensor.entry.nbytes
            if self._progress is not None:
                done = Progress(self._done_bytes, self._total_bytes, tensor.entry.name)
                self._progress(done)


def _from_host(
    plan: WritePlan,
    tensors: Sequence[_Tensor],
    pool: WritePool,
    values: HostValues,
    budget: int,
    tell: _Teller,
    check: Callable[[], None],
) -> None:
    held = [0]
    lock = threading.Lock()

    def make(tensor: _Tensor) -> None:
        for part in tensor.parts:
            box = plan.leaves[part.leaf].held.boxes[part.held]
            shard = values.shard(part.leaf, part.held)
            tensor.add(part, shard[_within(part.box, box).slices])
        tensor.write()
        tell.written(tensor)
        with lock:
            held[0] -= tensor.nbytes

    for tensor in tensors:
        check()
        while held[0] and held[0] + tensor.nbytes > budget:
            pool.progress()
        with lock:
            held[0] += tensor.nbytes
        pool.submit(functools.partial(make, tensor))


class _Wanted(NamedTuple):
    tensor: _Tensor
    part: Contribution


def _stored(plan: WritePlan, storage: Storage, folder: str) -> PieceCatalog:
    """The pieces that all processes have written."""
    assert plan.stored is not None
    paths = [join(folder, name) for name in plan.stored.files]
    return PieceCatalog(plan.stored, paths, Headers(storage).fetch)


def _from_pieces(
    plan: WritePlan,
    tensors: Sequence[_Tensor],
    pool: WritePool,
    storage: Storage,
    pieces: PieceCatalog,
    budget: int,
    tell: _Teller,
    check: Callable[[], None],
) -> int:
    wanted: list[_Wanted] = []
    leaves: list[LeafRead] = []
    for tensor in tensors:
        for part in tensor.parts:
            wanted.append(_Wanted(tensor, part))
            leaves.append(_leaf(plan, pieces, part))

    def deliver(
        number: int, boxes: Sequence[int], values: Sequence[np.ndarray]
    ) -> Callable[[], object] | None:
        tensor, part = wanted[number]
        tensor.add(part, values[0])
        tensor.left -= 1
        return None if tensor.left else pool.submit(functools.partial(write, tensor)).result

    def write(tensor: _Tensor) -> None:
        tensor.write()
        tell.written(tensor)

    reads = plan_reads(
        leaves,
        profile=ReadOptions().profile(storage.kind).within(budget),
        memory_budget_bytes=budget,
        adopt=False,
        in_order=storage.appends,
    )
    stats = read_leaves(
        reads,
        storage,
        deliver=deliver,
        convert=lambda number, values: values.view(leaves[number].dtype),
        check=check,
    )
    return stats.bytes_read


def _leaf(plan: WritePlan, pieces: PieceCatalog, part: Contribution) -> LeafRead:
    leaf = plan.leaves[part.leaf]
    name = leaf.tensor.name
    stored = DTYPES[pieces.stored.tensors[name].dtype]
    region = Box.whole(part.box.shape)
    sources = []
    for box, entry in pieces.find({name: (part.box,)})[name]:
        common = box.intersect(part.box)
        assert common is not None
        view = AffineView.row_major(box.shape).restrict(_within(common, box))
        sources.append(Source(entry, _within(common, part.box), view))
    local = LocalBoxes((region,), (False,))
    return LeafRead(name, region.shape, stored, tuple(sources), local, leaf.values)


def _within(box: Box, outer: Box) -> Box:
    """A box in the coordinates of one that it lies in."""
    start = tuple(map(operator.sub, box.start, outer.start))
    return Box(start, tuple(map(operator.add, start, box.shape)))
