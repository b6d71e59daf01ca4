"""Jobs: the smallest pieces of a read plan that one thread carries out.

Ranges whose bytes are in the file in the order of memory are read straight into their place;
others are read into a staging buffer and put in place by numpy's strided copies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan import RequestGroup
from orbax_safetensors_layout.runtime import Bytes, align
from orbax_safetensors_layout.storage import Buffer, RangeReader

from .staged_blocks import Block, Cut, Scratch, blocks_of
from .tile_buffers import BufferSlice

_JOB_SECONDS = 1e-3  # many small requests share a job that takes about this long

Job = Callable[[RangeReader, Scratch], tuple[int, int]]
"""The work of one thread: reads, and puts what was read in its place. Returns the bytes that it has
read, and the number of its requests."""


def jobs_of(
    group: RequestGroup, destinations: Sequence[BufferSlice], profile: StorageProfile
) -> Iterator[Job]:
    """The jobs that fill `destinations`, lazily."""
    if len(group.requests) > 1:
        yield functools.partial(_read_group, group, destinations)
    elif destinations[0].region.read.direct:
        yield from _runs_jobs(group.file, destinations, profile)
    else:
        blocks = blocks_of(group.requests[0], destinations)
        batch = _per_job(profile.staging_bytes, profile)
        shared = destinations[0].region.layout.shared
        while of_job := list(itertools.islice(blocks, batch)):
            yield functools.partial(_read_blocks, group.file, of_job, shared)


def _runs_jobs(
    file: str, destinations: Sequence[BufferSlice], profile: StorageProfile
) -> Iterator[Job]:
    requests = destinations[0].region.read.requests
    run = requests.run_bytes
    if run > profile.request_bytes:
        for number in range(requests.count):
            for start in range(0, run, profile.request_bytes):
                piece = (start, min(start + profile.request_bytes, run))
                numbers = range(number, number + 1)
                yield functools.partial(_read_runs, file, destinations, numbers, piece)
        return
    batch = _per_job(run, profile)
    for first in range(0, requests.count, batch):
        numbers = range(first, min(first + batch, requests.count))
        yield functools.partial(_read_runs, file, destinations, numbers, (0, run))


def _per_job(request_bytes: int, profile: StorageProfile) -> int:
    """How many requests of a size share a job: where one more costs little time, several."""
    by_time = int(_JOB_SECONDS / profile.latency_seconds) if profile.latency_seconds else 1024
    return max(1, min(profile.request_bytes // request_bytes, by_time))


def _read_runs(
    file: str,
    destinations: Sequence[BufferSlice],
    numbers: range,
    piece: tuple[int, int],
    storage: RangeReader,
    scratch: Scratch,
) -> tuple[int, int]:
    """Reads some requests of one region, or of one the bytes of a half-open `piece`."""
    destination, *twins = destinations  # the twins hold the same bytes
    region = destination.region
    requests, shared = region.read.requests, region.layout.shared
    start, stop = piece
    offsets = requests.offsets(numbers.start, numbers.stop).tolist()
    for number, offset in zip(numbers, offsets, strict=True):
        within = number * requests.run_bytes
        buffers = destination.buffers(within + start, within + stop)
        storage.read_into(file, region.start + offset + start, buffers, shared=shared)
        for twin in twins:
            twin.copy_from(destination, within + start, within + stop)
    return (stop - start) * len(numbers), len(numbers)


def _read_blocks(
    file: str, blocks: Sequence[Block], shared: bool, storage: RangeReader, scratch: Scratch
) -> tuple[int, int]:
    """Reads some blocks of one request, one after the other."""
    for block in blocks:
        staging = scratch.take(block.cut.staging_bytes)
        for offset, buffers in block.buffers(staging, scratch):
            storage.read_into(file, offset, buffers, shared=shared)
        block.copy(staging.data)
    requests = [block.cut.requests for block in blocks]
    return sum(r.total_bytes for r in requests), sum(r.count for r in requests)


def _read_group(
    group: RequestGroup, destinations: Sequence[BufferSlice], storage: RangeReader, scratch: Scratch
) -> tuple[int, int]:
    """Reads neighbouring small requests as one request."""
    parts, twins = _parts_of(group, destinations)
    start, stop = destinations[0].region.start, destinations[-1].region.stop
    staged = sum(align(p.cut.staging_bytes) for p in parts if isinstance(p, Block))
    spans = [_span(part) for part in parts]
    has_gaps = any(a[1] < b[0] for a, b in itertools.pairwise(spans))
    staging = scratch.take(staged + (stop - start if has_gaps else 0))
    stage_at = 0
    places: list[tuple[Bytes, int, int]] = []  # memory, and half-open bytes of it
    copies: list[tuple[Block, int]] = []
    position = start
    for part, (first, end) in zip(parts, spans, strict=True):
        if first > position:
            places.append((staging, staged, staged + first - position))
        if isinstance(part, Block):
            places.append((staging, stage_at, stage_at + end - first))
            copies.append((part, stage_at))
            stage_at += align(end - first)
        else:
            places += [(part.room.memory, *span) for span in part.spans(0, end - first)]
        position = end
    shared = destinations[0].region.layout.shared
    storage.read_into(group.file, start, _joined(places), shared=shared)
    for block, at in copies:
        block.copy(staging.data[at:])
    for twin, part in twins:
        twin.copy_from(part, 0, part.region.stop - part.region.start)
    return stop - start, 1


def _parts_of(
    group: RequestGroup, destinations: Sequence[BufferSlice]
) -> tuple[list[Block | BufferSlice], list[tuple[BufferSlice, BufferSlice]]]:
    """Each request as one block if it is staged, else as its region; and twins of the latter."""
    cuts: dict[tuple[int, int], Cut] = {}  # by the RegionPlan, which tensors of one shape share
    parts: list[Block | BufferSlice] = []
    twins: list[tuple[BufferSlice, BufferSlice]] = []
    rest = iter(destinations)
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
    """The bytes of a part in the file, half-open."""
    if isinstance(part, Block):
        return part.start, part.start + part.cut.requests.run_bytes
    return part.region.start, part.region.stop


def _joined(places: Sequence[tuple[Bytes, int, int]]) -> list[Buffer]:
    """Buffers in file order; neighbours in memory become one."""
    joined: list[tuple[Bytes, int, int]] = []
    for memory, start, stop in places:
        last, first, end = joined[-1] if joined else (None, 0, 0)
        if last is memory and end == start:
            joined[-1] = (memory, first, stop)
        else:
            joined.append((memory, start, stop))
    return [memory.data[start:stop] for memory, start, stop in joined]
