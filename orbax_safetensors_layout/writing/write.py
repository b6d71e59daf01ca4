"""Executes a write plan: threads write shards into files, each visible when it is complete.

The first failure stops everything: no further write starts, those in flight are waited for, the
files that were begun are dropped, and the one error names file, tensor and cause.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import explained
from orbax_safetensors_layout.options import MIB, OnProgress
from orbax_safetensors_layout.plan import FileWrite, WritePlan
from orbax_safetensors_layout.runtime import Bytes, ProgressReport, align, allocate
from orbax_safetensors_layout.storage import ByteBuffer

from .folder import CheckpointFolder, OpenFile
from .host import HostValues
from .parts import PartBytes

_JOB_BYTES = 8 * MIB
_STAGED_BYTES = 4 * MIB  # most that a thread stages at once, as much as a direct write takes


def write_parts(
    folder: CheckpointFolder,
    plan: WritePlan,
    values: HostValues,
    progress: OnProgress,
) -> None:
    """Writes the parts that this process's shards have; files that need no more are completed."""
    if plan.pieces is not None and plan.pieces.is_temporary:
        folder.make_pieces_folder()
    _PartWriter(folder, plan, values, progress).run()


class _Segment(NamedTuple):
    source: PartBytes
    start: int
    stop: int


class _PartWriter:
    """The state of one run; only the calling thread schedules."""

    def __init__(
        self,
        folder: CheckpointFolder,
        plan: WritePlan,
        values: HostValues,
        progress: OnProgress,
    ) -> None:
        self._folder = folder
        self._pool = folder.pool
        self._plans = [*plan.writes()]
        self._leaves = plan.leaves
        self._values = values
        self._scratch = threading.local()
        self._lock = threading.Lock()
        self._budget = folder.budget
        parts = (part for file in self._plans for part in file.parts)
        self._report = ProgressReport(progress, sum(part.stop - part.start for part in parts))

    def run(self) -> None:
        # A file system lets one write at a time into a file, so as many files as there are threads
        # take turns.
        files = (self._write_file(plan) for plan in self._plans)
        begun = [
            *itertools.islice(files, 1 if self._folder.storage.appends else self._pool.threads)
        ]
        while begun:
            is_full = True
            for file in [*begun]:
                submitted = next(file, None)
                is_full = is_full and submitted is False
                if submitted is None:
                    begun.remove(file)
                    begun.extend(itertools.islice(files, 1))
            if is_full:
                self._pool.progress()
        self._pool.join()

    def _write_file(self, plan: FileWrite) -> Iterator[bool]:
        """Submits a job of a file in each turn; yields False while the budget has no room."""
        file = self._folder.begin_file(plan)
        for segments in self._segments(plan):
            if segments:
                self._submit(file, segments)
            yield bool(segments)
        if not plan.gathered:
            self._pool.submit(self._folder.written, file)

    def _segments(self, plan: FileWrite) -> Iterator[list[_Segment]]:
        """Yields the segments of each job: a piece of a large part, or several small neighbours.

        Yields an empty list while the budget has no room.
        """
        has_room = self._budget.has_room
        pending: list[_Segment] = []
        first = 0
        most_bytes = self._budget.most_bytes
        for part in (slab for whole in plan.parts for slab in self._values.cut(whole, most_bytes)):
            size = part.stop - part.start
            adjoins = pending and pending[-1].source.part.stop == part.start
            held = self._values.held_bytes(part)
            grows = adjoins and part.stop - first <= _STAGED_BYTES and has_room(held)
            if pending and not grows:
                yield pending
                pending = []
            while not has_room(held):
                yield []
            self._budget.reserve(held)
            source = PartBytes(part, self._leaves[part.leaf], self._values, held)
            if size < _JOB_BYTES:
                first = first if pending else part.start
                pending.append(_Segment(source, 0, size))
                continue
            step = _JOB_BYTES
            if source.staged:
                step = max(1, step // source.block_bytes) * source.block_bytes
            for start in range(0, size, step):
                yield [_Segment(source, start, min(start + step, size))]
        if pending:
            yield pending

    def _submit(self, file: OpenFile, segments: list[_Segment]) -> None:
        self._folder.check()
        self._folder.expect(file, 1)
        self._pool.submit(self._write, file, segments)

    def _write(self, file: OpenFile, segments: list[_Segment]) -> None:
        name = self._leaves[segments[0].source.part.leaf].tensor.name
        with explained(f"while saving {name!r} to {file.plan.name}", name):
            for offset, buffers in self._batches(segments, file.durable):
                file.write_at(offset, buffers)
        self._release(segments)
        self._folder.written(file)

    def _batches(
        self, segments: Sequence[_Segment], durable: bool
    ) -> Iterator[tuple[int, list[ByteBuffer]]]:
        """Yields offsets in the file and the bytes there; staged parts are assembled here."""
        if len(segments) == 1 and segments[0].source.staged:
            source, start, stop = segments[0]
            # What a core's cache holds, unless large writes go straight to the disk.
            step = source.block_bytes
            if durable:
                step *= max(1, _STAGED_BYTES // step)
            for at in range(start, stop, step):
                end = min(at + step, stop)
                scratch = self._take(end - at, source.part.start + at)
                yield source.part.start + at, source.buffers(at, end, scratch)
            return
        staged = sum(align(s.stop - s.start) for s in segments if s.source.staged)
        first = segments[0].source.part.start + segments[0].start
        scratch, used = self._take(staged, first), 0
        buffers: list[ByteBuffer] = []
        for source, start, stop in segments:
            buffers += source.buffers(start, stop, scratch[used:])
            used += align(stop - start) if source.staged else 0
        yield first, buffers

    def _take(self, nbytes: int, offset: int) -> Bytes:
        """Returns this thread's memory, from which whole pages can be written directly."""
        memory: Bytes | None = getattr(self._scratch, "memory", None)
        if memory is None or memory.size < nbytes + mmap.PAGESIZE:
            memory = self._scratch.memory = allocate(nbytes + mmap.PAGESIZE)
        shift = (offset - memory.ctypes.data) % mmap.PAGESIZE
        return memory[shift : shift + nbytes]

    def _release(self, segments: Sequence[_Segment]) -> None:
        with self._lock:
            for source, start, stop in segments:
                source.unwritten_bytes -= stop - start
                if not source.unwritten_bytes:
                    source.drop()
                    self._budget.release(source.held_bytes)
        name = self._leaves[segments[-1].source.part.leaf].tensor.name
        self._report.add(sum(stop - start for _, start, stop in segments), name)
