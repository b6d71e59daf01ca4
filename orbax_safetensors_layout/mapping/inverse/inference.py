"""The shapes of a checkpoint's tensors, inferred from the leaves that are saved by `Expr.infer`.

Leaves may give only a lower bound of an extent; `InferredTensor.join` joins all of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import MappingError

LIKE = "save through mapping.like(path), with a checkpoint that has the names and shapes"
"""The remedy where leaves do not determine the shapes; for hints."""


class Extent(NamedTuple):
    """An extent, or if it is not exact a lower bound of one."""

    n: int
    exact: bool = True

    def __str__(self) -> str:
        return str(self.n) if self.exact else f"{self.n} or more"

    def join(self, other: Extent) -> Extent | None:
        """Return the extent that fits both; None if they contradict each other."""
        most, least = (self, other) if self.exact else (other, self)
        if not most.exact:
            return max(self, other)
        return most if most.n == least.n or (most.n > least.n and not least.exact) else None


def product(extents: Iterable[Extent]) -> Extent:
    """Return the extent of axes that are merged."""
    extents = list(extents)
    return Extent(math.prod(e.n for e in extents), all(e.exact for e in extents))


def quotient(extent: Extent, known: Extent) -> Extent | None:
    """Return the extent of an axis that makes `extent` together with `known`, if there is one."""
    if extent.exact and known.exact:
        whole, rest = divmod(extent.n, known.n) if known.n else (0, extent.n)
        return None if rest else Extent(whole)
    if known.exact and known.n:
        return Extent(-(-extent.n // known.n), False)
    return Extent(1, False)


class InferredTensor(NamedTuple):
    """A tensor as far as leaves give it; its dtype is that of the first leaf with its elements."""

    shape: tuple[Extent, ...]
    dtype: np.dtype[Any]
    leaf: str

    def join(self, name: str, shape: tuple[Extent, ...]) -> InferredTensor:
        """Return it with the shape that another leaf makes it, which must not contradict."""
        joined = [a.join(b) for a, b in zip(self.shape, shape, strict=False)]
        if len(self.shape) != len(shape) or None in joined:
            raise MappingError(
                f"it makes {name!r} of shape [{', '.join(map(str, shape))}], but leaf"
                f" {self.leaf!r} makes it [{', '.join(map(str, self.shape))}]"
            )
        return self._replace(shape=tuple(e for e in joined if e is not None))
