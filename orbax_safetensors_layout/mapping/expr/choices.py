"""Expressions that depend on which tensors a checkpoint has: for weights that may be tied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Decoded, reshaped
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
        problem = CopyProblem(f"{self.other!r} is not a copy of {self.first!r}", self.hint)
        if (first.shape, first.dtype) != (other.shape, other.dtype):
            raise problem.error(given(first), given(other))
        return compared(first, [(reshaped(other, (*other.shape, 1)), problem)])


class CopyProblem(NamedTuple):
    """The error where something is not the copy that it must be."""

    text: str
    hint: str

    def error(self, expected: str, found: str, tensor: str | None = None) -> MappingError:
        return MappingError(
            self.text, tensor=tensor, expected=expected, found=found, hint=self.hint
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """A `Decoder` that returns the first of its inputs if all others have the same bits.

    Each of the others has a last axis more, of copies of the first.
    """

    free: int
    counts: tuple[int, ...]  # of copies in each of the others
    problems: tuple[CopyProblem, ...]  # of each of the others

    by_rows = True

    def widen(self, box: Box) -> Box:
        return box

    def needs(self, box: Box) -> tuple[Box, ...]:
        several = (Box((*box.start, 0), (*box.stop, count)) for count in self.counts)
        return (box, *several)

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        first, *others = map(_bits, inputs)
        for other, count, problem in zip(others, self.counts, self.problems, strict=True):
            step = max(1, _CHUNK_BYTES // (count * first.strides[0]))
            copies = other.reshape(len(first), count, first.shape[1])
            for start in range(0, len(first), step):
                chunk = slice(start, start + step)
                if (copies[chunk] != first[chunk, None]).any():
                    raise problem.error("the same bits", f"others within {box}")
        return inputs[0]


def _bits(values: np.ndarray) -> np.ndarray:
    """Return the bits of each value, as integers in a row."""
    unit = min(values.itemsize, 8)
    row = values.itemsize // unit
    return np.ascontiguousarray(values).reshape(-1).view(f"u{unit}").reshape(-1, row)


def compared(first: BoundExpr, copies: Sequence[tuple[BoundExpr, CopyProblem]]) -> BoundExpr:
    """Return an expression that is refused where others, along a last axis, have other bits."""
    operands, problems = zip(*copies, strict=True)
    counts = tuple(operand.shape[-1] for operand in operands)
    decoder = Compared(len(first.shape), counts, problems)
    return Decoded(first.shape, first.dtype, (first, *operands), decoder)


def check_left_out(leaf: str, bound: BoundExpr) -> None:
    """Refuses to leave out a leaf whose load compares tensors."""
    for node in bound.nodes():
        if isinstance(node, Decoded) and isinstance(node.decoder, Compared):
            problem = node.decoder.problems[0]
            raise MappingError(
                f"leaf {leaf!r} is left out, but its load has to show whether {problem.text}",
                expected="an abstract leaf",
                found="...",
                hint=f"Ask for the leaf. {problem.hint}",
            )


def _has_all(specs: TensorSpecs, expr: Expr, captures: Captures) -> bool:
    return all(any(specs.tree.match(substitute(p, captures))) for p in expr.patterns())
