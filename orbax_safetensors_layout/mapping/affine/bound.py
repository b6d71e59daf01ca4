"""Bound expressions: every name, shape and dtype is known, so that regions can be pulled back.

Here are the ends of the tree and operations on values; what shapes an array is in `index_nodes.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import MAX_RANK, AffineView, Box, row_major_strides

from ..expr.values import Cast, ValueOp, apply_ops
from .leaf_pieces import AffinePiece, FillPiece, Piece, merged, shared
from .window import Window

_MOST_BYTES = 1 << 44  # several times all weights of the largest published models

_strides = functools.lru_cache(4096)(row_major_strides)


class Sink(NamedTuple):
    """Collects the pieces of a walk down an expression; flags as of `BoundExpr.pull_back`."""

    pieces: list[Piece]
    factored: bool
    gathers: bool


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class BoundExpr(abc.ABC):
    """An expression with known shape and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        """Refuses what no array can have; a size as numpy does, zeros of the shape left out."""
        if len(self.shape) > MAX_RANK:
            what = f"{len(self.shape)} dimensions are more than {MAX_RANK}, numpy's most"
            raise MappingError(what)
        if math.prod(n or 1 for n in self.shape) * self.dtype.itemsize > _MOST_BYTES:
            raise MappingError(
                f"shape {[*self.shape]} of {self.dtype.name} is more than {_MOST_BYTES >> 40} TiB,"
                " the most that an array may have"
            )

    def pull_back(
        self, box: Box, *, factored: bool = False, gathers: bool = False
    ) -> tuple[Piece, ...]:
        """Return disjoint pieces that cover a region; only operands that overlap it are visited.

        `factored` lets views take axes of the region apart: `piece.view.shape` has the factors of
        `piece.box.shape`. Merged axes whose strides do not nest, repeats, and interleaved rows are
        then one piece instead of one for each index of their outer axis. `gathers` lets many
        indices in no regular order, or some that come again, be one piece with a `gather`.
        """
        if len(box.start) != len(self.shape) or not Box.whole(self.shape).contains(box):
            raise ValueError(f"{box} is not a region of an expression of shape {self.shape}.")
        if 0 in box.shape:
            return ()
        sink = Sink([], factored, gathers)
        self.pull(Window.of(box), (), sink)
        pieces = merged(sink.pieces)
        return shared(pieces) if gathers else pieces

    @abc.abstractmethod
    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        """Adds the pieces of a window, on whose values `ops` are still to be done."""

    def children(self) -> Sequence[BoundExpr]:
        return ()

    def nodes(self) -> Iterator[BoundExpr]:
        yield self
        for operand in self.children():
            yield from operand.nodes()

    def renamed(self, names: Mapping[str, str]) -> BoundExpr:
        """Return the same of other tensors, of the same shapes and dtypes: each by its name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for key, value in values.items():
            if isinstance(value, BoundExpr):
                values[key] = value.renamed(names)
            elif isinstance(value, tuple) and value and isinstance(value[0], BoundExpr):
                values[key] = tuple(operand.renamed(names) for operand in value)
        return type(self)(**values)

    def sources(self) -> tuple[str, ...]:
        """Return the names of all tensors it takes, each once, in the order of their use."""
        return tuple(dict.fromkeys(n.name for n in self.nodes() if isinstance(n, WholeTensor)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {list(self.shape)} {self.dtype.name}>"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Unary(BoundExpr):
    """An expression made of one."""

    operand: BoundExpr

    def children(self) -> Sequence[BoundExpr]:
        return (self.operand,)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class WholeTensor(BoundExpr):
    """All of one tensor; `stored` is an expression of the pieces that it is stored in, if any."""

    name: str
    stored: BoundExpr | None = None

    def renamed(self, names: Mapping[str, str]) -> BoundExpr:
        return WholeTensor(self.shape, self.dtype, names[self.name])

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        if self.stored is not None:
            self.stored.pull(window, ops, sink)
            return
        box = window.box
        view, ranks = factored_view(window, _strides(self.shape))
        if sink.factored or len(view.shape) == len(ranks):
            sink.pieces.append(AffinePiece(box, self.name, view, ops))
        else:
            for part, plain in _plain_views(box, view, ranks):
                sink.pieces.append(AffinePiece(part, self.name, plain, ops))


@dataclasses.dataclass(frozen=True, slots=True, repr=False, eq=False)
class Constant(BoundExpr):
    """One value everywhere, of `dtype`; equal to those of the same bits."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.shape, self.dtype, np.asarray(self.value).tobytes()

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        value = apply_ops(np.asarray(self.value), ops)
        sink.pieces.append(FillPiece(window.box, np.asarray(value)))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Valued(Unary):
    """An operation on the values of an expression."""

    op: ValueOp

    @classmethod
    def of(cls, operand: BoundExpr, op: ValueOp) -> BoundExpr:
        """Return the operation on an expression; a cast to its own dtype is left out."""
        dtype = op.result(operand.dtype)
        if isinstance(op, Cast) and dtype == operand.dtype:
            return operand
        return cls(operand.shape, dtype, operand, op)

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        self.operand.pull(window, (self.op, *ops), sink)


def factored_view(window: Window, strides: Sequence[int]) -> tuple[AffineView, tuple[int, ...]]:
    """Return a window's view of a row-major array, and the number of factors of each axis."""
    offset = sum(map(operator.mul, window.start, strides))
    factors: list[list[tuple[int, int]]] = [[] for _ in window.origin]
    for axis, extent, steps in window.dims:
        stride = sum(map(operator.mul, steps, strides))
        along = factors[axis]
        if along and along[-1][1] == extent * stride:
            along[-1] = (along[-1][0] * extent, stride)
        else:
            along.append((extent, stride))
    flat = [pair for along in factors for pair in along or ((1, 0),)]
    view = AffineView(offset, tuple([n for n, _ in flat]), tuple([s for _, s in flat]))
    return view, tuple([len(along) or 1 for along in factors])


def _plain_views(
    box: Box, view: AffineView, ranks: Sequence[int]
) -> Iterator[tuple[Box, AffineView]]:
    """Yields a factored view as views whose shape is their region's."""
    last = [stop - 1 for stop in itertools.accumulate(ranks)]  # the innermost factor of each axis
    outer = [i for i in range(len(view.shape)) if i not in last]
    axes = [axis for axis, rank in enumerate(ranks) for _ in range(rank)]
    weights = [math.prod(view.shape[i + 1 : last[axes[i]] + 1]) for i in outer]
    shape = tuple(view.shape[i] for i in last)
    strides = tuple(view.strides[i] for i in last)
    for index in itertools.product(*(range(view.shape[i]) for i in outer)):
        start, offset = list(box.start), view.offset
        for j, i, weight in zip(index, outer, weights, strict=True):
            start[axes[i]] += j * weight
            offset += j * view.strides[i]
        stop = tuple(map(operator.add, start, shape))
        yield Box(tuple(start), stop), AffineView(offset, shape, strides)
