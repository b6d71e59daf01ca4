"""Pieces put together into whole tensors: read in blocks of rows, written where they belong."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import DType, TensorEntry
from orbax_safetensors_layout.geometry import Box, pack_bits
from orbax_safetensors_layout.options import Progress, ReadOptions
from orbax_safetensors_layout.plan import LeafRead, WritePlan, plan_reads, sources_of
from orbax_safetensors_layout.reading import read_leaves
from orbax_safetensors_layout.sharding import AddressableShards

from .completion import Completion
from .open_files import FileSet, OpenFile
from .write import WriteStats

_BLOCKS_IN_FLIGHT = 8
_MOST_BLOCK_BYTES = 32 << 20
_GROUP = 8  # packed elements of a block fill whole bytes


class _Block(NamedTuple):
    """Rows of a tensor, and where they go.

    Attributes:
        file: The file.
        dtype: Dtype in that file.
        start: First byte in it.
    """

    file: OpenFile
    dtype: DType
    start: int


def gather(work: Completion) -> WriteStats:
    """Completes the files that this process owns from the pieces that all have written.

    Args:
        work: The files; its progress is told of after each block.
    """
    plan, files, pool, storage = work.plan, work.files, work.pool, work.storage
    unfinished = files.unfinished()
    assert plan.stored is not None
    pieces = Catalog.of_pieces(storage, work.pieces_folder, plan.stored)
    leaves: list[LeafRead] = []
    blocks: list[_Block] = []
    most = min(_MOST_BLOCK_BYTES, work.memory_budget_bytes // _BLOCKS_IN_FLIGHT)
    for file in unfinished:
        before = len(blocks)
        for leaf, block in _blocks(plan, file, pieces, most):
            leaves.append(leaf)
            blocks.append(block)
        files.expect(file.plan.name, len(blocks) - before)

    total = sum(leaf.local.boxes[0].size * leaf.stored.bits // 8 for leaf in leaves)
    done = [0]

    def deliver(
        number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Callable[[], object]:
        block, (values,) = blocks[number], parts
        done[0] += values.nbytes
        if work.progress is not None:
            work.progress(Progress(done[0], total, leaves[number].name))
        return pool.submit(functools.partial(_write, files, block, values)).result

    reads = plan_reads(
        leaves,
        profile=ReadOptions().profile(storage.kind).within(work.memory_budget_bytes),
        memory_budget_bytes=work.memory_budget_bytes,
        adopt=False,
        in_order=work.in_order,
    )
    stats = read_leaves(
        reads,
        storage,
        deliver=deliver,
        convert=lambda _, values, out: np.copyto(out, values),
        check=work.check,
    )
    pool.join()
    written = sum(leaf.local.boxes[0].size * leaf.stored.bits // 8 for leaf in leaves)
    return WriteStats(bytes_written=written, bytes_read=stats.bytes_read)


def _write(files: FileSet, block: _Block, values: np.ndarray) -> None:
    data = values.reshape(-1).view(np.uint8)
    if block.dtype.packed:
        data = pack_bits(data, block.dtype.bits)
    block.file.writer.write_at(block.start, [data])
    files.written(block.file.plan.name)


def _blocks(
    plan: WritePlan, file: OpenFile, pieces: Catalog, most_bytes: int
) -> Iterator[tuple[LeafRead, _Block]]:
    gathered = {plan.leaves[number].tensor.name for number in file.plan.gathered}
    for entry in file.plan.layout.tensors:
        if entry.name not in gathered:
            continue
        group = _GROUP if entry.dtype.packed else 1
        for box in row_blocks(entry.shape, entry.dtype.bits, most_bytes, group):
            first = sum(
                start * math.prod(entry.shape[axis + 1 :]) for axis, start in enumerate(box.start)
            )
            start = entry.start + first * entry.dtype.bits // 8
            yield _leaf(pieces, entry, box), _Block(file, entry.dtype, start)


def _leaf(pieces: Catalog, entry: TensorEntry, box: Box) -> LeafRead:
    stored = pieces.entries([entry.name])[entry.name].dtype
    sources = sources_of(pieces.locate({entry.name: (box,)})[entry.name])
    local = AddressableShards((box,), (False,))
    return LeafRead(entry.name, entry.shape, stored, sources, local, stored.numpy)


def row_blocks(shape: tuple[int, ...], bits: int, most_bytes: int, group: int = 1) -> Iterator[Box]:
    """Boxes that are contiguous in a row-major tensor, in its order.

    Args:
        shape: The tensor's shape.
        bits: Bits of an element.
        most_bytes: Their largest size, as far as a single row allows.
        group: The number of elements before each is a multiple of this.

    Example:
        >>> [box.shape for box in row_blocks((5, 4), 8, 8)]
        [(2, 4), (2, 4), (1, 4)]
    """
    if 0 in shape:  # no elements, however many rows
        return
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * bits > most_bytes * 8:
        axis += 1
    if not shape:
        yield Box((), ())
        return
    rest = shape[axis + 1 :]
    rows = max(1, most_bytes * 8 // max(1, math.prod(rest) * bits))
    rows = -(-rows // group) * group
    if group > 1 and shape[axis] * math.prod(rest) % group:
        axis, rows, rest = 0, shape[0], shape[1:]
    for outer in itertools.product(*map(range, shape[:axis])):
        for row in range(0, shape[axis], rows):
            stop = min(row + rows, shape[axis])
            start = (*outer, row, *[0] * len(rest))
            yield Box(start, (*(i + 1 for i in outer), stop, *rest))
