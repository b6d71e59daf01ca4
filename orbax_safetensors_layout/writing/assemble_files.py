"""Assembles files of whole tensors from pieces, in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Box, pack_bits, row_blocks
from orbax_safetensors_layout.options import Progress, ReadOptions
from orbax_safetensors_layout.plan import ArrayRegion, RegionReads, WritePlan, array_sources
from orbax_safetensors_layout.reading import ArrayReader
from orbax_safetensors_layout.runtime import ProgressReport

from .folder import CheckpointFolder
from .open_files import FileSet, OpenFile

_BLOCKS_IN_FLIGHT = 8
_MOST_BLOCK_BYTES = 32 << 20
_GROUP = 8  # packed elements of a block fill whole bytes

TakeRegion = Callable[[int, np.ndarray], Callable[[], object] | None]
"""Takes a region by its number, and its values; returns what waits until these are written."""


def read_pieces(
    pieces: Catalog,
    regions: Sequence[tuple[str, Box]],
    folder: CheckpointFolder,
    take: TakeRegion,
) -> None:
    """Reads boxes of named tensors, as stored, for files of a folder, within its memory budget."""
    sources = array_sources(pieces, None)
    budget = folder.memory_budget_bytes
    reader = ArrayReader(
        storage=pieces.storage,
        profile=ReadOptions().profile(pieces.storage.kind).within(budget),
        memory_budget_bytes=budget,
        in_order=folder.files.appends,
    )
    reads = RegionReads(
        [ArrayRegion.of_box(n, sources[n], box, sources[n].dtype) for n, box in regions], budget
    )
    reader.run(
        reads,
        reader.plan(reads),
        lambda numbers, _, parts: take(numbers[0], parts[0]),
        check=folder.check,
    )
    folder.pool.join()


class _Block(NamedTuple):
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
    pieces: Catalog,
    progress: Callable[[Progress], None] | None,
) -> None:
    """Completes the files that this process owns from the pieces that all have written."""
    most_bytes = min(_MOST_BLOCK_BYTES, folder.memory_budget_bytes // _BLOCKS_IN_FLIGHT)
    blocks: list[_Block] = []
    for file in folder.files.unfinished():
        file_blocks = [*_blocks(plan, file, most_bytes)]
        folder.files.expect(file.plan.name, len(file_blocks))
        blocks += file_blocks
    report = ProgressReport(progress, sum(block.nbytes for block in blocks))

    def take(number: int, values: np.ndarray) -> Callable[[], object]:
        block = blocks[number]
        report.add(block.nbytes, block.entry.name)
        return folder.pool.submit(lambda: _write(folder.files, block, values)).result

    read_pieces(pieces, [(block.entry.name, block.box) for block in blocks], folder, take)


def _blocks(plan: WritePlan, file: OpenFile, most_bytes: int) -> Iterator[_Block]:
    gathered = {plan.leaves[number].tensor.name for number in file.plan.gathered}
    for entry in file.plan.layout.tensors:
        if entry.name in gathered:
            group = _GROUP if entry.dtype.packed else 1
            start = entry.start
            for box in row_blocks(entry.shape, entry.dtype.bits, most_bytes, group):
                yield _Block(file, entry, box, start)
                start += box.size * entry.dtype.bits // 8


def _write(files: FileSet, block: _Block, values: np.ndarray) -> None:
    data = values.reshape(-1).view(np.uint8)
    if block.entry.dtype.packed:
        data = pack_bits(data, block.entry.dtype.bits)
    block.file.write_at(block.start, [data])
    files.written(block.file.plan.name)
