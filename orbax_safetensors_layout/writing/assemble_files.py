"""Completes files of whole tensors, from pieces in the storage or from shards by a mapping."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import explained
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box, row_blocks
from orbax_safetensors_layout.mapping import (
    AffinePiece,
    BoundExpr,
    Decoded,
    LeafExpr,
    Scanning,
    affine_pieces,
    apply_view,
    assemble_box,
    bytes_by_rows,
    unseen_inputs,
)
from orbax_safetensors_layout.options import KIB, MIB, OnProgress, ReadOptions
from orbax_safetensors_layout.plan import (
    ArrayRegion,
    ArraySource,
    FilePart,
    MappedSource,
    MappedTensors,
    RegionReads,
    WritePlan,
)
from orbax_safetensors_layout.reading import ArrayReader
from orbax_safetensors_layout.runtime import Bytes, ProgressReport, Staging
from orbax_safetensors_layout.storage import RangeReader

from .folder import CheckpointFolder, OpenFile
from .host import HostValues, PendingShards, Place
from .parts import stored_bytes

_BLOCKS_IN_FLIGHT = 8
_BLOCKS_PLANNED = 2048  # at once: each may be of a thousand pieces
_MOST_BLOCK_BYTES = 32 * MIB
_ROWS_BYTES = 8 * MIB  # that rows are computed from at once
_LEAST_VIEW_BYTES = 4 * KIB  # of what is computed at once, for each part of a leaf in it
_SMALL_BYTES = 32 * KIB  # written in less time than a thread takes to begin


class _TensorRows(NamedTuple):
    """Rows of a tensor, which begin at byte `start` of a file."""

    file: OpenFile
    entry: TensorEntry
    box: Box
    start: int

    @property
    def nbytes(self) -> int:
        return self.box.size * self.entry.dtype.bits // 8


def assemble_files(
    folder: CheckpointFolder,
    plan: WritePlan,
    storage: RangeReader,
    sources: Mapping[str, ArraySource],
    progress: OnProgress,
) -> None:
    """Completes the files that this process owns, of tensors in pieces or made of such arrays."""
    budget = folder.budget.most_bytes
    reader = ArrayReader(
        storage=storage,
        profile=ReadOptions().profile(storage.kind).within(budget),
        memory_budget_bytes=budget,
        in_order=folder.storage.appends,
    )
    unfinished = folder.unfinished()
    _scan_stored(folder, plan, unfinished, sources, reader)
    blocks: list[_TensorRows] = []
    for file in unfinished:
        file_blocks = [*_blocks(plan, file, sources, budget // _BLOCKS_IN_FLIGHT)]
        folder.expect(file, len(file_blocks))
        folder.written(file)  # no more than these
        blocks += file_blocks
    report = ProgressReport(progress, sum(block.nbytes for block in blocks))

    def take(
        planned: Sequence[_TensorRows],
        numbers: Sequence[int],
        _: Sequence[int],
        parts: Sequence[np.ndarray],
    ) -> Callable[[], object]:
        jobs = []
        for block in (planned[number] for number in numbers):
            report.add(block.nbytes, block.entry.name)
            if block.nbytes <= _SMALL_BYTES and not folder.storage.appends:
                _write(folder, block, parts[0])
            else:
                jobs.append(folder.pool.submit(_write, folder, block, parts[0]))
        return lambda: [job.result() for job in jobs]

    for first in range(0, len(blocks), _BLOCKS_PLANNED):
        planned = blocks[first : first + _BLOCKS_PLANNED]
        regions = []
        for block in planned:
            source = sources[block.entry.name]
            regions.append(ArrayRegion.of_box(block.entry.name, source, block.box, source.dtype))
        reads = RegionReads(regions, budget)
        taking = functools.partial(take, planned)
        reader.run(reads, reader.plan(reads), taking, check=folder.check)
    folder.pool.join()


def _gathered(
    plan: WritePlan, file: OpenFile, sources: Mapping[str, ArraySource]
) -> Iterator[tuple[TensorEntry, ArraySource]]:
    names = {plan.leaves[number].tensor.name for number in file.plan.gathered}
    return ((e, sources[e.name]) for e in file.plan.layout.tensors if e.name in names)


def _scan_stored(
    folder: CheckpointFolder,
    plan: WritePlan,
    files: Sequence[OpenFile],
    sources: Mapping[str, ArraySource],
    reader: ArrayReader,
) -> None:
    """Reads once what decoders have to have seen all of."""
    most = min(_ROWS_BYTES, folder.budget.most_bytes // _BLOCKS_IN_FLIGHT)
    inputs: dict[int, tuple[MappedSource, Scanning]] = {}
    for source in (source for file in files for _, source in _gathered(plan, file, sources)):
        if isinstance(source, MappedSource):
            for operand, decoder in unseen_inputs(source.bound.nodes()):
                inputs[id(operand)] = MappedSource(LeafExpr.alone(operand), source.tensors), decoder
    scans = [
        (source, decoder, box)
        for source, decoder in inputs.values()
        for box in row_blocks(
            source.shape,
            source.dtype.itemsize * 8,
            most if _in_rows(source) else source.nbytes,
            whole=True,
        )
    ]

    def take(
        planned: Sequence[tuple[MappedSource, Scanning, Box]],
        numbers: Sequence[int],
        _: Sequence[int],
        parts: Sequence[np.ndarray],
    ) -> Callable[[], object]:
        jobs = []
        for _source, decoder, box in (planned[number] for number in numbers):
            jobs.append(folder.pool.submit(decoder.scan, box.start[0], parts[0]))
        return lambda: [job.result() for job in jobs]

    for first in range(0, len(scans), _BLOCKS_PLANNED):
        planned = scans[first : first + _BLOCKS_PLANNED]
        reads = RegionReads(
            [ArrayRegion.of_box("", source, box, source.dtype) for source, _, box in planned],
            folder.budget.most_bytes,
        )
        reader.run(reads, reader.plan(reads), functools.partial(take, planned), check=folder.check)
    folder.pool.join()
    for _, decoder in inputs.values():
        decoder.complete()


def _in_rows(source: MappedSource) -> bool:
    """Whether neighbours in a row are as near in the files as those in a column."""
    strides = source.strides(Box.whole(source.shape))
    return strides is not None and all(map(operator.ge, strides, strides[1:]))


def _blocks(
    plan: WritePlan, file: OpenFile, sources: Mapping[str, ArraySource], most_bytes: int
) -> Iterator[_TensorRows]:
    for entry, source in _gathered(plan, file, sources):
        most = min(most_bytes, _MOST_BLOCK_BYTES)
        if isinstance(source, MappedSource):
            # Rows of a transposed tensor would be read through what is between them.
            needed = bytes_by_rows(source.bound.nodes()) if _in_rows(source) else 0
            most = max(1, entry.nbytes * most // needed) if needed else entry.nbytes
        dtype, start = entry.dtype, entry.start
        for box in row_blocks(source.shape, dtype.bits, most, dtype.group):
            yield _TensorRows(file, entry, box, start)
            start += box.size * dtype.bits // 8


def _write(folder: CheckpointFolder, block: _TensorRows, values: np.ndarray) -> None:
    block.file.write_at(block.start, [stored_bytes(values, block.entry.dtype)])
    folder.written(block.file)


class _MappedReads:
    """A region of a tensor that a mapping makes of leaves, whose values come to the host for it."""

    def __init__(
        self, expr: BoundExpr, box: Box, mapped: MappedTensors, values: HostValues
    ) -> None:
        self.box, self._dtype = box, expr.dtype
        self._places, self._values = mapped.held, values
        self._pieces = expr.pull_back(box, factored=True)
        views: dict[Place, list[AffineView]] = {}
        for piece in affine_pieces(self._pieces):
            views.setdefault(self._places[piece.source], []).append(piece.view)
        self.views = sum(map(len, views.values()))
        self._parts: dict[Place, FilePart] = {}
        self.copied_bytes = 0
        for place, taken in views.items():
            self._parts[place], nbytes = values.region(place, taken)
            self.copied_bytes += nbytes
        self._pending: dict[Place, PendingShards] = {}

    def begin(self) -> None:
        """Begins to copy the values, on the thread that schedules."""
        regions = self._parts.items()
        self._pending = {place: self._values.begin_region(part) for place, part in regions}

    def assemble(self, out: np.ndarray | None = None) -> np.ndarray:
        """Waits for the copies, and returns the region; they are freed."""
        arrived: dict[Place, np.ndarray] = {}
        while self._pending:
            place, pending = self._pending.popitem()
            (array,) = self._values.wait(pending)
            arrived[place] = np.ascontiguousarray(array).reshape(-1)

        def read(piece: AffinePiece) -> np.ndarray:
            place = self._places[piece.source]
            return apply_view(arrived[place], self._values.view_in(self._parts[place], piece.view))

        return assemble_box(self._pieces, self.box, self._dtype, read, out=out)


def write_mapped(
    folder: CheckpointFolder,
    mapped: MappedTensors,
    values: HostValues,
    progress: OnProgress,
) -> None:
    """Completes all files with tensors that a mapping makes of leaves, all of which are here.

    What is computed, and copied to the host for it, fits the folder's memory budget, but for a
    larger tensor, and for leaves that each part of a tensor takes scattered elements of.
    """
    files = folder.unfinished()
    tensors = [[entry for entry in file.plan.layout.tensors if entry.nbytes] for file in files]
    entries = [*itertools.chain.from_iterable(tensors)]
    report = ProgressReport(progress, sum(entry.nbytes for entry in entries))
    of_leaf: dict[str, list[Place]] = {}
    for place in mapped.held.values():
        of_leaf.setdefault(values.name(place[0]), []).append(place)
    places = {
        e.name: [p for leaf in mapped.expressions[e.name].sources() for p in of_leaf[leaf]]
        for e in entries
    }
    values.hold(Counter(itertools.chain.from_iterable(places.values())))
    most_bytes = folder.budget.most_bytes

    def reads(expr: BoundExpr, box: Box) -> _MappedReads:
        return _MappedReads(expr, box, mapped, values)

    def begin(region: _MappedReads, nbytes: int) -> None:
        folder.check()
        folder.budget.reserve(nbytes + region.copied_bytes, folder.pool.progress)
        region.begin()

    def write(block: _TensorRows, region: _MappedReads, memory: Bytes) -> None:
        file, entry, box, start = block
        with explained(f"while saving {entry.name!r} to {file.plan.name}", entry.name):
            region.assemble(memory.view(entry.dtype.numpy).reshape(box.shape))
        folder.budget.release(region.copied_bytes)
        file.write_at(start, [stored_bytes(memory, entry.dtype)])
        folder.written(file)
        report.add(block.nbytes, entry.name)
        folder.budget.release(memory.nbytes)

    def scan(name: str, decoder: Scanning, region: _MappedReads, nbytes: int) -> None:
        with explained(f"while quantising {name!r}", name):
            decoder.scan(region.box.start[0], region.assemble())
        folder.budget.release(nbytes + region.copied_bytes)

    def scan_all(name: str, operand: BoundExpr, decoder: Scanning) -> None:
        jobs = []
        for box in row_blocks(
            operand.shape, 8 * operand.dtype.itemsize, min(_ROWS_BYTES, most_bytes), whole=True
        ):
            region, nbytes = reads(operand, box), box.size * operand.dtype.itemsize
            begin(region, nbytes)
            jobs.append(folder.pool.submit(scan, name, decoder, region, nbytes))
        while not all(job.done() for job in jobs):
            folder.pool.progress()
        decoder.complete()

    staging = Staging()
    for file, of_file in zip(files, tensors, strict=True):
        for entry in of_file:
            expr, start = mapped.expressions[entry.name], entry.start
            for operand, decoder in unseen_inputs(expr.nodes()):
                scan_all(entry.name, operand, decoder)
            for region in _mapped_rows(expr, entry, most_bytes, reads):
                block = _TensorRows(file, entry, region.box, start)
                start += block.nbytes
                nbytes = region.box.size * entry.dtype.numpy.itemsize  # unpacked
                begin(region, nbytes)
                folder.expect(file, 1)
                folder.pool.submit(write, block, region, staging.take(nbytes))
            for place in places[entry.name]:
                values.end_use(place)
        folder.pool.submit(folder.written, file)
    folder.pool.join()


def _mapped_rows(
    expr: BoundExpr,
    entry: TensorEntry,
    budget_bytes: int,
    reads: Callable[[BoundExpr, Box], _MappedReads],
) -> Iterator[_MappedReads]:
    """Yields rows of a tensor, so few that threads share a large one, where rows can be alone."""
    most = max(_SMALL_BYTES, min(_ROWS_BYTES, budget_bytes // (2 * _BLOCKS_IN_FLIGHT)))
    nodes, needed = [*expr.nodes()], entry.nbytes
    if any(isinstance(node, Decoded) for node in nodes):
        needed = bytes_by_rows(nodes)
    while True:
        most_bytes = _even_rows_bytes(expr, entry.nbytes, needed, most) if needed else entry.nbytes
        boxes = row_blocks(expr.shape, entry.dtype.bits, most_bytes, entry.dtype.group)
        first = reads(expr, next(boxes))
        if first.views * _LEAST_VIEW_BYTES <= most or most_bytes >= entry.nbytes:
            yield first
            yield from (reads(expr, box) for box in boxes)
            return
        most = first.views * _LEAST_VIEW_BYTES


def _even_rows_bytes(expr: BoundExpr, nbytes: int, needed: int, most: int) -> int:
    """Return the bytes of blocks made of up to `most` bytes; of one shape where rows allow it.

    XLA compiles a program for each shape that is copied from a device.
    """
    count = -(-needed // most)
    rows = expr.shape[0] if expr.shape else 1
    count = next((n for n in range(count, min(2 * count, rows + 1)) if rows % n == 0), count)
    return max(1, nbytes // count)
