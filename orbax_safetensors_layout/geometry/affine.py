"""Where each element of an array is in a flat sequence of elements.

Index `i` of an affine view is element `offset + sum(i * stride)`; a gather has an offset for each
index of an axis, in no regular order.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .box import Box


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the element strides of a C-contiguous array."""
    return tuple(itertools.accumulate(reversed((*shape[1:], 1)), operator.mul))[::-1][: len(shape)]


class AffineView(NamedTuple):
    """The place of each element of an array in a flat sequence of elements.

    Attributes:
        offset: Element offset of index 0.
        shape: Extents.
        strides: Elements between neighbours along each dimension.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def row_major(cls, shape: Sequence[int]) -> AffineView:
        """Return the view of a whole tensor as safetensors stores it."""
        return cls(0, tuple(shape), row_major_strides(shape))

    def restrict(self, box: Box) -> AffineView:
        """Return the view of one region."""
        shift = sum(map(operator.mul, box.start, self.strides))
        return AffineView(self.offset + shift, box.shape, self.strides)

    @property
    def bounds(self) -> tuple[int, int]:
        """First element and one past the last, of a view that is not empty."""
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(r for r in reach if r < 0)
        return self.offset + low, self.offset + sum(reach) - low + 1


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
        """Return the slabs at indices `start` to `stop`, counted from `start`."""
        chosen = (self.places >= start) & (self.places < stop)
        return Gather(self.axis, self.places[chosen] - start, self.offsets[chosen])


def filled_boxes(gathers: Iterable[tuple[Box, Gather]]) -> Iterator[Box]:
    """Yields the boxes that gathers fill, each given with a box that holds all of its slabs."""
    by_slab: dict[tuple[int, Box], list[npt.NDArray[np.int64]]] = {}
    for box, gather in gathers:
        by_slab.setdefault((gather.axis, box.along(gather.axis, 0, 1)), []).append(gather.places)
    for (axis, slab), parts in by_slab.items():
        places = np.sort(np.concatenate(parts))
        for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
            yield slab.along(axis, int(run[0]), int(run[-1]) + 1)
