"""Writes tensors that a mapping makes of leaves, in a process that holds all of these."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Box, pack_bits
from orbax_safetensors_layout.mapping import AffinePiece, Piece, apply_view, assemble_box
from orbax_safetensors_layout.options import Progress
from orbax_safetensors_layout.plan import MappedTensors
from orbax_safetensors_layout.runtime import ProgressReport, allocate

from .folder import CheckpointFolder
from .host import HostValues
from .open_files import OpenFile


def write_mapped(
    folder: CheckpointFolder,
    mapped: MappedTensors,
    values: HostValues,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Completes all files.

    Args:
        folder: What is written; its memory budget is that of tensors that are filled at once, of
            which one may be larger.
        mapped: What the tensors are made of.
        values: The leaves.
        progress: Called after each tensor.
    """
    tensors: list[tuple[OpenFile, TensorEntry]] = []
    for file in folder.files.unfinished():
        entries = [entry for entry in file.plan.layout.tensors if entry.nbytes]
        folder.files.expect(file.plan.name, len(entries))
        tensors += [(file, entry) for entry in entries]
    report = ProgressReport(progress, sum(entry.nbytes for _, entry in tensors))
    held_bytes = 0
    lock = threading.Lock()

    def read(piece: AffinePiece) -> np.ndarray:
        return apply_view(values.shard(*mapped.held[piece.source]).reshape(-1), piece.view)

    def write(
        file: OpenFile, entry: TensorEntry, box: Box, pieces: Sequence[Piece], nbytes: int
    ) -> None:
        nonlocal held_bytes
        memory, dtype = allocate(nbytes), entry.dtype.numpy
        assemble_box(pieces, box, dtype, read, out=memory.view(dtype).reshape(box.shape))
        data = pack_bits(memory, entry.dtype.bits) if entry.dtype.packed else memory
        file.write_at(entry.start, [data])
        folder.files.written(file.plan.name)
        report.add(entry.nbytes, entry.name)
        with lock:
            held_bytes -= nbytes

    for file, entry in tensors:
        expr = mapped.expressions[entry.name]
        box = Box.whole(expr.shape)
        pieces = expr.pull_back(box, refined=True)
        nbytes = box.size * entry.dtype.numpy.itemsize  # unpacked
        folder.check()
        while held_bytes and held_bytes + nbytes > folder.memory_budget_bytes:
            folder.pool.progress()
        with lock:
            held_bytes += nbytes
        folder.pool.submit(functools.partial(write, file, entry, box, pieces, nbytes))
    folder.pool.join()
