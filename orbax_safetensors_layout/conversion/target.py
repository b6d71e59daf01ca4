"""Targets of conversions: their leaves, the regions that are written at once, and what does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.mapping import BoundExpr

T = TypeVar("T")

FINISHED = "finished"
"""The folder, in the conversion's own, that becomes the checkpoint."""


class TargetLeaf(NamedTuple):
    """One array of a target.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Dtype of the values that the target takes.
        made_of: The array of the source that it is, by name, or an expression over several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    made_of: str | BoundExpr

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source's arrays that it takes."""
        return (self.made_of,) if isinstance(self.made_of, str) else self.made_of.sources()


class LeafRegion(NamedTuple):
    """A box of a leaf.

    Attributes:
        leaf: The leaf.
        box: The box.
    """

    leaf: TargetLeaf
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.box.size * self.leaf.dtype.itemsize


def batches(items: Iterable[T], nbytes: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Groups consecutive items of together up to `most_bytes`, or one that is larger."""
    batch: list[T] = []
    held = 0
    for item in items:
        size = nbytes(item)
        if batch and held + size > most_bytes:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def region_batches(regions: Iterable[LeafRegion], most_bytes: int) -> Iterator[list[LeafRegion]]:
    """Regions that are read together, up to so many bytes, or one."""
    return batches(regions, lambda region: region.nbytes, most_bytes)


class Target(Protocol):
    """A checkpoint that is written, in regions, by several processes and over several runs.

    Attributes:
        leaves: Its arrays.
    """

    leaves: Sequence[TargetLeaf]

    def regions(self, leaf: TargetLeaf, most_bytes: int) -> list[LeafRegion]:
        """What is written of a leaf at once; together all of it."""
        ...

    def describe(self) -> object:
        """All that tells this target from another of the same leaves, to be compared by `repr`."""
        ...

    def open(self, folder: str, process: int) -> TargetWriter:
        """Begins, or continues, to write.

        Args:
            folder: A folder of the conversion's own, the same for all processes.
            process: The process.
        """
        ...

    def commit(self, folder: str) -> None:
        """Completes the checkpoint in `FINISHED`, when all is written; called by one process.

        Args:
            folder: As for `open`.
        """
        ...


class TargetWriter(Protocol):
    """Writes regions. Safe to use from several threads."""

    def write(self, regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> None:
        """Writes the values of some regions."""
        ...

    def flush(self) -> None:
        """Waits until all that was written survives a crash."""
        ...

    def close(self) -> None:
        """Releases what is open."""
        ...
