"""Expressions that depend on which tensors a checkpoint has: for weights that may be tied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Decoded
from ..names import Captures, TensorSpecs, substitute
from ..problems import gather
from . import ops
from .expression import Expr, given

_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class _Choice(Expr):
    first: Expr
    other: Expr

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()}({self.first!r}, {self.other!r})"

    def children(self) -> Sequence[Expr]:
        return (self.first, self.other)

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        return self.first.infer(captures, shape)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Either(_Choice):
    """An expression where the checkpoint has its tensors, else another; without one, the first."""

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        chosen = self.first if _has_all(specs, self.first, captures) else self.other
        return chosen.bind_to(captures, specs)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Beside(_Choice):
    """An expression, and another that the checkpoint must have, too; it is not read."""

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        return gather(lambda expr: expr.bind_to(captures, specs), self.children())[0]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Same(_Choice):
    """An expression, and another that must have the same bits where the checkpoint has it.

    A process compares only the regions that it loads. Saving writes both, or the first where the
    names of the saved tensors are unknown.
    """

    hint: str  # the remedy where they differ

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        first = self.first.bind_to(captures, specs)
        if not _has_all(specs, self.other, captures):
            return first
        other = self.other.bind_to(captures, specs)
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise copies_differ(self, expected=given(first), found=given(other))
        return Decoded(first.shape, first.dtype, (first, other), Compared(len(first.shape), self))


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A `Decoder` that returns the first of its inputs if the second has the same bits."""

    free: int
    rule: Same

    def widen(self, box: Box) -> Box:
        return box

    def needs(self, box: Box) -> tuple[Box, ...]:
        return (box, box)

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        first, other = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in inputs)
        for start in range(0, first.size, _CHUNK_BYTES):
            chunk = slice(start, start + _CHUNK_BYTES)
            if not np.array_equal(first[chunk], other[chunk]):
                raise copies_differ(
                    self.rule, expected="the same bits", found=f"others within {box}"
                )
        return inputs[0]


def check_left_out(leaf: str, bound: BoundExpr) -> None:
    """Refuses to leave out a leaf whose load compares tensors."""
    for node in bound.nodes():
        if isinstance(node, Decoded) and isinstance(node.decoder, Compared):
            same = node.decoder.rule
            raise MappingError(
                f"leaf {leaf!r} is left out, but its load has to show whether {same.other!r} is a"
                f" copy of {same.first!r}",
                expected="an abstract leaf",
                found="...",
                hint=f"Ask for the leaf. {same.hint}",
            )


def copies_differ(
    same: Same, *, expected: str, found: str, tensor: str | None = None
) -> MappingError:
    """Return the error for tensors that must be copies and are not."""
    return MappingError(
        f"{same.other!r} is not a copy of {same.first!r}",
        tensor=tensor,
        expected=expected,
        found=found,
        hint=same.hint,
    )


def _has_all(specs: TensorSpecs, expr: Expr, captures: Captures) -> bool:
    return all(any(specs.tree.match(substitute(p, captures))) for p in expr.patterns())
