"""Infers the shapes of a checkpoint's tensors from the leaves that are saved.

`Expr.infer` walks an expression from a leaf's shape, whose extents are known, down to its tensors,
whose extents may be known only as a lower bound; `Inference` joins the results of all leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import MappingError

from ..shapes import TensorSpec

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


@dataclasses.dataclass(slots=True)
class Inference:
    """The shapes inferred so far.

    Attributes:
        leaf: The current leaf.
        dtype: Its dtype. A tensor takes that of the first leaf that has elements of it.
    """

    leaf: str = ""
    dtype: np.dtype[Any] = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    _tensors: dict[str, tuple[tuple[Extent, ...], np.dtype[Any], str]] = dataclasses.field(
        default_factory=dict
    )

    def record(self, name: str, shape: tuple[Extent, ...]) -> None:
        """Join the current leaf's shape of a tensor with those of other leaves.

        Raises:
            MappingError: They contradict each other.
        """
        before = self._tensors.get(name)
        if before is None:
            self._tensors[name] = (shape, self.dtype, self.leaf)
            return
        known, dtype, leaf = before
        joined = [a.join(b) for a, b in zip(known, shape, strict=False)]
        if len(known) != len(shape) or None in joined:
            raise MappingError(
                f"it makes {name!r} of shape [{', '.join(map(str, shape))}], but leaf {leaf!r}"
                f" makes it [{', '.join(map(str, known))}]"
            )
        self._tensors[name] = (tuple(e for e in joined if e is not None), dtype, leaf)

    def specs(self) -> dict[str, TensorSpec]:
        """Return the tensors, as small as they can be."""
        return {
            name: TensorSpec(tuple(extent.n for extent in shape), dtype)
            for name, (shape, dtype, _) in self._tensors.items()
        }
