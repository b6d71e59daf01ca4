"""The cost of a plan, in numbers that can be added over processes and printed."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from orbax_safetensors_layout.sharding import Spec


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one process's share of a load or a save; `+` adds shares.

    Attributes:
        tensors: Tensors of which the process reads something.
        needed_bytes: Bytes of the distinct shards that the process's devices hold.
        read_bytes: Bytes requested from storage: needed bytes plus gaps that are read through. For
            a save: bytes of pieces that are put together into files.
        written_bytes: For a save: bytes written, pieces and headers included.
        requests: Ranged reads.
        files: Files opened for data (their headers are read besides). A sum counts a file once
            for each process that opens it.
        peak_host_bytes: Bound on host memory held beyond the arrays that are returned; a sum
            over processes.
    """

    tensors: int = 0
    needed_bytes: int = 0
    read_bytes: int = 0
    requests: int = 0
    files: int = 0
    peak_host_bytes: int = 0
    written_bytes: int = 0

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
        return (
            f"{self.tensors:,} tensors, {self.needed_bytes:,} bytes needed, "
            f"{self.read_bytes:,} bytes read ({self.over_read:.2f}x) in {self.requests:,} requests "
            f"from {self.files:,} files, at most {self.peak_host_bytes:,} bytes of staging memory"
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
