"""The cost of a plan, in numbers that can be added over processes and printed."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Self

from orbax_safetensors_layout.options import ExchangeProfile, StorageProfile, exchange_profile
from orbax_safetensors_layout.runtime import seconds_text, size_text
from orbax_safetensors_layout.sharding import Spec

_NETWORK_BYTES_PER_SECOND = 25e9 / 8  # all streams' rate, by default at most


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one process's share of a load or a save; `+` adds shares.

    Attributes:
        tensors: Tensors of which the process reads something.
        needed_bytes: Bytes of the distinct shards that the process's devices hold.
        read_bytes: Bytes requested from storage, its egress: needed bytes plus gaps that are read
            through. For a save: bytes of pieces that are put together into files.
        written_bytes: For a save: bytes written, pieces and headers included.
        exchanged_bytes: For a load: bytes that its devices get from those of other processes.
        requests: Ranged reads.
        files: Files opened for data (their headers are read besides). A sum counts a file once
            for each process that opens it.
        peak_host_bytes: Bound on host memory held beyond the arrays that are returned; a sum
            over processes.
        gathered_bytes: For a load: bytes that its devices gather in exchanges, their own included.
        exchange_rounds: Rounds of exchanges that its devices take part in.
        exchange_programs: Programs that XLA compiles for them.
    """

    tensors: int = 0
    needed_bytes: int = 0
    read_bytes: int = 0
    requests: int = 0
    files: int = 0
    peak_host_bytes: int = 0
    written_bytes: int = 0
    exchanged_bytes: int = 0
    gathered_bytes: int = 0
    exchange_rounds: int = 0
    exchange_programs: int = 0

    @property
    def over_read(self) -> float:
        """Bytes read per byte needed, at least 1."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*(a + b for a, b in pairs))

    def __str__(self) -> str:
        if self.written_bytes:
            return (
                f"{self.tensors:,} tensors, {self.written_bytes:,} bytes written to"
                f" {self.files:,} files, {self.read_bytes:,} bytes of pieces read back"
            )
        exchanged = f", {self.exchanged_bytes:,} bytes exchanged" * bool(self.exchanged_bytes)
        return (
            f"{self.tensors:,} tensors, {self.needed_bytes:,} bytes needed, "
            f"{self.read_bytes:,} bytes read ({self.over_read:.2f}x) in {self.requests:,} requests "
            f"from {self.files:,} files{exchanged}, at most {self.peak_host_bytes:,} bytes of"
            " staging memory"
        )


class LeafCost(NamedTuple):
    """The cost of one leaf, read by itself, to the process that it costs most."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    needed_bytes: int  # of its shards
    read_bytes: int
    requests: int


class HostRate(NamedTuple):
    """The rate of a process: of one request, without its bytes, some at once, and of all streams.

    And that of exchanges among its devices and those of others.
    """

    request_seconds: float
    bytes_per_second: float
    shared_bytes_per_second: float = math.inf  # of all hosts together
    exchange: ExchangeProfile = exchange_profile()
    stream_bytes_per_second: float = math.inf  # of one request, which is
    least_request_bytes: int = 0  # no shorter, unless less is read
    processes_per_host: int = 1  # that share the host's rate

    @classmethod
    def of(
        cls,
        profile: StorageProfile,
        bytes_per_second: float | None = None,
        *,
        platform: str = "",
        processes_per_host: int = 1,
    ) -> Self:
        """Return the rate of a storage class to a process, which shares its host with others.

        Its devices are of a platform as JAX names it, or accelerators.
        What is not known of the host is a guess: local streams share a disk, others its network.
        """
        stream = profile.bandwidth_bytes_per_second
        known = bytes_per_second or profile.host_bytes_per_second
        host = known or (stream if profile.streams_share else _NETWORK_BYTES_PER_SECOND)
        own = host / processes_per_host
        if not (known or profile.streams_share):
            own = min(own, stream * profile.streams)
        return cls(
            profile.latency_seconds / profile.streams,
            own,
            profile.shared_bytes_per_second,
            exchange_profile(platform, processes_per_host=processes_per_host),
            stream,
            0 if profile.streams_share else min(profile.least_request_bytes, profile.request_bytes),
            processes_per_host,
        )

    @property
    def owners(self) -> tuple[str, str]:
        """Say whose rate it is, in the singular and in the plural."""
        return ("host", "hosts") if self.processes_per_host == 1 else ("process", "processes")

    def seconds(self, cost: Cost, all_bytes: float = 0.0) -> float:
        """Return the time of a cost, where all hosts together move `all_bytes`."""
        moved_bytes = cost.read_bytes + cost.written_bytes
        reading = self.read_seconds(moved_bytes, all_bytes, cost.requests)
        exchange = cost.gathered_bytes, cost.exchange_rounds, cost.exchange_programs
        return self.exchange.seconds(*exchange, reading=reading)

    def exchange_text(self) -> str:
        (rate, round_seconds, program_seconds), (owner, _) = self.exchange, self.owners
        return (
            f"{size_text(rate)}/s gathered a {owner}, {seconds_text(round_seconds)} a round,"
            f" {seconds_text(program_seconds)} a program that XLA compiles"
        )

    @property
    def shortest_seconds(self) -> float:
        """The time of the bytes of the shortest request that more than that is divided in."""
        return self.least_request_bytes / self.stream_bytes_per_second

    def read_seconds(self, nbytes: float, all_bytes: float, requests: float = 0.0) -> float:
        """Return the time of a read of which this host has `nbytes`, and all have `all_bytes`."""
        least = min(nbytes / self.stream_bytes_per_second, self.shortest_seconds)
        moving = max(nbytes / self.bytes_per_second, all_bytes / self.shared_bytes_per_second)
        return requests * self.request_seconds + max(moving, least)

    def excess_seconds(self, leaf: LeafCost) -> float:
        """Return the time that is spent beyond reading the needed bytes in one go."""
        over = (leaf.read_bytes - leaf.needed_bytes) / self.bytes_per_second
        return leaf.requests * self.request_seconds + over
