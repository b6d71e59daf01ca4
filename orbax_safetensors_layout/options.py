"""Every knob and default of the package, in one place."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class Progress(NamedTuple):
    """What a progress callback is told after each tensor.

    Attributes:
        done_bytes: Bytes of this process's share that are finished.
        total_bytes: Bytes of this process's share.
        tensor: The tensor that was finished last.
    """

    done_bytes: int
    total_bytes: int
    tensor: str


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
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float
    request_bytes: int
    staging_bytes: int
    concurrency: int

    @property
    def max_gap_bytes(self) -> int:
        """The largest gap, in bytes, that is cheaper to read than to skip."""
        return int(self.latency_seconds * self.bandwidth_bytes_per_second)


PROFILES: Mapping[str, StorageProfile] = MappingProxyType(
    {
        # 2.4 GiB/s: one cold virtio disk; a page-cached file is five times faster.
        "local": StorageProfile(
            latency_seconds=1e-5,
            bandwidth_bytes_per_second=2.4 * GIB,
            request_bytes=8 * MIB,
            staging_bytes=2 * MIB,
            # Copies out of the page cache need a thread a core, disks a few requests in flight.
            concurrency=min(32, max(4, 2 * (os.cpu_count() or 1))),
        ),
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a checkpoint is read.

    Attributes:
        memory_budget_bytes: Host bytes that reads may hold beyond the arrays that are returned:
            staging buffers, and buffers whose shard is not yet on its device. On the CPU backend
            arrays adopt the buffers they were read into, so those do not count.
        concurrency: Requests in flight at once; `None` takes the storage class's default.
        request_bytes: Largest single request; `None` takes the storage class's default.
        latency_seconds: Per storage class (`{"local": 1e-5}`), instead of the default.
        bandwidth_bytes_per_second: Per storage class, instead of the default.
        mmap: Let arrays on the CPU backend adopt the mapped pages of local files where the data is
            64-byte aligned, instead of reading them. The file must then not be overwritten in
            place or truncated while an array lives (replacing it by rename is safe), and numpy
            arrays are read-only.
        strict: Refuse a checkpoint that has tensors which the abstract tree does not name.
        progress: False, True (a bar on stderr; needs the `progress` extra), or a callable that is
            given a `Progress`.
    """

    memory_budget_bytes: int = 2 * GIB
    concurrency: int | None = None
    request_bytes: int | None = None
    latency_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth_bytes_per_second: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mmap: bool = False
    strict: bool = False
    progress: bool | Callable[[Progress], None] = False

    def __post_init__(self) -> None:
        for name in ("memory_budget_bytes", "concurrency", "request_bytes"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_count and value > 0):
                raise ValueError(f"ReadOptions.{name} must be a positive integer, got {value!r}.")
        for name in ("mmap", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"ReadOptions.{name} must be True or False.")
        for name in ("latency_seconds", "bandwidth_bytes_per_second"):
            unknown = sorted(set(getattr(self, name)) - set(PROFILES))
            if unknown:
                raise ValueError(
                    f"ReadOptions.{name} names unknown storage classes {unknown}; "
                    f"known: {sorted(PROFILES)}."
                )
        for kind, seconds in self.latency_seconds.items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"ReadOptions.latency_seconds[{kind!r}] is {seconds}.")
        for kind, rate in self.bandwidth_bytes_per_second.items():
            if not 0 < rate < math.inf:
                raise ValueError(f"ReadOptions.bandwidth_bytes_per_second[{kind!r}] is {rate}.")

    def profile(self, kind: str) -> StorageProfile:
        """The cost model of a storage class with this object's overrides applied."""
        base = PROFILES[kind]
        request_bytes = self.request_bytes
        if request_bytes is None:  # a small budget does not make ever smaller requests
            request_bytes = min(base.request_bytes, max(self.memory_budget_bytes, 64 * KIB))
        return StorageProfile(
            latency_seconds=self.latency_seconds.get(kind, base.latency_seconds),
            bandwidth_bytes_per_second=self.bandwidth_bytes_per_second.get(
                kind, base.bandwidth_bytes_per_second
            ),
            request_bytes=request_bytes,
            staging_bytes=min(base.staging_bytes, request_bytes),
            concurrency=self.concurrency or base.concurrency,
        )
