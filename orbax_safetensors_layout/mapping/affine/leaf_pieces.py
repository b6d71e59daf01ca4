"""Pieces: what a region of a leaf is made of, and the region assembled from what was read."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import AffineView, Box, Gather, copy_elements

from ..expr.values import ValueOp, apply_ops
from .window import put

_MANY_PIECES = 16
_LEAST_SLAB = 64  # elements; where each takes several vectors of its own, they are more than it is


class AffinePiece(NamedTuple):
    """A region of a leaf whose elements lie in one tensor.

    `view` maps an index within `box` to an element of the row-major tensor. Strides may be
    permuted, have gaps, be negative or, for repeated elements, 0. `view.shape` is `box.shape`;
    where factored pieces were asked for, some axes are taken apart.

    `gather`, if gathers were asked for, is where each index of one axis is. `view` is then one
    such slab, to whose offset that of each is added; other pieces may fill gaps of `box`.
    """

    box: Box  # in the leaf
    source: str  # the tensor's name
    view: AffineView
    ops: tuple[ValueOp, ...]  # on the values, in order
    gather: Gather | None = None


class FillPiece(NamedTuple):
    """A region of a leaf that holds one value, a 0-d array; nothing is read for it."""

    box: Box
    value: np.ndarray

    def put(self, box: Box, values: np.ndarray, value: object) -> None:
        """Put a value into the part of a box's `values` that lies in the region."""
        common = self.box.intersect(box)
        if common is not None:
            values[common.within(box).slices] = value


class Decoder(Protocol):
    """Computes boxes of an array from boxes of others."""

    @property
    def free(self) -> int:
        """Number of leading axes along which each index is computed from that of all inputs."""

    def widen(self, box: Box) -> Box:
        """Return the box to compute in order to have `box`."""

    def needs(self, box: Box) -> tuple[Box, ...]:
        """Return the box of each input that a widened box is computed from."""

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values of a widened box from those of what it needs."""


class _Input(Protocol):
    """A `BoundExpr`, as far as pieces need it."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def pull_back(self, box: Box, *, factored: bool = False) -> tuple[Piece, ...]: ...


