"""Tensors put together from regions of leaves that a mapping spreads over them."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box, pack_bits
from orbax_safetensors_layout.mapping import apply_ops, strided
from orbax_safetensors_layout.options import Progress, ReadOptions
from orbax_safetensors_layout.plan import Contribution, LeafRead, TensorPiece, WritePlan, plan_reads
from orbax_safetensors_layout.reading import read_leaves
from orbax_safetensors_layout.runtime import allocate
from orbax_safetensors_layout.sharding import AddressableShards

from .completion import Completion
from .host import HostValues
from .open_files import FileSet, OpenFile
from .write import WriteStats


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
        strided(self._elements, part.view)[...] = values

    def write(self) -> None:
        """Writes it, complete; the last of a file completes that."""
        assert self._elements is not None
        data = self._elements.view(np.uint8)
        if self.entry.dtype.packed:
            data = pack_bits(data, self.entry.dtype.bits)
        self._file.writer.write_at(self.entry.start, [data])
        self._elements = None
        self._files.written(self._file.plan.name)


def scatter(
    work: Completion, parts: dict[str, list[Contribution]], values: HostValues
) -> WriteStats:
    """Completes the files that this process owns.

    Args:
        work: The files; its progress is told of after each tensor, and the memory budget is that
            of tensors that are put together, of which one may be larger.
        parts: What the tensors are made of.
        values: The leaves, for a process that holds all of them.
    """
    files = work.files
    unfinished = files.unfinished()
    tensors = [
        _Tensor(entry, file, files, parts[entry.name])
        for file in unfinished
        for entry in file.plan.layout.tensors
        if entry.nbytes
    ]
    for file in unfinished:
        files.expect(file.plan.name, sum(bool(e.nbytes) for e in file.plan.layout.tensors))
    tell = _Teller(tensors, work.progress)
    read = 0
    if work.plan.stored is None:
        _from_host(work, tensors, values, tell)
    else:
        read = _from_pieces(work, tensors, tell)
    work.pool.join()
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
    work: Completion, tensors: Sequence[_Tensor], values: HostValues, tell: _Teller
) -> None:
    held = [0]
    lock = threading.Lock()

    def make(tensor: _Tensor) -> None:
        for part in tensor.parts:
            box = work.plan.leaves[part.leaf].held.boxes[part.held]
            shard = values.shard(part.leaf, part.held)
            tensor.add(part, shard[part.box.within(box).slices])
        tensor.write()
        tell.written(tensor)
        with lock:
            held[0] -= tensor.nbytes

    for tensor in tensors:
        work.check()
        while held[0] and held[0] + tensor.nbytes > work.memory_budget_bytes:
            work.pool.progress()
        with lock:
            held[0] += tensor.nbytes
        work.pool.submit(functools.partial(make, tensor))


class _Wanted(NamedTuple):
    tensor: _Tensor
    part: Contribution


def _stored(work: Completion) -> Catalog:
    """The pieces that all processes have written."""
    stored = work.plan.stored
    assert stored is not None
    return Catalog.of_pieces(work.storage, work.pieces_folder, stored)


def _from_pieces(work: Completion, tensors: Sequence[_Tensor], tell: _Teller) -> int:
    pieces = _stored(work)
    wanted: list[_Wanted] = []
    leaves: list[LeafRead] = []
    for tensor in tensors:
        for part in tensor.parts:
            wanted.append(_Wanted(tensor, part))
            leaves.append(_leaf(work.plan, pieces, part))

    def deliver(
        number: int, boxes: Sequence[int], values: Sequence[np.ndarray]
    ) -> Callable[[], object] | None:
        tensor, part = wanted[number]
        tensor.add(part, values[0])
        tensor.left -= 1
        return None if tensor.left else work.pool.submit(functools.partial(write, tensor)).result

    def write(tensor: _Tensor) -> None:
        tensor.write()
        tell.written(tensor)

    reads = plan_reads(
        leaves,
        profile=ReadOptions().profile(work.storage.kind).within(work.memory_budget_bytes),
        memory_budget_bytes=work.memory_budget_bytes,
        adopt=False,
        in_order=work.in_order,
    )
    stats = read_leaves(
        reads,
        work.storage,
        deliver=deliver,
        convert=lambda number, values, out: np.copyto(out, values.view(leaves[number].dtype)),
        check=work.check,
    )
    return stats.bytes_read


def _leaf(plan: WritePlan, pieces: Catalog, part: Contribution) -> LeafRead:
    leaf = plan.leaves[part.leaf]
    name = leaf.tensor.name
    stored = pieces.entries([name])[name].dtype
    region = Box.whole(part.box.shape)
    sources = []
    for box, entry in pieces.locate({name: (part.box,)})[name]:
        common = box.intersect(part.box)
        assert common is not None
        view = AffineView.row_major(box.shape).restrict(common.within(box))
        sources.append(TensorPiece(entry, common.within(part.box), view))
    local = AddressableShards((region,), (False,))
    return LeafRead(name, region.shape, stored, tuple(sources), local, leaf.values)
