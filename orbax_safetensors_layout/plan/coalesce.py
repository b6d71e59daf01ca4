"""Coalesces regions of a file into requests: those that interlace, then small neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.options import StorageProfile

from .regions import ByteRegion, RegionPlan

# Smaller regions share a request, and a buffer, with their neighbours in the file. Larger ones have
# a buffer of their own, so that freeing one array frees its memory.
SMALL_REGION_BYTES = 4 << 20
# Buffers that one request may fill; with the gaps between them below IOV_MAX, 1024 on Linux.
MAX_GROUP_BUFFERS = 1000
# A larger region whose staging rows are padded is read by itself: in a group they are not.
_MAX_UNPADDED_BYTES = 256 << 10


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
    def spread_bytes(self) -> int:
        """Bytes from the first region to the last, by which each request is longer."""
        return self.regions[-1].start - self.regions[0].start

    @property
    def stop(self) -> int:
        return self.regions[-1].stop

    @property
    def needed_bytes(self) -> int:
        """Bytes that the regions need; those of copies of one another once."""
        return len({region.start for region in self.regions}) * self.read.runs.total_bytes

    def cost(self, profile: StorageProfile) -> tuple[int, int]:
        """Return bytes read and requests, where it is read by itself."""
        count = self.read.storage_requests(profile)
        return self.read.storage_bytes() + count * self.spread_bytes, count


class RequestGroup(NamedTuple):
    """Fetches of one file: one of any kind, or several small ones whose span is one request."""

    file: str
    fetches: tuple[Request, ...]

    @property
    def regions(self) -> tuple[ByteRegion, ...]:
        return tuple(region for fetch in self.fetches for region in fetch.regions)

    def cost(self, profile: StorageProfile) -> tuple[int, int]:
        if len(self.fetches) > 1:
            return self.fetches[-1].stop - self.fetches[0].start, 1
        return self.fetches[0].cost(profile)

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yields file and half-open byte ranges; long ones are read in several requests."""
        fetch = self.fetches[0]
        if len(self.fetches) > 1:
            yield self.file, fetch.start, self.fetches[-1].stop
            return
        runs = fetch.read.requests
        for offset in runs.offsets().tolist():
            start = fetch.start + offset
            yield self.file, start, start + runs.run_bytes + fetch.spread_bytes


def requests_of(
    regions: Sequence[ByteRegion], held_bytes: Callable[[ByteRegion], int], most_held: int
) -> Iterator[Request]:
    """Joins equal regions, by offset, whose tiles hold at most `most_held` host bytes together."""
    pending: list[ByteRegion] = []
    for region in regions:
        if (
            pending
            and region.read is pending[0].read
            and region.layout.shared == pending[0].layout.shared
            and region.read.interlaces(region.start - pending[0].start)
            and sum(map(held_bytes, (*pending, region))) <= most_held
        ):
            pending.append(region)
            continue
        if pending:
            yield Request(tuple(pending))
        pending = [region]
    if pending:
        yield Request(tuple(pending))


def coalesced(
    file: str,
    regions: Sequence[ByteRegion],
    profile: StorageProfile,
    held_bytes: Callable[[ByteRegion], int],
    most_held: int,
) -> Iterator[RequestGroup]:
    """Joins small neighbours, by offset, whose gap is cheaper to read than to skip."""
    pending: list[Request] = []
    first = end = limit = buffers = 0
    # By the RegionPlan, which tensors of one shape share.
    known: dict[tuple[int, int], SmallRequest | None] = {}
    for fetch in requests_of(regions, held_bytes, most_held):
        key = id(fetch.read), fetch.spread_bytes
        if key not in known:
            known[key] = SmallRequest.of(fetch, profile)
        request = known[key]
        if request is None:
            yield RequestGroup(file, (fetch,))
            continue
        start = fetch.start
        stop = start + request.length
        if (
            pending
            and 0 <= start - end <= profile.max_gap_bytes
            and stop - first <= min(limit, request.limit)
            and buffers + request.buffers <= MAX_GROUP_BUFFERS
            and fetch.regions[0].layout.shared == pending[0].regions[0].layout.shared
        ):
            limit = min(limit, request.limit)
        else:
            if pending:
                yield RequestGroup(file, tuple(pending))
            pending, first, limit, buffers = [], start, request.limit, 0
        pending.append(fetch)
        buffers += request.buffers
        end = stop
    if pending:
        yield RequestGroup(file, tuple(pending))


class SmallRequest(NamedTuple):
    """A small fetch that may be in a group."""

    length: int  # its bytes in the file
    limit: int  # most bytes of a group that it is in
    buffers: int  # buffers that it fills, and one for the gap before it

    @classmethod
    def of(cls, fetch: Request, profile: StorageProfile) -> SmallRequest | None:
        """Return None for a fetch that is read by itself."""
        read = fetch.read
        length = read.requests.run_bytes + fetch.spread_bytes
        padded = length > _MAX_UNPADDED_BYTES and not read.direct and read.blocking.pad_bytes
        if read.requests.levels or length >= SMALL_REGION_BYTES or padded:
            return None
        if read.spans is None:
            return cls(length, profile.staging_bytes, 2)
        return cls(length, profile.request_bytes, 1 + read.spans.count)
