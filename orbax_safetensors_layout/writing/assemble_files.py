"""Assembles files of whole tensors from pieces, in blocks of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import Box, pack_bits, row_blocks
from orbax_safetensors_layout.options import Progress, ReadOptions
from orbax_safetensors_layout.plan import (
    ArrayRegion,
    ArraySource,
    MappedSource,
    RegionReads,
    WritePlan,
)
from orbax_safetensors_layout.reading import ArrayReader
from orbax_safetensors_layout.runtime import ProgressReport
from orbax_safetensors_layout.storage import Storage

from .folder import CheckpointFolder
from .open_files import FileSet, OpenFile

_BLOCKS_IN_FLIGHT = 8
_MOST_BLOCK_BYTES = 32 << 20
_GROUP = 8  # packed elements of a block fill whole bytes


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
    storage: Storage,
    sources: Mapping[str, ArraySource],
    progress: Callable[[Progress], None] | None,
) -> None:
    """Completes the files that this process owns from the pieces that all have written.

    The sources are the tensors: in pieces, or made of arrays in pieces.
    """
    budget = folder.memory_budget_bytes
    blocks: list[_Block] = []
    for file in folder.files.unfinished():
        file_blocks = [*_blocks(plan, file, sources, budget // _BLOCKS_IN_FLIGHT)]
        folder.files.expect(file.plan.name, len(file_blocks))
        blocks += file_blocks
    report = ProgressReport(progress, sum(block.nbytes for block in blocks))

    def take(
        numbers: Sequence[int], _: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Callable[[], object]:
        jobs = []
        for block in (blocks[number] for number in numbers):
            report.add(block.nbytes, block.entry.name)
            write = functools.partial(_write, folder.files, block, parts[0])
            jobs.append(folder.pool.submit(write))
        return lambda: [job.result() for job in jobs]

    reader = ArrayReader(
        storage=storage,
        profile=ReadOptions().profile(storage.kind).within(budget),
        memory_budget_bytes=budget,
        in_order=folder.files.appends,
    )
    regions = []
    for block in blocks:
        source = sources[block.entry.name]
        regions.append(ArrayRegion.of_box(block.entry.name, source, block.box, source.dtype))
    reads = RegionReads(regions, budget)
    reader.run(reads, reader.plan(reads), take, check=folder.check)
    folder.pool.join()


def _blocks(
    plan: WritePlan, file: OpenFile, sources: Mapping[str, ArraySource], most_bytes: int
) -> Iterator[_Block]:
    gathered = {plan.leaves[number].tensor.name for number in file.plan.gathered}
    for entry in file.plan.layout.tensors:
        if entry.name in gathered:
            # Rows of a transposed tensor would be read through what is between them.
            is_mapped = isinstance(sources[entry.name], MappedSource)
            most = entry.nbytes if is_mapped else min(most_bytes, _MOST_BLOCK_BYTES)
            group = _GROUP if entry.dtype.packed else 1
            start = entry.start
            for box in row_blocks(sources[entry.name].shape, entry.dtype.bits, most, group):
                yield _Block(file, entry, box, start)
                start += box.size * entry.dtype.bits // 8


def _write(files: FileSet, block: _Block, values: np.ndarray) -> None:
    data = values.reshape(-1).view(np.uint8)
    if block.entry.dtype.packed:
        data = pack_bits(data, block.entry.dtype.bits)
    block.file.write_at(block.start, [data])
    files.written(block.file.plan.name)
