"""Stacks over a wildcard, and concatenations."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from orbax_safetensors_layout.errors import MappingError, listed

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Stacked, concatenated
from ..affine.window import put
from ..argument_checks import integer, integers, several, text
from ..inverse.inference import LIKE, Extent
from ..names import Captures, TensorSpecs, substitute
from ..problems import Problem, Problems, gather
from . import ops
from .expression import Expr, as_expr, given

Indices = tuple[int, ...] | slice | None
_MOST_GAPS = 100
_OF_DTYPES = (
    "To stack tensors of several dtypes, cast them: osl.tensor(...).cast('float32'), or say"
    " dtype='float32' to a ready mapping."
)
_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")  # a number as a name has it, that numpy can index with


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Stack(Expr):
    """One expression for each index of a wildcard; see `stack`."""

    operand: Expr
    over: str
    axis: int
    indices: Indices

    def __repr__(self) -> str:
        axis = f", axis={self.axis}" if self.axis else ""
        indices = self.indices
        shown = f"[{listed(indices, 8)}]" if isinstance(indices, tuple) else indices
        argument = "" if indices is None else f", indices={shown}"
        return f"stack({self.operand!r}, over={self.over!r}{axis}{argument})"

    def children(self) -> Sequence[Expr]:
        return (self.operand,)

    def stacked_over(self) -> frozenset[str]:
        return self.operand.stacked_over() | {self.over}

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        indices = self._resolve(captures, specs)
        parts = gather(
            lambda i: self.operand.bind_to({**captures, self.over: str(i)}, specs), indices
        )
        for index, part in zip(indices, parts, strict=True):
            if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
                raise MappingError(
                    f"{self!r}: index {indices[0]} gives {given(parts[0])}, but index {index} gives"
                    f" {given(part)}",
                    hint=_OF_DTYPES if part.shape == parts[0].shape else None,
                )
        inner, dtype = parts[0].shape, parts[0].dtype
        axis = ops.axis_of("stack", self.axis, len(inner) + 1)
        return Stacked((*inner[:axis], len(parts), *inner[axis:]), dtype, tuple(parts), axis)

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        axis = ops.axis_of("stack", self.axis, len(shape))
        n = shape[axis].n
        indices = self.indices
        if indices is None or isinstance(indices, slice):
            start, step = (indices.start or 0, indices.step or 1) if indices else (0, 1)
            indices = tuple(range(start, start + n * step, step))
        if shape[axis].join(Extent(len(indices))) is None:
            raise MappingError(f"{self!r}: it has {len(indices)} indices, the leaf {shape[axis]}")
        inner = put(shape, axis)
        for i in indices:
            yield from self.operand.infer({**captures, self.over: str(i)}, inner)

    def extent(self, axis: int, rank: int) -> int | None:
        own = ops.axis_of("stack", self.axis, rank)
        if axis != own:
            return self.operand.extent(axis - (axis > own), rank - 1)
        return len(self.indices) if isinstance(self.indices, tuple) else None

    def _resolve(self, captures: Captures, specs: TensorSpecs) -> Sequence[int]:
        """Return the indices: those given, or those that the checkpoint has."""
        if isinstance(self.indices, tuple):
            return self.indices
        stored: set[int] = set()
        patterns = [substitute(pattern, captures) for pattern in self.operand.patterns()]
        patterns = [pattern for pattern in patterns if f"{{{self.over}}}" in pattern]
        for pattern in patterns:
            values = (match[self.over] for _, match in specs.tree.match(pattern))
            stored.update(int(value) for value in values if _INDEX.fullmatch(value))
        indices = range(max(stored, default=-1) + 1)[self.indices or slice(None)]
        if not patterns or not indices:
            seek = patterns[0].replace(f"{{{self.over}}}", "0") if patterns else None
            sought = " or ".join(map(repr, patterns)) or f"with {{{self.over}}} in its name"
            raise Problems([Problem(f"{self!r}: there is no tensor {sought}", seek=seek)])
        # No more than are listed: a name may hold any number.
        gaps = [*itertools.islice((i for i in indices if i not in stored), _MOST_GAPS + 1)]
        if gaps:
            more = " and more" if len(gaps) > _MOST_GAPS else ""
            raise MappingError(
                f"{self!r}: there are tensors {patterns[0]!r} for {self.over} = {_spans(stored)},"
                f" but none for {_spans(gaps[:_MOST_GAPS])}{more}",
                hint=f"Complete the checkpoint, or say which to stack: stack(..., over="
                f"{self.over!r}, indices=[...]).",
            )
        return indices


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Concat(Expr):
    """A concatenation; see `concat`."""

    operands: tuple[Expr, ...]
    axis: int
    sizes: tuple[int | None, ...] | None

    def __repr__(self) -> str:
        sizes = f", sizes={list(self.sizes)}" if self.sizes else ""
        return f"concat({list(self.operands)!r}, {self.axis}{sizes})"

    def children(self) -> Sequence[Expr]:
        return self.operands

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        parts = gather(lambda expr: expr.bind_to(captures, specs), self.operands)
        axis = ops.axis_of("concat", self.axis, len(parts[0].shape))
        first, *others = [(put(p.shape, axis), p.dtype) for p in parts]
        for number, other in enumerate(others, 1):
            if other != first:
                raise MappingError(
                    f"{self!r}: part 0 is {given(parts[0])}, but part {number} is"
                    f" {given(parts[number])}"
                )
        for number, (part, size) in enumerate(zip(parts, self.sizes or (), strict=False)):
            if size is not None and part.shape[axis] != size:
                raise MappingError(f"{self!r}: part {number} is {given(part)}, but of size {size}")
        return concatenated(parts, axis)

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        axis = ops.axis_of("concat", self.axis, len(shape))
        extent, sizes = shape[axis], self._sizes(axis, len(shape))
        if None not in sizes:
            extent = extent.join(Extent(sum(size or 0 for size in sizes))) or extent
        if sizes.count(None) > 1 or not extent.exact:
            raise MappingError(
                f"{self!r} does not determine how long its parts are along axis {axis}",
                hint=f"Give concat(..., sizes=[...]), or {LIKE}.",
            )
        rest = extent.n - sum(size or 0 for size in sizes)
        if rest < 0 or (rest and None not in sizes):
            raise MappingError(f"{self!r}: its sizes do not add up to {extent}")
        for operand, size in zip(self.operands, sizes, strict=True):
            part = Extent(rest if size is None else size)
            yield from operand.infer(captures, put(shape, axis, part))

    def extent(self, axis: int, rank: int) -> int | None:
        if axis == ops.axis_of("concat", self.axis, rank):
            sizes = self._sizes(axis, rank)
            return None if None in sizes else sum(size or 0 for size in sizes)
        known = (operand.extent(axis, rank) for operand in self.operands)
        return next((extent for extent in known if extent is not None), None)

    def _sizes(self, axis: int, rank: int) -> list[int | None]:
        """Return the extents of the parts, where they are given or the parts say them."""
        given = self.sizes or [None] * len(self.operands)
        pairs = zip(self.operands, given, strict=True)
        return [part.extent(axis, rank) if size is None else size for part, size in pairs]


def stack(
    expr: Expr, over: str, axis: int = 0, indices: Iterable[int] | slice | None = None
) -> Expr:
    """Stack an expression over the indices of a wildcard, along a new axis, as `numpy.stack`.

    Args:
        expr: The expression; its names have the wildcard `over`.
        over: The wildcard.
        axis: The new axis.
        indices: Those to stack, in this order; a slice chooses among those that the checkpoint
            has. None takes all that it has. They must have no gaps.

    Examples:
        >>> from orbax_safetensors_layout.mapping import tensor
        >>> stack(tensor("model.layers.{i}.norm.weight"), over="i")
        stack(tensor('model.layers.{i}.norm.weight'), over='i')
    """
    if isinstance(indices, slice):
        for bound in (indices.start, indices.stop, indices.step):
            integer(0 if bound is None else bound, "a slice of stack(indices=...)")
        if (indices.step or 1) < 1 or (indices.start or 0) < 0:
            raise MappingError(f"stack over {over!r}: {indices} must go up, from 0 or more")
    elif indices is not None:
        indices = integers(indices, "stack(indices=...)")
        if not indices:
            raise MappingError(f"stack over {over!r}: there are no indices")
    return Stack(
        as_expr(expr, "stack"), text(over, "stack(over=...)"), integer(axis, "stack"), indices
    )


def concat(exprs: Iterable[Expr], axis: int, sizes: Iterable[int | None] | None = None) -> Expr:
    """Concatenate expressions along an axis, as `numpy.concatenate`.

    Saving without the shapes of the files needs `sizes`, the extent of each along the axis: None
    where the expression says it (`.rearrange("e -> 1 e")`), and for one more.
    """
    operands = tuple(as_expr(expr, "concat") for expr in several(exprs, "concat"))
    if not operands:
        raise MappingError("concat: there is nothing to concatenate")
    known = None if sizes is None else several(sizes, "concat(sizes=...)")
    integers([size for size in known or () if size is not None], "concat(sizes=...)")
    if known is not None and len(known) != len(operands):
        raise MappingError(f"concat: there are {len(operands)} parts and {len(known)} sizes")
    return Concat(operands, integer(axis, "concat"), known)


def _spans(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `0..3, 5`."""
    spans: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if spans and spans[-1][1] == n - 1:
            spans[-1] = (spans[-1][0], n)
        else:
            spans.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in spans)
