"""Bound expressions that are functions of others, and not elementwise."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence

from orbax_safetensors_layout.geometry import row_major_strides

from ..expr.values import ValueOp
from .bound import BoundExpr, Sink, refined_view
from .index_builders import sliced
from .leaf_pieces import ComputedPiece, Decoder
from .window import Window, put


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Computed(BoundExpr):
    """A function of expressions that is not elementwise."""

    operands: tuple[BoundExpr, ...]
    decoder: Decoder

    def below(self) -> Sequence[BoundExpr]:
        return self.operands

    def pull(self, window: Window, ops: tuple[ValueOp, ...], sink: Sink) -> None:
        operands = self.operands
        for axis in range(self.decoder.free):
            window, operands = _without_gaps(window, operands, axis)
        region = self.decoder.widen(window.bounds)
        start = tuple(map(operator.sub, window.start, region.start))
        view, _ = refined_view(window._replace(start=start), row_major_strides(region.shape))
        inputs = tuple(zip(operands, self.decoder.needs(region), strict=True))
        sink.pieces.append(ComputedPiece(window.box, inputs, self.decoder, region, view, ops))


def _without_gaps(
    window: Window, operands: tuple[BoundExpr, ...], axis: int
) -> tuple[Window, tuple[BoundExpr, ...]]:
    """Leave only the indices of operands that a window takes along an axis."""
    step = math.gcd(*(dim.steps[axis] for dim in window.dims))
    if step < 2:
        return window, operands
    low, high = window.bounds.start[axis], window.bounds.stop[axis]
    count = (high - 1 - low) // step + 1
    kept = tuple(sliced(operand, axis, low, count, step) for operand in operands)
    dims = [d._replace(steps=put(d.steps, axis, d.steps[axis] // step)) for d in window.dims]
    start = put(window.start, axis, (window.start[axis] - low) // step)
    return Window(window.origin, start, tuple(dims)), kept
