"""Plans saves through a mapping: the files' tensors as expressions over the boxes of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from orbax_safetensors_layout.format import NewTensor, StoredPieces, storage_dtype
from orbax_safetensors_layout.mapping import (
    BoundExpr,
    Cast,
    Mapping,
    TensorSpecs,
    Valued,
    row_major,
)
from orbax_safetensors_layout.options import WriteOptions, is_floating

from .array_source import named_pieces
from .writes import LeafWrite, WritePlan, WritePlanner, plan_consolidation


class MappedTensors(NamedTuple):
    """The tensors of the files, by name."""

    expressions: dict[str, BoundExpr]  # row-major elements, over boxes that are held or stored
    held: dict[str, tuple[int, int]]  # of one process: numbers of leaf and box, by the box's name


def plan_mapped_writes(
    leaves: Sequence[LeafWrite],
    mapping: Mapping,
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> tuple[WritePlan, MappedTensors]:
    """Plans a save through a mapping for loading; several processes leave the leaves in pieces."""
    of_process = {"process_index": process_index, "process_count": process_count}
    planner = WritePlanner(leaves, options, process_index, process_count)
    stored, pieces = planner.own_pieces() if process_count > 1 else (None, None)
    boxes = {leaf.tensor.name: leaf.held.boxes for leaf in leaves}
    if stored is not None:
        boxes = {name: tuple(found.box for found in stored.boxes(name)) for name in boxes}
    specs = TensorSpecs(
        {leaf.tensor.name: (leaf.tensor.shape, leaf.values.newbyteorder("=")) for leaf in leaves},
        pieces=named_pieces(boxes),
    )
    tensors: list[NewTensor] = []
    expressions: dict[str, BoundExpr] = {}
    for name, expr in mapping.inverse().bind(specs).expressions.items():
        shape, expr = expr.shape, row_major(expr)
        if options.dtype is not None and is_floating(expr.dtype):
            expr = Valued.of(expr, Cast(options.dtype))
        expressions[name] = expr
        tensors.append(NewTensor(name, storage_dtype(expr.dtype, tensor=name), shape))
    files = plan_consolidation(tensors, StoredPieces((), (), {}), options=options, **of_process)
    own = tuple(
        file._replace(gathered=tuple(len(leaves) + number for number in file.gathered))
        for file in files.own
    )
    plan = dataclasses.replace(
        files, leaves=(*leaves, *files.leaves), own=own, pieces=pieces, stored=stored
    )
    held = {
        place: (number, at)
        for number, of_leaf in enumerate(specs.pieces.values() if stored is None else ())
        for at, (_, place) in enumerate(of_leaf)
    }
    return plan, MappedTensors(expressions, held)
