"""Tensors that are stored in pieces, as expressions of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box

from .bound import BoundExpr, WholeTensor
from .index_builders import concatenated

Pieces = Sequence[tuple[Box, str]]
"""Boxes that tile a tensor, each with the name of the tensor that holds it."""


def divided(pieces: Pieces, dtype: np.dtype[Any]) -> BoundExpr:
    """Return a tensor as concatenations of its pieces.

    Raises:
        MappingError: No straight cut through the tensor separates them.

    Example:
        >>> halves = [(Box((0, 3), (2, 6)), "right"), (Box((0, 0), (2, 3)), "left")]
        >>> divided(halves, np.dtype("float32")).sources()
        ('left', 'right')
    """
    if len(pieces) == 1:
        ((box, name),) = pieces
        return WholeTensor(box.shape, dtype, name)
    for axis in range(len(pieces[0][0].start)):
        groups = _cut(pieces, axis)
        if len(groups) > 1:
            return concatenated([divided(group, dtype) for group in groups], axis)
    raise MappingError(
        "a tensor is stored in pieces that no straight cut separates",
        tensor=pieces[0][1],
        hint="Put the checkpoint together with `osl.consolidate` first.",
    )


def _cut(pieces: Pieces, axis: int) -> list[list[tuple[Box, str]]]:
    """Group the pieces between all cuts across an axis that hit none of them."""
    groups: list[list[tuple[Box, str]]] = []
    stop = 0
    for piece in sorted(pieces, key=lambda piece: piece[0].start[axis]):
        box = piece[0]
        if not groups or box.start[axis] >= stop:
            groups.append([])
        groups[-1].append(piece)
        stop = max(stop, box.stop[axis])
    return groups
