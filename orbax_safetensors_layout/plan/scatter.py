"""Saves through a mapping: where the elements of each shard of a leaf go in the files' tensors.

The mapping of loading says for each region of a leaf which elements of which tensor it is made of;
a save walks the same pieces the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format.dtypes import dtype_from_numpy
from orbax_safetensors_layout.format.layout import NewTensor
from orbax_safetensors_layout.geometry.affine import AffineView
from orbax_safetensors_layout.geometry.box import Box
from orbax_safetensors_layout.mapping.bound import Bound
from orbax_safetensors_layout.mapping.facts import Fact
from orbax_safetensors_layout.mapping.pieces import AffinePiece, ComputedPiece
from orbax_safetensors_layout.mapping.rules import Mapping as LeafMapping
from orbax_safetensors_layout.mapping.values import ValueOp
from orbax_safetensors_layout.plan.writes import LeafWrite


class Contribution(NamedTuple):
    """A region of a leaf, within one of its stored boxes, that goes into a tensor.

    Attributes:
        leaf: Number of the leaf.
        held: Number of the box that it lies in, among those of the leaf.
        box: The region, in the leaf.
        view: Index within the region to element offset in the tensor; its shape may take axes of
            the region's apart, and where its stride is 0 all elements are equal.
        ops: Operations on the values on their way to the tensor.
    """

    leaf: int
    held: int
    box: Box
    view: AffineView
    ops: tuple[ValueOp, ...]


class ScatterPlan(NamedTuple):
    """What tensors are made of.

    Attributes:
        tensors: The tensors, with the dtypes that they have in the files.
        parts: Of each tensor by name, what it is made of.
    """

    tensors: tuple[NewTensor, ...]
    parts: dict[str, list[Contribution]]


def plan_scatter(leaves: Sequence[LeafWrite], mapping: LeafMapping) -> ScatterPlan:
    """Plans a save through a mapping.

    Args:
        leaves: The leaves.
        mapping: The mapping, as for loading.

    Raises:
        MappingError: It does not invert, or does not fit the leaves; tells everything.
        UnsupportedDtypeError: A tensor has a dtype that files have no code for.
    """
    facts = {leaf.tensor.name: Fact(leaf.tensor.shape, leaf.values) for leaf in leaves}
    tensors = mapping.inverse().bind(facts).facts()
    shapes = {name: fact.shape for name, fact in facts.items()}
    forward = mapping.bind(tensors, shapes)
    parts: dict[str, list[Contribution]] = {name: [] for name in tensors}
    for number, leaf in enumerate(leaves):
        name = leaf.tensor.name
        if name in forward.ties or not leaf.tensor.nbytes:
            continue
        for held, box in enumerate(leaf.held.boxes):
            _contribute(forward.expressions[name], number, held, box, tensors, parts)
    new = tuple(
        NewTensor(name, dtype_from_numpy(fact.dtype, tensor=name), fact.shape)
        for name, fact in tensors.items()
    )
    return ScatterPlan(new, parts)


def _contribute(
    made: Bound,
    leaf: int,
    held: int,
    box: Box,
    tensors: Mapping[str, Fact],
    parts: dict[str, list[Contribution]],
) -> None:
    for piece in made.pull_back(box, refined=True):
        if isinstance(piece, ComputedPiece):
            raise MappingError(
                "computed values do not invert", tensor=piece.inputs[0][0].dtype.name
            )
        if isinstance(piece, AffinePiece):
            ops = _inverse_ops(piece.ops, tensors[piece.source].dtype)
            part = Contribution(leaf, held, piece.box, piece.view, ops)
            parts[piece.source].append(part)


def _inverse_ops(ops: Sequence[ValueOp], dtype: np.dtype) -> tuple[ValueOp, ...]:
    """What undoes operations on values of `dtype`, last one first."""
    inverse: list[ValueOp] = []
    for op in ops:
        inverse.append(op.inverse(dtype))
        dtype = op.result(dtype)
    return tuple(reversed(inverse))
