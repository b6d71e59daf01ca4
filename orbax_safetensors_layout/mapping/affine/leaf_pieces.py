"""Pieces: what a region of a leaf is made of, and the region assembled from what was read."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import AffineView, Box, Gather

from ..expr.values import ValueOp, apply_ops

_MANY_PIECES = 16

_LEAST_SLAB = 64  # elements; where each takes several vectors of its own, they are more than it is


class AffinePiece(NamedTuple):
    """A region of a leaf whose elements lie in one tensor.

    Attributes:
        box: The region, in the leaf.
        source: The tensor's name.
        view: Index within the region to element offset in the row-major tensor. Strides may be
            permuted, have gaps, be negative or, for repeated elements, 0. `view.shape` is
            `box.shape`; where refined pieces were asked for, some axes are taken apart.
        ops: Operations on the values, in order.
        gather: Where each index of one axis is, if gathers were asked for. `view` is then one such
            slab, to whose offset that of each is added; other pieces may fill gaps of `box`.
    """

    box: Box
    source: str
    view: AffineView
    ops: tuple[ValueOp, ...]
    gather: Gather | None = None


class FillPiece(NamedTuple):
    """A region of a leaf that holds one value.

    Attributes:
        box: The region, in the leaf.
        value: The value, a 0-d array.
    """

    box: Box
    value: np.ndarray


class Decoder(Protocol):
    """Computes regions of an array from regions of others."""

    @property
    def free(self) -> int:
        """Number of leading axes along which each index is computed from that of all inputs."""
        ...

    def widen(self, region: Box) -> Box:
        """The region to compute in order to have `region`."""
        ...

    def needs(self, region: Box) -> tuple[Box, ...]:
        """The region of each input that a widened region is computed from."""
        ...

    def decode(self, region: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """The values of a widened region from the values of what it needs."""
        ...


class Input(Protocol):
    """An expression that a computed piece takes a region of."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        ...

    def pull_back(self, box: Box, *, refined: bool = False) -> tuple[Piece, ...]:
        """The pieces of a region."""
        ...


