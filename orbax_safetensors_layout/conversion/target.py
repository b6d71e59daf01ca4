"""Targets of conversions: their arrays, and the regions of these that are written at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from orbax_safetensors_layout.format import ByteRange, RangeChecksums, TensorKind
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import BoundExpr
from orbax_safetensors_layout.runtime import batches

FINISHED = "finished"
"""The folder, in the conversion's own, that becomes the checkpoint."""

_MOST_REGIONS = 2048  # that are planned at once: each may be of a thousand pieces


@dataclasses.dataclass(frozen=True, slots=True)
class TargetArray:
    """An array of a target, as a leaf of its tree; the shape of typed PRNG keys is their data's."""

    name: str  # dotted
    shape: tuple[int, ...]
    dtype: np.dtype  # of the values that the target takes
    kind: TensorKind  # when it is restored
    made_of: str | BoundExpr  # the source's array that it is, or an expression over several
    key_impl: str | None = None  # the PRNG implementation of typed keys

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source's arrays that it takes."""
        return (self.made_of,) if isinstance(self.made_of, str) else self.made_of.sources()

    def valued(self, dtype: np.dtype) -> TargetArray:
        """Return the array with values of a dtype."""
        return self if self.dtype == dtype else dataclasses.replace(self, dtype=dtype)


class LeafRegion(NamedTuple):
    """A box of an array of a target."""

    leaf: TargetArray
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.size * self.leaf.dtype.itemsize


def region_batches(regions: Iterable[LeafRegion], most_bytes: int) -> Iterator[list[LeafRegion]]:
    """Groups regions that are read together."""
    least = most_bytes // _MOST_REGIONS
    return batches(regions, lambda region: max(region.nbytes, least), most_bytes)


class Target(Protocol):
    """A checkpoint that is written, in regions, by several processes and over several runs."""

    leaves: Sequence[TargetArray]
    written: RangeChecksums | None  # what `write` adds to, for `commit`; None without checksums

    def stored_name(self, leaf: TargetArray) -> str:
        """Return the name under which the checkpoint stores an array."""

    def regions(self, leaf: TargetArray, most_bytes: int) -> list[LeafRegion]:
        """Return the regions in which an array is written; together all of it."""

    def describe(self) -> object:
        """Return all that other targets of the same leaves differ in, compared by `repr`."""

    def open(self, folder: str, process: int) -> None:
        """Begins, or continues, to write in the conversion's folder, which all processes share."""

    def write(self, regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> None:
        """Writes the values of some regions. Safe to use from several threads."""

    def flush(self) -> None:
        """Waits until all that was written survives a crash."""

    def close(self) -> None:
        """Closes all files."""

    def commit(self, folder: str, written: Sequence[ByteRange]) -> None:
        """Completes the checkpoint in `FINISHED`, on one process, when all has been `written`."""