class DecodedPiece(NamedTuple):
    """A region of a leaf that is computed from regions of expressions."""

    box: Box  # in the leaf
    inputs: tuple[tuple[_Input, Box], ...]  # what has to be read, and the box of each
    decoder: Decoder
    decoded: Box  # of its result
    view: AffineView  # of the row-major result, with axes of `box` taken apart
    ops: tuple[ValueOp, ...]  # on the values, in order

    def fn(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        result = self.decoder.decode(self.decoded, inputs)
        selected = apply_view(np.ascontiguousarray(result).reshape(-1), self.view)
        return apply_ops(selected.reshape(self.box.shape), self.ops)


Piece = AffinePiece | FillPiece | DecodedPiece


def affine_pieces(pieces: Iterable[Piece]) -> Iterator[AffinePiece]:
    """Yields all that has to be read: affine pieces, and those that computed ones are made of."""
    for piece in pieces:
        if isinstance(piece, AffinePiece):
            yield piece
        elif isinstance(piece, DecodedPiece):
            for expression, box in piece.inputs:
                yield from affine_pieces(expression.pull_back(box, factored=True))


def assemble_box(
    pieces: Iterable[Piece],
    box: Box,
    dtype: np.dtype[Any],
    read: Callable[[AffinePiece], np.ndarray],
    *,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Return the values of a region of a leaf, from parts of tensors that were read.

    `read` returns the values of an affine piece, `piece.view` of its tensor, before its operations;
    it is called for each of `affine_pieces(pieces)`, in their order. `out` has the region's shape.
    """
    if out is None:
        out = np.empty(box.shape, dtype)
    for piece in pieces:
        corner = map(operator.sub, piece.box.start, box.start)
        place = [slice(a, a + n) for a, n in zip(corner, piece.box.shape, strict=True)]
        target = out[tuple(place)] if place else out
        if isinstance(piece, FillPiece):
            target[...] = piece.value
        elif isinstance(piece, AffinePiece):
            target = target.reshape(piece.view.shape)  # takes axes apart: a view, never a copy
            values = read(piece).reshape(piece.view.shape)
            if piece.ops and values.flags.c_contiguous:
                apply_ops(values, piece.ops, target)
            else:  # transposed values are computed in their own order, and then moved
                copy_elements(target, apply_ops(values, piece.ops))
        else:
            inputs = [
                assemble_box(expr.pull_back(part, factored=True), part, expr.dtype, read)
                for expr, part in piece.inputs
            ]
            copy_elements(target, piece.fn(inputs))
    return out


def apply_view(elements: np.ndarray, view: AffineView) -> np.ndarray:
    """Return the elements of a view within a flat, contiguous array: read-only, without a copy."""
    if 0 in view.shape:
        return np.empty(view.shape, elements.dtype)
    low, high = view.bounds
    if low < 0 or high > elements.size:
        raise MappingError(
            "a view reaches beyond its tensor",
            expected=f"elements 0 to {elements.size}",
            found=f"elements {low} to {high}",
        )
    # Not `as_strided`: the type string of float8_e5m2 is none that numpy knows.
    size = elements.itemsize
    strides = tuple(stride * size for stride in view.strides)
    memory = elements.view(np.uint8).data
    values = np.ndarray(view.shape, elements.dtype, memory, view.offset * size, strides)
    values.flags.writeable = False
    return values


def merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Join pieces that follow one another in their leaf and in their tensor."""
    joined: list[tuple[Piece, list[Piece]]] = []  # each with what it is joined of
    for piece in pieces:
        parts = [piece]
        while joined and (both := _join(joined[-1][0], piece)) is not None:
            piece, parts = both, joined.pop()[1] + parts
        joined.append((piece, parts))
    # Among many, two with a gap between them stay alone, since any two are equally spaced: each is
    # read with its own neighbours in the file.
    many = len(pieces) >= _MANY_PIECES
    chosen = (parts if many and _is_chance(parts) else [piece] for piece, parts in joined)
    return tuple(itertools.chain.from_iterable(chosen))


def _is_chance(parts: Sequence[Piece]) -> bool:
    """Whether parts are two equal ones that do not touch in the tensor, as rows or columns."""
    if len(parts) != 2:
        return False
    a, b = parts
    if not (isinstance(a, AffinePiece) and isinstance(b, AffinePiece)):
        return False
    low, high = a.view.bounds
    apart = abs(b.view.offset - a.view.offset)
    return a.view.shape == b.view.shape and apart not in (1, high - low)


def gathered(
    piece: AffinePiece, axis: int, places: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
) -> AffinePiece:
    """Return slabs of a piece, at `places` of an axis of the leaf and `offsets` in the tensor."""
    _, source, view, ops, _ = piece
    first = int(offsets.min())
    slab = AffineView(first, put(view.shape, axis, 1), view.strides)
    box = piece.box.along(axis, int(places.min()), int(places.max()) + 1)
    return AffinePiece(box, source, slab, ops, Gather(axis, places, offsets - first))


def shared(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Make gathers of pieces of one tensor that have indices of an axis in common."""
    sources = [piece.source for piece in pieces if isinstance(piece, AffinePiece)]
    if len(set(sources)) == len(sources):
        return tuple(pieces)
    for axis in range(len(pieces[0].box.start)):
        by_slab: dict[object, list[Piece]] = {}
        for number, piece in enumerate(pieces):
            by_slab.setdefault(_slab_key(piece, axis, number), []).append(piece)
        pieces = [piece for group in by_slab.values() for piece in _shared_along(group, axis)]
    return tuple(pieces)


def _slab_key(piece: Piece, axis: int, number: int) -> object:
    """Return a key that is equal for pieces whose indices of an axis are slabs of one tensor."""
    if not isinstance(piece, AffinePiece) or len(piece.view.shape) != len(piece.box.start):
        return number
    _, source, (offset, shape, strides), ops, gather = piece
    is_other = gather is not None and gather.axis != axis
    if is_other or not strides[axis] or math.prod(put(shape, axis)) < _LEAST_SLAB:
        return number
    if not _has_slabs(piece.view, axis):  # others are read run by run
        return number
    return source, ops, strides, offset % abs(strides[axis]), piece.box.along(axis, 0, 1)


def _has_slabs(view: AffineView, axis: int) -> bool:
    """Return whether slabs along an axis are runs, and a step of it leads past the finer ones."""
    _, shape, strides = view
    step = abs(strides[axis])
    axes = zip(shape, strides, strict=True)
    finer = tuple(n if abs(stride) <= step else 1 for n, stride in axes)
    shapes = put(shape, axis, 1), put(finer, axis, 2)
    return all(AffineView(0, shape, strides).is_nested for shape in shapes)


def _shared_along(pieces: Sequence[Piece], axis: int) -> Sequence[Piece]:
    if len(pieces) == 1:
        return pieces
    places, offsets = [], []
    for piece in pieces:
        assert isinstance(piece, AffinePiece)
        if piece.gather is not None:
            places.append(piece.gather.places)
            offsets.append(piece.view.offset + piece.gather.offsets)
        else:
            number = np.arange(piece.view.shape[axis])
            places.append(piece.box.start[axis] + number)
            offsets.append(piece.view.offset + number * piece.view.strides[axis])
    if len(np.unique(np.concatenate(offsets))) == sum(len(np.unique(part)) for part in offsets):
        return pieces
    first = pieces[0]
    assert isinstance(first, AffinePiece)
    return [gathered(first, axis, np.concatenate(places), np.concatenate(offsets))]


def _join(a: Piece, b: Piece) -> Piece | None:
    """Return one piece for two whose views continue along the only axis on which they differ."""
    if not (isinstance(a, AffinePiece) and isinstance(b, AffinePiece)):
        return None
    if a.source != b.source or a.ops != b.ops or a.gather or b.gather:
        return None
    shape, other = a.box.shape, b.box.shape
    if a.view.shape != shape or b.view.shape != other:  # factored
        return None
    bounds = zip(a.box.start, a.box.stop, b.box.start, b.box.stop, strict=True)
    axes = [n for n, (start, stop, low, high) in enumerate(bounds) if (start, stop) != (low, high)]
    if len(axes) != 1 or a.box.stop[axes[0]] != b.box.start[axes[0]]:
        return None
    (axis,) = axes
    stride, rest = divmod(b.view.offset - a.view.offset, shape[axis])
    strides = put(a.view.strides, axis, stride)
    if rest or not (_has_strides(a.view, strides) and _has_strides(b.view, strides)):
        return None
    box = a.box.along(axis, a.box.start[axis], b.box.stop[axis])
    return AffinePiece(box, a.source, AffineView(a.view.offset, box.shape, strides), a.ops)


def _has_strides(view: AffineView, strides: Sequence[int]) -> bool:
    """Return whether these are its strides, but for axes of extent 1."""
    axes = zip(view.shape, view.strides, strides, strict=True)
    return all(n == 1 or stride == other for n, stride, other in axes)