class ComputedPiece(NamedTuple):
    """A region of a leaf that is computed from regions of expressions.

    Attributes:
        box: The region, in the leaf.
        inputs: What has to be read: expressions, and the region that is needed of each.
        decoder: Computes.
        region: What it computes, in the indices of its result.
        view: Index within `box` to element offset in the row-major result. `view.shape` may take
            axes of `box.shape` apart.
        ops: Operations on the values, in order.
    """

    box: Box
    inputs: tuple[tuple[Input, Box], ...]
    decoder: Decoder
    region: Box
    view: AffineView
    ops: tuple[ValueOp, ...]

    def fn(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """The values of `box` from the values of `inputs`."""
        result = self.decoder.decode(self.region, inputs)
        selected = apply_view(np.ascontiguousarray(result).reshape(-1), self.view)
        return apply_ops(selected.reshape(self.box.shape), self.ops)


Piece = AffinePiece | FillPiece | ComputedPiece
"""What a region of a leaf is made of."""


def index_only(pieces: Iterable[Piece]) -> bool:
    """Whether the values of all pieces are those of tensors as they are.

    They can then be read straight into their destination.
    """
    return all(isinstance(piece, AffinePiece) and not piece.ops for piece in pieces)


def affine_pieces(pieces: Iterable[Piece], *, refined: bool = False) -> Iterator[AffinePiece]:
    """All that has to be read: affine pieces, and those that computed pieces are made of.

    Args:
        pieces: The pieces.
        refined: Ask for refined pieces of what computed pieces are made of; see
            `Bound.pull_back`.
    """
    for piece in pieces:
        if isinstance(piece, AffinePiece):
            yield piece
        elif isinstance(piece, ComputedPiece):
            for expression, box in piece.inputs:
                below = expression.pull_back(box, refined=refined)
                yield from affine_pieces(below, refined=refined)


def assemble_box(
    pieces: Iterable[Piece],
    box: Box,
    dtype: np.dtype[Any],
    read: Callable[[AffinePiece], np.ndarray],
    *,
    out: np.ndarray | None = None,
    refined: bool = False,
) -> np.ndarray:
    """The values of a region of a leaf, from what was read of tensors.

    Args:
        pieces: The pieces of `box`.
        box: The region.
        dtype: The leaf's dtype.
        read: Gives the values of an affine piece, `piece.view` of its tensor, before its
            operations; it is called for each of `affine_pieces(pieces)`, in their order.
        out: Where to put the values, of the region's shape; None allocates.
        refined: As for `affine_pieces`.

    Raises:
        MappingError: A function of a mapping gave another shape or dtype than was declared.
        DtypeMismatchError: A cast to integers cannot hold a value.

    Example:
        >>> piece = FillPiece(Box((0,), (2,)), np.float32(7))
        >>> assemble_box([piece], Box((0,), (2,)), np.dtype("float32"), read=lambda piece: ...)
        array([7., 7.], dtype=float32)
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
            values = read(piece).reshape(piece.box.shape)
            if piece.ops:
                apply_ops(values, piece.ops, target)
            else:
                target[...] = values
        else:
            target[...] = piece.fn([_input(*needed, read, refined) for needed in piece.inputs])
    return out


def _input(
    expression: Input, box: Box, read: Callable[[AffinePiece], np.ndarray], refined: bool
) -> np.ndarray:
    pieces = expression.pull_back(box, refined=refined)
    return assemble_box(pieces, box, expression.dtype, read, refined=refined)


def apply_view(elements: np.ndarray, view: AffineView) -> np.ndarray:
    """A view of a flat array: no copy.

    Example:
        >>> apply_view(np.arange(6), AffineView(5, (2, 3), (-3, -1)))
        array([[5, 4, 3],
               [2, 1, 0]])
    """
    if 0 in view.shape:
        return np.empty(view.shape, elements.dtype)
    low = high = view.offset
    for n, stride in zip(view.shape, view.strides, strict=True):
        low, high = low + min(0, stride * (n - 1)), high + max(0, stride * (n - 1))
    if low < 0 or high >= elements.size:
        raise MappingError(
            "a view reaches beyond its tensor",
            expected=f"elements 0 to {elements.size}",
            found=f"elements {low} to {high + 1}",
        )
    found = strided(elements, view)
    found.flags.writeable = False
    return found


def strided(elements: np.ndarray, view: AffineView) -> np.ndarray:
    """The elements of a view within a flat, contiguous array, without a copy."""
    # Not `as_strided`: the type string of float8_e5m2 is none that numpy knows.
    size = elements.itemsize
    strides = tuple(stride * size for stride in view.strides)
    return np.ndarray(
        view.shape, elements.dtype, elements.view(np.uint8).data, view.offset * size, strides
    )


def merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces with those joined that follow one another in their leaf and in their tensor.

    Among many pieces two with a gap between them stay alone, since any two are equally spaced:
    each is read with its own neighbours in the file.
    """
    joined: list[Piece] = []
    parts: list[list[Piece]] = []  # what each is joined of
    for piece in pieces:
        made = [piece]
        while joined and (both := _join(joined[-1], piece)) is not None:
            joined.pop()
            piece, made = both, parts.pop() + made
        joined.append(piece)
        parts.append(made)
    if len(pieces) < _MANY_PIECES:
        return tuple(joined)
    kept = zip(joined, parts, strict=True)
    return tuple([p for both, made in kept for p in (made if _is_chance(both, made) else [both])])


def _is_chance(both: Piece, made: Sequence[Piece]) -> bool:
    """Whether a piece is two equal ones that do not touch in the tensor, as rows or columns."""
    if len(made) != 2 or not all(isinstance(piece, AffinePiece) for piece in made):
        return False
    one, two = made
    assert isinstance(one, AffinePiece)
    assert isinstance(two, AffinePiece)
    low, high = one.view.bounds
    apart = abs(two.view.offset - one.view.offset)
    return one.view.shape == two.view.shape and apart not in (1, high - low)


def gathered(
    piece: AffinePiece, axis: int, places: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]
) -> AffinePiece:
    """Indices of an axis of a piece, at other places.

    Args:
        piece: The piece.
        axis: The axis.
        places: Index in the leaf of each.
        offsets: Element offset in the tensor of each.
    """
    _, source, view, ops, _ = piece
    first = int(offsets.min())
    shape = (*view.shape[:axis], 1, *view.shape[axis + 1 :])
    slab = AffineView(first, shape, view.strides)
    box = piece.box.along(axis, int(places.min()), int(places.max()) + 1)
    return AffinePiece(box, source, slab, ops, Gather(axis, places, offsets - first))


