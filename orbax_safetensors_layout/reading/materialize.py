"""Boxes that are being filled: what was read becomes finished boxes of leaves as it comes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.mapping import (
    AffinePiece,
    ValueOp,
    apply_ops,
    assemble_box,
    cast_into,
    in_chunks,
)
from orbax_safetensors_layout.plan import ComposedBlock, LeafRead, StoredSource
from orbax_safetensors_layout.runtime import allocate

from .decoding import check_booleans
from .resolve import Fidelity, PlannedLeaf, ResolvedLeaf, subject_of

Wait = Callable[[], object]
TakeBoxes = Callable[[ResolvedLeaf, Sequence[int], Sequence[np.ndarray]], Wait | None]
"""Takes a leaf, some boxes of its plan by number, and their values in the leaf's dtype."""


class _Input(NamedTuple):
    """What a read is for: a leaf itself, or one input of a block that is put together."""

    leaf: int
    block: int | None = None
    number: int = 0


class Materializer:
    """Finished boxes of leaves, from reads that are delivered in any order.

    Args:
        leaves: The leaves, and how their boxes are read.
        take: Takes the finished boxes.
    """

    def __init__(self, leaves: Sequence[PlannedLeaf], take: TakeBoxes) -> None:
        self._leaves = leaves
        self._take = take
        self._boxes: dict[int, dict[int, np.ndarray]] = {}
        self._blocks_left: dict[int, int] = {}
        self._arrays: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        self.reads: list[LeafRead] = []
        self._inputs: list[_Input] = []
        # Of leaves that are alike, as tied ones, the first is read, and the others get its values.
        alike: dict[object, list[int]] = {}
        for number, planned in enumerate(leaves):
            alike.setdefault(_likeness(planned), []).append(number)
        self._alike = {numbers[0]: numbers for numbers in alike.values()}
        for number in self._alike:
            plan = leaves[number].plan
            if plan.read is not None:
                self._add(plan.read, _Input(number))
                continue
            self._blocks_left[number] = len(plan.blocks)
            for at, block in enumerate(plan.blocks):
                unit = len(self.reads)
                for which, read in enumerate(block.inputs):
                    self._add(read._replace(unit=unit), _Input(number, at, which))

    def begin(self) -> None:
        """Fills what nothing has to be read for."""
        for number in self._alike:
            plan = self._leaves[number].plan
            if plan.read is not None:
                continue
            for block in plan.blocks:
                if not block.inputs:
                    self._compose(number, block, {})
            if not plan.blocks:
                self._finish(number, [], [])

    def _add(self, read: LeafRead, made: _Input) -> None:
        self.reads.append(read)
        self._inputs.append(made)

    def convert(self, number: int, values: np.ndarray, out: np.ndarray) -> None:
        """Puts values of a read, as they are in the file, in their place as the read wants them."""
        leaf, plan = self._leaves[self._inputs[number].leaf]
        self._check(leaf, values)
        _put(leaf, plan.ops, values, out)

    def _check(self, leaf: ResolvedLeaf, values: np.ndarray) -> None:
        check_booleans([values], file=leaf.origin.file, name=leaf.name)

    def deliver(
        self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Takes some boxes of a read."""
        made = self._inputs[number]
        if made.block is None:
            return self._finish(made.leaf, boxes, parts)
        block = self._leaves[made.leaf].plan.blocks[made.block]
        arrays = self._arrays.setdefault((made.leaf, made.block), {})
        (arrays[made.number],) = parts
        if len(arrays) < len(block.inputs):
            return None
        del self._arrays[made.leaf, made.block]
        return self._compose(made.leaf, block, arrays)

    def _compose(
        self, number: int, block: ComposedBlock, arrays: dict[int, np.ndarray]
    ) -> Wait | None:
        leaf = self._leaves[number].leaf
        in_order = iter(range(len(arrays)))

        def read(piece: AffinePiece) -> np.ndarray:
            values = arrays.pop(next(in_order))
            self._check(leaf, values)
            return values

        boxes = self._boxes.setdefault(number, {})
        values = boxes.get(block.number)
        if values is None:
            shape, nbytes = block.whole.shape, block.whole.size * leaf.dtype.itemsize
            values = boxes[block.number] = allocate(nbytes).view(leaf.dtype).reshape(shape)
        at: tuple[Any, ...] = (*block.box.within(block.whole).slices, ...)
        place: np.ndarray = values[at]
        dtype = leaf.origin.dtype
        out = place if dtype == leaf.dtype else np.empty(place.shape, dtype)
        try:
            assemble_box(block.pieces, block.box, dtype, read, out=out, refined=True)
        except SafetensorsLayoutError as error:
            error.tensor = error.tensor or leaf.name
            raise
        except Exception as error:
            error.add_note(f"In a function that makes leaf {leaf.name!r}, of osl.opaque.")
            raise
        if out is not place:
            _put(leaf, (), out, place)
        self._blocks_left[number] -= 1
        if self._blocks_left[number]:
            return None
        del self._boxes[number]
        return self._finish(number, [*boxes], [*boxes.values()])

    def _finish(
        self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Gives finished boxes to their leaf, and to those that are like it."""
        waits: list[Wait] = []
        leaves = [self._leaves[alike].leaf for alike in self._alike[number]]
        leaves.sort(key=lambda leaf: leaf.want.placement is None)
        for place, leaf in enumerate(leaves):
            if place and leaf.want.placement is None:
                parts = [part.copy() for part in parts]  # who has arrays of numpy may write to them
            wait = self._take(leaf, boxes, parts)
            waits += [] if wait is None else [wait]
        return (lambda: [wait() for wait in waits]) if waits else None


def _likeness(planned: PlannedLeaf) -> object:
    """What leaves have in common that have the same values in the same boxes.

    Of leaves that are read once for all processes, one process may read other boxes of each.
    """
    leaf, plan = planned
    if isinstance(leaf.origin, StoredSource):
        return leaf.number
    boxes = [block.box for block in plan.blocks] if plan.read is None else plan.read.local.boxes
    return source_of(leaf), leaf.local, tuple(boxes)


def source_of(leaf: ResolvedLeaf) -> object:
    """What leaves have in common that have the same values; tied leaves have one expression."""
    origin = leaf.origin
    if isinstance(origin, StoredSource):
        return leaf.number
    return id(origin.bound), leaf.dtype, leaf.cast


def _put(leaf: ResolvedLeaf, ops: tuple[ValueOp, ...], values: np.ndarray, out: np.ndarray) -> None:
    """Puts values into the memory of a leaf, after some operations, in its dtype."""
    for part, place in in_chunks(values, out):
        found = apply_ops(part, ops)
        if found.dtype == leaf.dtype:
            place[...] = found
        else:
            exact = leaf.cast is Fidelity.EXACT
            cast_into(place, found, exact=exact, subject=subject_of(leaf))
