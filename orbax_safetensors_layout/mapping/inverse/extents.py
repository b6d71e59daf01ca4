"""Extents known only in part: what the shape of a leaf tells of the tensors it is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Extent(NamedTuple):
    """An extent, or the least that it can be.

    Attributes:
        n: The number of indices.
        exact: Whether there are no more.
    """

    n: int
    exact: bool = True

    def __str__(self) -> str:
        return str(self.n) if self.exact else f"{self.n} or more"

    def join(self, other: Extent) -> Extent | None:
        """What both say of one extent; None if they contradict each other.

        >>> Extent(4).join(Extent(3, exact=False))
        Extent(n=4, exact=True)
        """
        for one, two in ((self, other), (other, self)):
            if one.exact:
                agrees = one.n == two.n if two.exact else one.n >= two.n
                return one if agrees else None
        return max(self, other)


def product(extents: Iterable[Extent]) -> Extent:
    """The extent of axes that are merged."""
    extents = list(extents)
    return Extent(math.prod(e.n for e in extents), all(e.exact for e in extents))


def quotient(extent: Extent, known: Extent) -> Extent | None:
    """The extent of an axis that makes `extent` together with `known`; None if there is none."""
    if extent.exact and known.exact:
        whole, rest = divmod(extent.n, known.n) if known.n else (0, extent.n)
        return None if rest else Extent(whole)
    if known.exact and known.n:
        return Extent(-(-extent.n // known.n), False)
    return Extent(1, False)


def known(shape: Iterable[int]) -> tuple[Extent, ...]:
    """A shape that is known."""
    return tuple(Extent(n) for n in shape)
