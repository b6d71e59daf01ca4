"""Profiles: what storage classes cost, by which reads are planned and times are estimated."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from types import MappingProxyType

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageProfile:
    """What a storage class costs; the cost model of the read plan is made of these numbers.

    A gap between two needed ranges is read through when `gap / bandwidth < latency`: when reading
    and discarding it is cheaper than one more request.

    Attributes:
        latency_seconds: Time of one more request, without its bytes. For local files this is a
            system call plus the interpreter's overhead (4 to 9 us measured), not the disk's.
        bandwidth_bytes_per_second: Rate of one stream.
        request_bytes: The largest single request; longer ranges are split to run concurrently.
        staging_bytes: The largest request that is copied on from a staging buffer, because its
            destination is strided. Local reads are staged in what a core's cache holds.
        concurrency: Requests in flight at once.
        cached_concurrency: The same where the page cache of the host holds what is read.
        least_request_bytes: Long ranges are not split into shorter requests to keep all streams
            busy. A disk is not faster for more streams.
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    request_bytes: int
    staging_bytes: int
    concurrency: int
    cached_concurrency: int | None = None
    least_request_bytes: int = 1 * MIB

    @property
    def max_gap_bytes(self) -> int:
        """The largest gap, in bytes, that is cheaper to read than to skip."""
        return int(self.latency_seconds * self.bandwidth_bytes_per_second)

    def balanced_request_bytes(self, total_bytes: int) -> int:
        """The length of requests that loses least time, where streams are what limits a load.

        Of requests of `n` bytes, latency takes the share `gap / n` of the time, `gap` being
        `max_gap_bytes`; at the end streams idle for half a request, the share
        `n * concurrency / (2 * total_bytes)`. The sum is least at this length.

        Args:
            total_bytes: What is to be read.
        """
        each = total_bytes / self.concurrency
        return max(self.least_request_bytes, int(math.sqrt(2 * self.max_gap_bytes * each)))

    def within(self, budget_bytes: int) -> StorageProfile:
        """The profile with so few requests at once that staging them takes a quarter of a budget.

        Args:
            budget_bytes: Host memory.
        """
        most = max(1, budget_bytes // (4 * self.staging_bytes))
        return dataclasses.replace(self, concurrency=min(self.concurrency, most))


# A web server or a CDN: tens of milliseconds to the first byte, tens of MB/s a stream. These are no
# measurements; `ReadOptions` takes others.
_WEB = StorageProfile(
    latency_seconds=0.03,
    bandwidth_bytes_per_second=50 * MIB,
    request_bytes=32 * MIB,
    staging_bytes=16 * MIB,
    concurrency=32,
)

# One stream brings 85 to 90 MB/s from S3, after 0.1 to 0.2 s for a small object (Amazon's "Best
# practices design patterns: optimizing Amazon S3 performance"), so about 32 fill 25 Gbit/s.
_OBJECT_STORE = StorageProfile(
    latency_seconds=0.05,
    bandwidth_bytes_per_second=85e6,
    request_bytes=16 * MIB,
    staging_bytes=8 * MIB,
    concurrency=32,
)

PROFILES: Mapping[str, StorageProfile] = MappingProxyType(
    {
        # 2.4 GiB/s: one cold virtio disk; a page-cached file is five times faster.
        "local": StorageProfile(
            latency_seconds=1e-5,
            bandwidth_bytes_per_second=2.4 * GIB,
            request_bytes=8 * MIB,
            least_request_bytes=8 * MIB,
            staging_bytes=2 * MIB,
            # Copies out of the page cache need a thread a core, disks some requests in flight: of
            # what O_DIRECT alone reaches, 4 reached 0.85, 8 0.92 (a virtio disk of 3.4 GiB/s).
            concurrency=min(32, max(8, 2 * (os.cpu_count() or 1))),
            cached_concurrency=min(32, max(2, os.cpu_count() or 1)),
        ),
        # docs/storage.md says where these come from: the clouds' own guides.
        "gs": _OBJECT_STORE,
        "s3": _OBJECT_STORE,
        "az": dataclasses.replace(_OBJECT_STORE, bandwidth_bytes_per_second=60 * MIB),
        "hf": _WEB,
        "https": _WEB,
    }
)
