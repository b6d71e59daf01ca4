"""Affine views: index `i` of an array is element `offset + sum(i * stride)` of a sequence."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from .box import Box


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the element strides of a C-contiguous array.

    Example:
        >>> row_major_strides((2, 3, 4))
        (12, 4, 1)
    """
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
        """Return the view of one region.

        Example:
            >>> AffineView.row_major((4, 6)).restrict(Box((1, 2), (3, 4)))
            AffineView(offset=8, shape=(2, 2), strides=(6, 1))
        """
        shift = sum(map(operator.mul, box.start, self.strides))
        return AffineView(self.offset + shift, box.shape, self.strides)

    @property
    def bounds(self) -> tuple[int, int]:
        """First element and one past the last, of a view that is not empty.

        Example:
            >>> AffineView(5, (2, 6), (8, -1)).bounds
            (0, 14)
        """
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low = sum(r for r in reach if r < 0)
        return self.offset + low, self.offset + sum(reach) - low + 1
