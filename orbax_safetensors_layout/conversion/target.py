"""What a conversion makes: leaves, the regions that are written at once, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .readable_arrays import LeafRegion, TargetLeaf

FINISHED = "finished"
"""The folder, in the conversion's own, that becomes the checkpoint."""


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
