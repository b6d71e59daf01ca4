"""Writes tensors that a mapping makes of regions of leaves."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import pack_bits
from orbax_safetensors_layout.mapping import apply_ops, strided
from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.plan import Contribution, ScatterPlan, WritePlan
from orbax_safetensors_layout.runtime import ProgressReport, allocate

from .assemble_files import read_pieces
from .folder import CheckpointFolder
from .host import HostValues
from .open_files import FileSet, OpenFile


class _MappedTensor:
    """A tensor that is filled from contributions, and written when it is complete."""

    def __init__(
        self,
        entry: TensorEntry,
        file: OpenFile,
        files: FileSet,
        parts: Sequence[Contribution],
        report: ProgressReport,
    ) -> None:
        self.parts = parts
        self.pending = len(parts)
        self.nbytes = math.prod(entry.shape) * entry.dtype.numpy.itemsize  # unpacked
        self._entry = entry
        self._file = file
        self._files = files
        self._report = report
        self._elements: np.ndarray | None = None

    def add(self, part: Contribution, values: np.ndarray) -> None:
        """Puts the values of a region in their place."""
        if self._elements is None:
            self._elements = allocate(self.nbytes).view(self._entry.dtype.numpy)
        if part.ops:
            values = apply_ops(values, part.ops)
        strided(self._elements, part.view)[...] = values.reshape(part.view.shape)

    def write(self) -> None:
        """Writes the tensor; the last of a file completes that."""
        assert self._elements is not None
        data = self._elements.view(np.uint8)
        if self._entry.dtype.packed:
            data = pack_bits(data, self._entry.dtype.bits)
        self._file.write_at(self._entry.start, [data])
        self._elements = None
        self._files.written(self._file.plan.name)
        self._report.add(self._entry.nbytes, self._entry.name)


def write_mapped(
    folder: CheckpointFolder,
    plan: WritePlan,
    mapped: ScatterPlan,
    values: HostValues,
    pieces: Catalog | None,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Completes the files that this process owns.

    Args:
        folder: What is written; its memory budget is that of tensors that are filled at once, of
            which one may be larger.
        plan: What this process writes.
        mapped: What the tensors are made of.
        values: The leaves, for a process that holds all of them.
        pieces: The pieces of the leaves; None for a process that holds all of them.
        progress: Called after each tensor.
    """
    unfinished = folder.files.unfinished()
    found = [(file, e) for file in unfinished for e in file.plan.layout.tensors if e.nbytes]
    report = ProgressReport(progress, sum(entry.nbytes for _, entry in found))
    tensors = [
        _MappedTensor(entry, file, folder.files, mapped.parts[entry.name], report)
        for file, entry in found
    ]
    writes = Counter(file.plan.name for file, _ in found)
    for file in unfinished:
        folder.files.expect(file.plan.name, writes[file.plan.name])
    if pieces is None:
        _write_from_host(folder, plan, tensors, values)
    else:
        _write_from_pieces(folder, plan, tensors, pieces)


def _write_from_host(
    folder: CheckpointFolder,
    plan: WritePlan,
    tensors: Sequence[_MappedTensor],
    values: HostValues,
) -> None:
    held_bytes = 0
    lock = threading.Lock()

    def write(tensor: _MappedTensor) -> None:
        nonlocal held_bytes
        for part in tensor.parts:
            box = plan.leaves[part.leaf].held.boxes[part.held]
            shard = values.shard(part.leaf, part.held)
            tensor.add(part, shard[part.box.within(box).slices])
        tensor.write()
        with lock:
            held_bytes -= tensor.nbytes

    for tensor in tensors:
        folder.check()
        while held_bytes and held_bytes + tensor.nbytes > folder.memory_budget_bytes:
            folder.pool.progress()
        with lock:
            held_bytes += tensor.nbytes
        folder.pool.submit(functools.partial(write, tensor))
    folder.pool.join()


def _write_from_pieces(
    folder: CheckpointFolder,
    plan: WritePlan,
    tensors: Sequence[_MappedTensor],
    pieces: Catalog,
) -> None:
    parts = [(tensor, part) for tensor in tensors for part in tensor.parts]

    def take(number: int, values: np.ndarray) -> Callable[[], object] | None:
        tensor, part = parts[number]
        tensor.add(part, values.view(plan.leaves[part.leaf].values))
        tensor.pending -= 1
        return None if tensor.pending else folder.pool.submit(tensor.write).result

    regions = [(plan.leaves[part.leaf].tensor.name, part.box) for _, part in parts]
    read_pieces(pieces, regions, folder, take)
