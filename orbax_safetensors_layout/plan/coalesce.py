"""Coalesces regions of a file into requests: those that interlace, then small neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.options import KIB, MIB, StorageProfile

from .regions import ByteRegion, RegionPlan

# Smaller regions share a request, and a buffer, with their neighbours in the file. Larger ones have
# a buffer of their own, so that freeing one array frees its memory.
SMALL_REGION_BYTES = 4 * MIB
# Buffers that one request may fill; with the gaps between them below IOV_MAX, 1024 on Linux.
_MAX_GROUP_BUFFERS = 1000
# A larger region whose staging rows are padded is read by itself: in a group they are not.
_MAX_UNPADDED_BYTES = 256 * KIB


class Request(NamedTuple):
    """Regions, by offset, that the same requests serve: one, or equal ones that interlace."""

    regions: tuple[ByteRegion, ...]

    @property
    def read(self) -> RegionPlan:
        return self.regions[0].read

    @property
    def start(self) -> int:
        return self.regions[0].start

    @property
    def added_bytes(self) -> int:
        """Bytes from the first region to the last, by which each request is longer."""
        return self.regions[-1].start - self.regions[0].start

    @property
    def stop(self) -> int:
        return self.regions[-1].stop

    @property
    def needed_bytes(self) -> int:
        """Bytes that the regions need; those of copies of one another once."""
        return len({region.start for region in self.regions}) * self.read.needed_bytes

    def cost(self) -> tuple[int, int]:
        """Return bytes read and requests, where it is in no group."""
        count = self.read.storage_requests
        return self.read.storage_bytes + count * self.added_bytes, count


class RequestGroup(NamedTuple):
    """Requests of one file: one of any kind, or several small ones that are read as one."""

    file: str
    requests: tuple[Request, ...]

    @property
    def regions(self) -> tuple[ByteRegion, ...]:
        if len(self.requests) == 1:
            return self.requests[0].regions
        return tuple(region for request in self.requests for region in request.regions)

    def cost(self) -> tuple[int, int]:
        """Return bytes read and requests."""
        if len(self.requests) > 1:
            return self.requests[-1].stop - self.requests[0].start, 1
        return self.requests[0].cost()

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yields file and half-open byte ranges; long ones are read in several requests."""
        first = self.requests[0]
        if len(self.requests) > 1:
            yield self.file, first.start, self.requests[-1].stop
            return
        runs = first.read.requests
        for offset in runs.offsets().tolist():
            start = first.start + offset
            yield self.file, start, start + runs.run_bytes + first.added_bytes


def requests_of(
    regions: Sequence[ByteRegion], held_bytes: Callable[[ByteRegion], int], most_held: int
) -> Iterator[Request]:
    """Joins equal regions, by offset, whose tiles hold at most `most_held` host bytes together."""
    pending: list[ByteRegion] = []
    held = 0
    for region in regions:
        more = held_bytes(region)
        if (
            pending
            and region.read is pending[0].read
            and region.layout.shared == pending[0].layout.shared
            and region.read.interlaces(region.start - pending[0].start)
            and held + more <= most_held
        ):
            pending.append(region)
            held += more
            continue
        if pending:
            yield Request(tuple(pending))
        pending, held = [region], more
    if pending:
        yield Request(tuple(pending))


def coalesced(
    file: str,
    regions: Sequence[ByteRegion],
    max_gap_bytes: int,
    profile: StorageProfile,
    held_bytes: Callable[[ByteRegion], int],
    most_held: int,
) -> Iterator[RequestGroup]:
    """Joins small neighbours, by offset, with gaps of at most `max_gap_bytes`."""
    pending: list[Request] = []
    first = end = limit = buffers = 0
    # By the RegionPlan, which tensors of one shape share.
    known: dict[tuple[int, int], SmallRequest | None] = {}
    for request in requests_of(regions, held_bytes, most_held):
        key = id(request.read), request.added_bytes
        if key not in known:
            known[key] = SmallRequest.of(request, profile)
        small = known[key]
        if small is None:
            yield RequestGroup(file, (request,))
            continue
        start = request.start
        stop = start + small.length
        most = min(limit, small.limit)
        if not (
            pending
            and request.regions[0].layout.shared == pending[0].regions[0].layout.shared
            and small.may_join(start - end, stop - first, most, buffers, max_gap_bytes)
        ):
            if pending:
                yield RequestGroup(file, tuple(pending))
            pending, first, most, buffers = [], start, small.limit, 0
        pending.append(request)
        buffers += small.buffers
        end, limit = stop, most
    if pending:
        yield RequestGroup(file, tuple(pending))


class SmallRequest(NamedTuple):
    """A small request that may be in a group."""

    length: int  # its bytes in the file
    limit: int  # most bytes of a group that it is in
    buffers: int  # buffers that it fills, and one for the gap before it

    @classmethod
    def of(cls, request: Request, profile: StorageProfile) -> SmallRequest | None:
        """Return None for a request that is in no group."""
        read = request.read
        length = read.requests.run_bytes + request.added_bytes
        padded = length > _MAX_UNPADDED_BYTES and not read.direct and read.blocking.pad_bytes
        if read.requests.levels or length >= SMALL_REGION_BYTES or padded:
            return None
        if read.spans is None:
            return cls(length, profile.staging_bytes, 2)
        return cls(length, profile.request_bytes, 1 + read.spans.count)

    def may_join(self, gap: Any, span: Any, limit: Any, buffers: Any, max_gap_bytes: int) -> Any:
        """Whether it joins a group, which then has `span` bytes; for numbers, or arrays of them."""
        within = (gap >= 0) & (gap <= max_gap_bytes) & (span <= limit)
        return within & (buffers + self.buffers <= _MAX_GROUP_BUFFERS)
