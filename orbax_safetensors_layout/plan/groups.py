"""Groups: which regions of a file are fetched together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.plan.regions import Region

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
    for region in regions:
        read = region.read
        start = region.start
        length = read.requests.run_bytes
        padded = length > _MAX_UNPADDED_BYTES and not read.direct and read.blocking.pad_bytes
        if read.requests.levels or length >= SMALL_REGION_BYTES or padded:
            yield Group(file, (region,))
            continue
        stop = start + length
        limit_now = profile.request_bytes if read.spans else profile.staging_bytes
        more = 1 + read.spans.count if read.spans else 2
        if (
            pending
            and 0 <= start - end <= profile.max_gap_bytes
            and stop - first <= min(limit, limit_now)
            and buffers + more <= MAX_GROUP_BUFFERS
            and region.layout.shared == pending[0].layout.shared
        ):
            pending.append(region)
            limit = min(limit, limit_now)
            buffers += more
        else:
            if pending:
                yield Group(file, tuple(pending))
            pending, first, limit = [region], start, limit_now
            buffers = more
        end = stop
    if pending:
        yield Group(file, tuple(pending))
