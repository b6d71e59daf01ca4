"""Gathers: the places of an array whose elements are in no regular order, as vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from .box import Box


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Equal slabs, each one index of an axis, anywhere in a sequence of elements.

    Attributes:
        axis: The axis.
        places: Index of each slab along it, each once.
        offsets: Element offset of each slab, at least 0; several may have the same.
    """

    axis: int
    places: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    def within(self, start: int, stop: int) -> Gather:
        """The slabs at indices `start` to `stop`, counted from `start`."""
        chosen = (self.places >= start) & (self.places < stop)
        return Gather(self.axis, self.places[chosen] - start, self.offsets[chosen])


def filled_boxes(gathers: Iterable[tuple[Box, Gather]]) -> Iterator[Box]:
    """Boxes that gathers fill, each with a box that holds all of its slabs.

    Example:
        >>> gather = Gather(0, np.array([5, 2, 3]), np.array([0, 4, 8]))
        >>> list(filled_boxes([(Box((2,), (6,)), gather)]))
        [Box(start=(2,), stop=(4,)), Box(start=(5,), stop=(6,))]
    """
    alike: dict[tuple[int, Box], list[npt.NDArray[np.int64]]] = {}
    for box, gather in gathers:
        alike.setdefault((gather.axis, box.along(gather.axis, 0, 1)), []).append(gather.places)
    for (axis, slab), some in alike.items():
        places = np.sort(np.concatenate(some))
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            yield slab.along(axis, int(run[0]), int(run[-1]) + 1)