def shared(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces with those of one tensor that have some indices of an axis in common as gathers."""
    found = list(pieces)
    sources = [piece.source for piece in found if isinstance(piece, AffinePiece)]
    if len(set(sources)) == len(sources):
        return tuple(found)
    for axis in range(len(pieces[0].box.start)):
        alike: dict[object, list[Piece]] = {}
        for number, piece in enumerate(found):
            alike.setdefault(_slab_key(piece, axis, number), []).append(piece)
        found = [piece for some in alike.values() for piece in _shared_along(some, axis)]
    return tuple(found)


def _slab_key(piece: Piece, axis: int, number: int) -> object:
    """What pieces have in common whose indices of an axis are equal slabs of one tensor."""
    if not isinstance(piece, AffinePiece) or len(piece.view.shape) != len(piece.box.start):
        return number
    _, source, (offset, shape, strides), ops, gather = piece
    others = (*shape[:axis], 1, *shape[axis + 1 :])
    is_other = gather is not None and gather.axis != axis
    if is_other or not strides[axis] or math.prod(others) < _LEAST_SLAB:
        return number
    return source, ops, strides, offset % abs(strides[axis]), piece.box.along(axis, 0, 1)


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
    first, at, found = pieces[0], np.concatenate(places), np.concatenate(offsets)
    own = sum(len(np.unique(some)) for some in offsets)
    if len(np.unique(found)) == own:
        return pieces
    assert isinstance(first, AffinePiece)
    return [gathered(first, axis, at, found)]


def _join(one: Piece, two: Piece) -> Piece | None:
    """One piece for two whose views continue along the only axis on which they differ."""
    if not (isinstance(one, AffinePiece) and isinstance(two, AffinePiece)):
        return None
    if one.source != two.source or one.ops != two.ops or one.gather or two.gather:
        return None
    shape = one.box.shape
    if one.view.shape != shape or two.view.shape != two.box.shape:  # refined
        return None
    pairs = zip(one.box.start, one.box.stop, two.box.start, two.box.stop, strict=True)
    axes = [axis for axis, (a, b, c, d) in enumerate(pairs) if (a, b) != (c, d)]
    if len(axes) != 1 or one.box.stop[axes[0]] != two.box.start[axes[0]]:
        return None
    (axis,) = axes
    stride = two.view.offset - one.view.offset
    if stride % shape[axis]:
        return None
    stride //= shape[axis]
    strides = list(one.view.strides)
    strides[axis] = stride
    for k, n in enumerate(two.box.shape):
        known = [v.strides[k] for v, m in ((one.view, shape[k]), (two.view, n)) if m > 1]
        if any(s != strides[k] for s in known):
            return None
    stop = (*one.box.stop[:axis], two.box.stop[axis], *one.box.stop[axis + 1 :])
    box = Box(one.box.start, stop)
    return AffinePiece(
        box, one.source, AffineView(one.view.offset, box.shape, tuple(strides)), one.ops
    )
