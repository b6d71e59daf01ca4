"""Jobs: the smallest pieces of a read plan that one thread carries out.

Ranges whose bytes are in the file in the order of memory are read straight into their place;
others are read into a staging buffer and put in place by numpy's strided copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan import RequestGroup
from orbax_safetensors_layout.runtime import Bytes, align
from orbax_safetensors_layout.storage import Buffer, RangeReader

from .staged_blocks import Block, Cut, Scratch, blocks_of
from .tile_buffers import BufferSlice

_JOB_SECONDS = 1e-3  # many small requests share a job that takes about this long


class RunsJob(NamedTuple):
    """Reads some requests of one region, or of one the bytes of a half-open `piece`."""

    file: str
    slices: Sequence[BufferSlice]  # of the region, and of others with the same bytes
    numbers: range
    piece: tuple[int, int]

    def run(self, storage: RangeReader, scratch: Scratch) -> tuple[int, int]:
        """Reads, and puts what was read in its place; returns its bytes and storage requests."""
        first, *twins = self.slices
        region = first.region
        requests, shared = region.read.requests, region.layout.shared
        start, stop = self.piece
        offsets = requests.offsets(self.numbers.start, self.numbers.stop).tolist()
        for number, offset in zip(self.numbers, offsets, strict=True):
            within = number * requests.run_bytes
            buffers = first.buffers(within + start, within + stop)
            storage.read_into(self.file, region.start + offset + start, buffers, shared=shared)
            for twin in twins:
                twin.copy_from(first, within + start, within + stop)
        return (stop - start) * len(self.numbers), len(self.numbers)


class BlocksJob(NamedTuple):
    """Reads some blocks of one request, one after the other."""

    file: str
    blocks: Sequence[Block]
    shared: bool

    def run(self, storage: RangeReader, scratch: Scratch) -> tuple[int, int]:
        for block in self.blocks:
            staging = scratch.take(block.cut.staging_bytes)
            for offset, buffers in block.buffers(staging, scratch):
                storage.read_into(self.file, offset, buffers, shared=self.shared)
            block.copy(staging.data)
        requests = [block.cut.requests for block in self.blocks]
        return sum(r.total_bytes for r in requests), sum(r.count for r in requests)


class GroupJob(NamedTuple):
    """Reads neighbouring small requests as one."""

    group: RequestGroup
    slices: Sequence[BufferSlice]

    def run(self, storage: RangeReader, scratch: Scratch) -> tuple[int, int]:
        parts, twins = _parts_of(self.group, self.slices)
        start, stop = self.slices[0].region.start, self.slices[-1].region.stop
        staged = sum(align(p.cut.staging_bytes) for p in parts if isinstance(p, Block))
        spans = [_span(part) for part in parts]
        has_gaps = any(a[1] < b[0] for a, b in itertools.pairwise(spans))
        staging = scratch.take(staged + (stop - start if has_gaps else 0))
        stage_at, gap_at = 0, staged
        places: list[tuple[Bytes, int, int]] = []  # memory, and half-open bytes of it
        copies: list[tuple[Block, int]] = []
        position = start
        for part, (first, end) in zip(parts, spans, strict=True):
            if first > position:
                # Each gap has a place of its own, as a cache keeps what is read there, too.
                places.append((staging, gap_at, gap_at + first - position))
                gap_at += first - position
            if isinstance(part, Block):
                places.append((staging, stage_at, stage_at + end - first))
                copies.append((part, stage_at))
                stage_at += align(end - first)
            else:
                places += [(part.buffer.memory, *span) for span in part.spans(0, end - first)]
            position = end
        shared = self.slices[0].region.layout.shared
        storage.read_into(self.group.file, start, _joined(places), shared=shared)
        for block, at in copies:
            block.copy(staging.data[at:])
        for twin, part in twins:
            twin.copy_from(part, 0, part.region.stop - part.region.start)
        return stop - start, 1


Job: TypeAlias = RunsJob | BlocksJob | GroupJob


def jobs_of(
    group: RequestGroup, slices: Sequence[BufferSlice], profile: StorageProfile
) -> Iterator[Job]:
    """Yields the jobs that fill `slices`, lazily."""
    if len(group.requests) > 1:
        yield GroupJob(group, slices)
    elif slices[0].region.read.direct:
        yield from _runs_jobs(group.file, slices, profile)
    else:
        blocks = blocks_of(group.requests[0], slices)
        batch = _per_job(profile.staging_bytes, profile)
        while of_job := list(itertools.islice(blocks, batch)):
            yield BlocksJob(group.file, of_job, slices[0].region.layout.shared)


def _runs_jobs(
    file: str, slices: Sequence[BufferSlice], profile: StorageProfile
) -> Iterator[RunsJob]:
    requests = slices[0].region.read.requests
    run = requests.run_bytes
    if run > profile.request_bytes:
        for number in range(requests.count):
            for start in range(0, run, profile.request_bytes):
                piece = (start, min(start + profile.request_bytes, run))
                yield RunsJob(file, slices, range(number, number + 1), piece)
        return
    batch = _per_job(run, profile)
    for first in range(0, requests.count, batch):
        yield RunsJob(file, slices, range(first, min(first + batch, requests.count)), (0, run))


def _per_job(request_bytes: int, profile: StorageProfile) -> int:
    """Return how many requests of a size share a job: several where more cost little time."""
    by_time = int(_JOB_SECONDS / profile.latency_seconds) if profile.latency_seconds else 1024
    return max(1, min(profile.request_bytes // request_bytes, by_time))


def _parts_of(
    group: RequestGroup, slices: Sequence[BufferSlice]
) -> tuple[list[Block | BufferSlice], list[tuple[BufferSlice, BufferSlice]]]:
    """Return each request as its one block if staged, else its region; and twins of the latter."""
    cuts: dict[tuple[int, int], Cut] = {}  # by the RegionPlan, which tensors of one shape share
    parts: list[Block | BufferSlice] = []
    twins: list[tuple[BufferSlice, BufferSlice]] = []
    rest = iter(slices)
    for request in group.requests:
        first, *others = of_request = [*itertools.islice(rest, len(request.regions))]
        if request.read.direct:
            parts.append(first)
            twins += [(twin, first) for twin in others]
            continue
        key = id(request.read), request.added_bytes
        if key not in cuts:
            cuts[key] = Cut.whole(request.read, request.added_bytes)
        parts.append(Block(cuts[key], request.start, of_request))
    return parts, twins


def _span(part: Block | BufferSlice) -> tuple[int, int]:
    """Return the bytes of a part in the file, half-open."""
    if isinstance(part, Block):
        return part.start, part.start + part.cut.requests.run_bytes
    return part.region.start, part.region.stop


def _joined(places: Sequence[tuple[Bytes, int, int]]) -> list[Buffer]:
    """Return buffers in file order; neighbours in memory become one."""
    joined: list[tuple[Bytes, int, int]] = []
    for memory, start, stop in places:
        last, first, end = joined[-1] if joined else (None, 0, 0)
        if last is memory and end == start:
            joined[-1] = (memory, first, stop)
        else:
            joined.append((memory, start, stop))
    return [memory.data[start:stop] for memory, start, stop in joined]
