"""Runs a conversion: groups are read, written and recorded; then what is there is compared."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import MismatchError
from orbax_safetensors_layout.runtime import ProcessGroup as Processes
from orbax_safetensors_layout.runtime import ProgressReport

from .checkpoint_reader import CheckpointReader, ReadableArrays, SourceArray, arrays_of
from .groups import LeafGroup, shares
from .journal import Journal
from .spool import assembled, staged
from .target import LeafRegion, Target, TargetWriter, region_batches

CONVERTING, VERIFYING = "converting", "verifying what was written"
_IN_FLIGHT = 2  # blocks that are written while the next one is read


class ConversionLimits(NamedTuple):
    """How a memory budget is spent.

    Attributes:
        block_bytes: What is read, and written, at once. Up to three are in memory, each with the
            copies that a codec makes of it.
        staged_bytes: Arrays that are read as a whole and held in memory.
    """

    block_bytes: int
    staged_bytes: int

    @classmethod
    def of(cls, memory_budget_bytes: int) -> ConversionLimits:
        """Shares of a budget."""
        return cls(max(1, memory_budget_bytes // 16), memory_budget_bytes // 2)


def convert_groups(
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    target: Target,
    groups: Sequence[LeafGroup],
    folder: str,
    journal: Journal,
    processes: Processes,
    limits: ConversionLimits,
    report: ProgressReport,
) -> None:
    """Converts this process's share of the groups.

    Args:
        source: The source.
        arrays: Its arrays by name.
        target: The target.
        groups: What is left to be done, the same on all processes.
        folder: The conversion's folder.
        journal: Where it is recorded.
        processes: The processes.
        limits: What may be in memory.
        report: Told after each block.

    Raises:
        SafetensorsLayoutError: A read or write failed; what is recorded stays.
        PeerError: Another process failed.
    """
    mine = shares(groups, processes.process_count)[processes.process_index]
    writer = target.open(folder, processes.process_index)
    record = journal.open(processes.process_index)
    try:
        for group in mine:
            processes.check(CONVERTING)
            spool = os.path.join(folder, f"spool-{processes.process_index}")
            with _blocks(source, arrays, group, spool, limits) as blocks:
                digests = _convert(blocks, writer, report)
            writer.flush()
            record.add(group.number, digests)
    finally:
        record.close()
        writer.close()


Blocks = Iterator[tuple[list[LeafRegion], list[np.ndarray]]]
"""Regions and their values, what is in memory at once."""


def _convert(blocks: Blocks, writer: TargetWriter, report: ProgressReport) -> list[str]:
    digests: list[str] = []

    def take(regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> list[str]:
        writer.write(regions, values)
        return [digest(value) for value in values]

    with _Pipeline(take) as pipeline:
        for regions, values in blocks:
            digests += pipeline.put(regions, values)
            report.add(sum(region.nbytes for region in regions), regions[-1].leaf.name)
        digests += pipeline.finish()
    return digests


@contextlib.contextmanager
def _blocks(
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    group: LeafGroup,
    spool: str,
    limits: ConversionLimits,
) -> Iterator[Blocks]:
    """The regions of a group, read so that no byte of the source is read twice."""
    block_bytes, most_bytes = limits
    if group.staged:
        with staged(
            source, group.staged, spool, most_bytes=most_bytes, block_bytes=block_bytes
        ) as lease:
            yield _read(lease, group, block_bytes)
        return
    names = dict.fromkeys(name for region in group.regions for name in region.leaf.sources)
    found = source.lease([arrays[name] for name in names])
    assert found is not None
    if not group.is_assembled:
        yield _read(found, group, block_bytes)
        return
    with assembled(
        found,
        group.regions,
        spool,
        most_bytes=most_bytes // 2,  # what is decoded or cast is there twice for a while
        block_bytes=block_bytes,
    ) as blocks:
        yield blocks


def _read(lease: ReadableArrays, group: LeafGroup, block_bytes: int) -> Blocks:
    for regions in region_batches(group.regions, block_bytes):
        yield regions, lease.read(regions, block_bytes)


def digest(values: np.ndarray) -> str:
    """A digest of an array's bytes, in row-major order."""
    data: Any = values.reshape(-1).view(np.uint8)  # its buffer is untyped in some versions
    return hashlib.sha256(data).hexdigest()[:32]


TakeBlocks = Callable[[Sequence[LeafRegion], Sequence[np.ndarray]], list[str]]


class _Pipeline:
    """Takes a block while the next one is read; gives back digests in their order."""

    def __init__(self, take: TakeBlocks) -> None:
        self._take = take
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, "convert-write")
        self._running: deque[Future[list[str]]] = deque()

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def put(self, regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> list[str]:
        """Takes the next block; gives the digests of an earlier one, if it had to wait for it."""
        found = self._running.popleft().result() if len(self._running) >= _IN_FLIGHT else []
        self._running.append(self._pool.submit(self._take, regions, values))
        return found

    def finish(self) -> list[str]:
        """Waits for all."""
        return [text for job in self._running for text in job.result()]


def verify_groups(
    finished: CheckpointReader,
    groups: Sequence[LeafGroup],
    done: Mapping[int, Sequence[str]],
    processes: Processes,
    limits: ConversionLimits,
    report: ProgressReport,
) -> None:
    """Reads this process's share of what was written, and compares every bit.

    Args:
        finished: The finished checkpoint.
        groups: All groups.
        done: The digests that were recorded as the values were read from the source.
        processes: The processes.
        limits: What may be in memory.
        report: Told after each block.

    Raises:
        MismatchError: Something else is there; names all leaves.
        PeerError: Another process failed.
    """
    differing: dict[str, None] = {}
    arrays = arrays_of(finished.tree)
    for group in shares(groups, processes.process_count)[processes.process_index]:
        processes.check(VERIFYING)
        digests: list[str] = []
        with _Pipeline(lambda _, values: [digest(value) for value in values]) as pipeline:
            for regions in region_batches(group.regions, limits.block_bytes):
                values = finished.read([(arrays[leaf.name], box) for leaf, box in regions])
                digests += pipeline.put(regions, values)
                report.add(sum(region.nbytes for region in regions), regions[-1].leaf.name)
            digests += pipeline.finish()
        for region, one, other in zip(group.regions, digests, done[group.number], strict=True):
            if one != other:
                differing[region.leaf.name] = None
    if differing:
        raise MismatchError.collect(
            [
                MismatchError("what was written differs from the source", tensor=name)
                for name in differing
            ],
            hint="The disk or the memory of this machine may be failing; convert again with"
            " restart=True (--restart).",
        )
