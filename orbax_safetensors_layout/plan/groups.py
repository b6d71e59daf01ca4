"""Groups: which regions of a file are fetched together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan.regions import Region, RegionRead

SMALL_REGION_BYTES = 4 << 20
"""Smaller regions share a request, and a buffer, with their neighbours in the file. Larger ones
have a buffer of their own, so that freeing one array frees its memory."""

MAX_GROUP_BUFFERS = 1000
"""Most buffers that one request fills; below IOV_MAX, 1024 on Linux, with the gaps between them."""

_MAX_UNPADDED_BYTES = 256 << 10
"""A larger region whose staging rows are padded is read by itself: in a group they are not."""


class Group(NamedTuple):
    """Regions of one file that are fetched together.

    Attributes:
        file: The file.
        regions: One region of any kind, or several small ones whose span is one request.
    """

    file: str
    regions: tuple[Region, ...]


def grouped(file: str, regions: Sequence[Region], profile: StorageProfile) -> Iterator[Group]:
    """Joins neighbouring small regions whose gap is cheaper to read than to skip.

    Args:
        file: The file.
        regions: Regions of it, by offset.
        profile: The cost model.
    """
    pending: list[Region] = []
    first = end = limit = buffers = 0
    known: dict[
        int, SmallRequest | None
    ] = {}  # by the RegionRead, which tensors of one shape share
    for region in regions:
        read, start = region.read, region.start
        try:
            request = known[id(read)]
        except KeyError:
            request = known[id(read)] = SmallRequest.of(read, profile)
        if request is None:
            yield Group(file, (region,))
            continue
        stop = start + request.length
        if (
            pending
            and 0 <= start - end <= profile.max_gap_bytes
            and stop - first <= min(limit, request.limit)
            and buffers + request.buffers <= MAX_GROUP_BUFFERS
            and region.layout.shared == pending[0].layout.shared
        ):
            pending.append(region)
            limit = min(limit, request.limit)
            buffers += request.buffers
        else:
            if pending:
                yield Group(file, tuple(pending))
            pending, first, limit = [region], start, request.limit
            buffers = request.buffers
        end = stop
    if pending:
        yield Group(file, tuple(pending))


class SmallRequest(NamedTuple):
    """What a small region brings to a group.

    Attributes:
        length: Its bytes in the file.
        limit: Most bytes of a group that it is in.
        buffers: Buffers that it fills, and one for the gap before it.
    """

    length: int
    limit: int
    buffers: int

    @classmethod
    def of(cls, read: RegionRead, profile: StorageProfile) -> SmallRequest | None:
        """None where the region is read by itself."""
        length = read.requests.run_bytes
        padded = length > _MAX_UNPADDED_BYTES and not read.direct and read.blocking.pad_bytes
        if read.requests.levels or length >= SMALL_REGION_BYTES or padded:
            return None
        if read.spans is None:
            return cls(length, profile.staging_bytes, 2)
        return cls(length, profile.request_bytes, 1 + read.spans.count)
