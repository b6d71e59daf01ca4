"""Plans saves through a mapping: the place of each shard's elements in the files' tensors.

The mapping of loading gives for each region of a leaf the elements of tensors that it is made of; a
save walks the same pieces in the other direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import NewTensor, storage_dtype
from orbax_safetensors_layout.geometry import AffineView, Box
from orbax_safetensors_layout.mapping import (
    AffinePiece,
    Cast,
    TensorSpec,
    ValueOp,
    is_number,
    is_whole,
    undone,
)
from orbax_safetensors_layout.mapping import Mapping as LeafMapping

from .writes import LeafWrite


class Contribution(NamedTuple):
    """A region of a leaf, within one of its stored boxes, that goes into a tensor.

    Attributes:
        leaf: Number of the leaf.
        held: Number of the box that it lies in, among those of the leaf.
        box: The region, in the leaf.
        view: Index within the region to element offset in the tensor; its shape may take axes of
            the region's apart.
        ops: Operations on the values on their way to the tensor.
    """

    leaf: int
    held: int
    box: Box
    view: AffineView
    ops: tuple[ValueOp, ...]


class ScatterPlan(NamedTuple):
    """Tensors, with their dtypes in the files, and the contributions to each by name."""

    tensors: tuple[NewTensor, ...]
    parts: dict[str, list[Contribution]]


def plan_scatter(
    leaves: Sequence[LeafWrite], mapping: LeafMapping, dtype: np.dtype | None = None
) -> ScatterPlan:
    """Plans a save through a mapping.

    Args:
        leaves: The leaves.
        mapping: The mapping, as for loading.
        dtype: Dtype that floating-point tensors are written in; None for that of the mapping.

    Raises:
        MappingError: It does not invert, or does not fit the leaves; lists all problems.
        UnsupportedDtypeError: A tensor has a dtype that files have no code for.
    """
    specs = {leaf.tensor.name: TensorSpec(leaf.tensor.shape, leaf.values) for leaf in leaves}
    tensors = mapping.inverse().bind(specs).specs()
    shapes = {name: spec.shape for name, spec in specs.items()}
    forward = mapping.bind(tensors, shapes)
    stored = {name: _stored(spec.dtype, dtype) for name, spec in tensors.items()}
    parts: dict[str, list[Contribution]] = {name: [] for name in tensors}
    for number, leaf in enumerate(leaves):
        name = leaf.tensor.name
        if name in forward.ties or not leaf.tensor.nbytes:
            continue
        bound = forward.expressions[name]
        for held, box in enumerate(leaf.held.boxes):
            for piece in bound.pull_back(box, refined=True, saving=True):
                if isinstance(piece, AffinePiece):  # nothing is computed, and fills are not saved
                    ops = _inverse_ops(piece.ops, tensors[piece.source].dtype, leaf.values)
                    if stored[piece.source] != tensors[piece.source].dtype:
                        ops += (Cast(stored[piece.source]),)
                    part = Contribution(number, held, piece.box, piece.view, ops)
                    parts[piece.source].append(part)
    new = tuple(
        NewTensor(name, storage_dtype(stored[name], tensor=name), spec.shape)
        for name, spec in tensors.items()
    )
    return ScatterPlan(new, parts)


def _stored(dtype: np.dtype, floating: np.dtype | None) -> np.dtype:
    is_floating = is_number(dtype) and not is_whole(dtype) and dtype.kind != "c"
    return floating if floating is not None and is_floating else dtype


def _inverse_ops(ops: Sequence[ValueOp], source: np.dtype, values: np.dtype) -> tuple[ValueOp, ...]:
    """Return the inverse of operations on `source`, for a leaf whose dtype is `values`."""
    operands = [source]
    for op in ops:
        operands.append(op.result(operands[-1]))
    inverse: list[ValueOp] = []
    for op, operand in zip(reversed(ops), reversed(operands[:-1]), strict=True):
        for back in undone(op, operand, values):
            inverse.append(back)
            values = back.result(values)
    return tuple(inverse)
