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

from .array_source import place_name
from .writes import FileWrite, LeafWrite, WritePlan, plan_consolidation, plan_leaf_pieces


class MappedTensors(NamedTuple):
    """The tensors of the files, by name.

    Attributes:
        expressions: The row-major elements of each, over the boxes that the leaves are held in by
            one process, or stored in by several.
        held: For each such box that one process holds, by `place_name`, the numbers of the leaf
            and of the box; of several processes none.
    """

    expressions: dict[str, BoundExpr]
    held: dict[str, tuple[int, int]]


def plan_mapped_writes(
    leaves: Sequence[LeafWrite],
    mapping: Mapping,
    *,
    options: WriteOptions,
    process_index: int = 0,
    process_count: int = 1,
) -> tuple[WritePlan, MappedTensors]:
    """Plans the writes of one process in a save through a mapping.

    Several processes leave the leaves in pieces, of which the files' owners make the tensors.

    Args:
        leaves: The leaves.
        mapping: The mapping, as for loading.
        options: How to write; floating-point tensors get the dtype that it says.
        process_index: The process.
        process_count: Number of processes.

    Raises:
        MappingError: It does not invert, or does not fit the leaves; lists all problems.
        UnsupportedDtypeError: A tensor has a dtype that files have no code for.
    """
    of_process = {"process_index": process_index, "process_count": process_count}
    stored: StoredPieces | None = None
    pieces: FileWrite | None = None
    boxes = {leaf.tensor.name: leaf.held.boxes for leaf in leaves}
    if process_count > 1:
        stored, pieces = plan_leaf_pieces(leaves, options=options, **of_process)
        boxes = {name: tuple(found.box for found in stored.boxes(name)) for name in boxes}
    specs = TensorSpecs(
        {leaf.tensor.name: (leaf.tensor.shape, leaf.values.newbyteorder("=")) for leaf in leaves},
        pieces={name: [(box, place_name(name, box)) for box in boxes[name]] for name in boxes},
    )
    tensors: list[NewTensor] = []
    expressions: dict[str, BoundExpr] = {}
    for name, expr in mapping.inverse().bind(specs).expressions.items():
        shape, expr = expr.shape, row_major(expr)
        if options.dtype is not None and is_floating(expr.dtype):
            expr = Valued.of(expr, Cast(options.dtype))
        expressions[name] = expr
        tensors.append(NewTensor(name, storage_dtype(expr.dtype, tensor=name), shape))
    nothing = StoredPieces((), (), {})
    files = plan_consolidation(tensors, nothing, options=options, **of_process)
    own = tuple(
        file._replace(gathered=tuple(len(leaves) + number for number in file.gathered))
        for file in files.own
    )
    plan = dataclasses.replace(
        files, leaves=(*leaves, *files.leaves), own=own, pieces=pieces, stored=stored
    )
    held = {
        place_name(leaf.tensor.name, box): (number, at)
        for number, leaf in enumerate(leaves)
        if stored is None
        for at, box in enumerate(leaf.held.boxes)
    }
    return plan, MappedTensors(expressions, held)
