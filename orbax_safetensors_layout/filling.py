"""Boxes that are being filled: what was read becomes finished boxes of leaves as it comes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.mapping.pieces import AffinePiece, assemble_box
from orbax_safetensors_layout.mapping.values import apply_ops
from orbax_safetensors_layout.origins import ComposedBox, Plain
from orbax_safetensors_layout.plan.leaves import LeafRead
from orbax_safetensors_layout.transfer.buffers import allocate
from orbax_safetensors_layout.transfer.casting import cast
from orbax_safetensors_layout.transfer.decoding import check_booleans
from orbax_safetensors_layout.wants import Fidelity, PlannedLeaf, WantedLeaf, subject_of

Wait = Callable[[], object]
Take = Callable[[WantedLeaf, Sequence[int], Sequence[np.ndarray]], Wait | None]
"""Takes a leaf, some boxes of its plan by number, and their values in the leaf's dtype."""


class _Input(NamedTuple):
    """What a read is for: a leaf itself, or one input of a box that is put together."""

    leaf: int
    box: ComposedBox | None = None
    number: int = 0


class Filling:
    """Finished boxes of leaves, from reads that are delivered in any order.

    Args:
        leaves: The leaves, and how their boxes are read.
        take: Takes the finished boxes.
    """

    def __init__(self, leaves: Sequence[PlannedLeaf], take: Take) -> None:
        self._leaves = leaves
        self._take = take
        self._boxes: dict[int, dict[int, np.ndarray]] = {}
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
            for box in plan.composed:
                for which, read in enumerate(box.inputs):
                    self._add(read, _Input(number, box, which))

    def begin(self) -> None:
        """Fills what nothing has to be read for."""
        for number in self._alike:
            plan = self._leaves[number].plan
            if plan.read is not None:
                continue
            for box in plan.composed:
                if not box.inputs:
                    self._composed(number, box, {})
            if not plan.composed:
                self._finish(number, [], [])

    def _add(self, read: LeafRead, made: _Input) -> None:
        self.reads.append(read)
        self._inputs.append(made)

    def convert(self, number: int, values: np.ndarray) -> np.ndarray:
        """Values of a read, as they stand in the file, in the dtype that the read wants."""
        made = self._inputs[number]
        leaf, plan = self._leaves[made.leaf]
        if made.box is not None:
            return values
        self._check(leaf, values)
        if plan.ops:
            values = apply_ops(values, plan.ops)
        return _cast(leaf, values)

    def _check(self, leaf: WantedLeaf, values: np.ndarray) -> None:
        check_booleans([values], file=leaf.origin.file, name=leaf.name)

    def deliver(
        self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Takes some boxes of a read."""
        made = self._inputs[number]
        if made.box is None:
            return self._finish(made.leaf, boxes, parts)
        arrays = self._arrays.setdefault((made.leaf, made.box.number), {})
        (arrays[made.number],) = parts
        if len(arrays) < len(made.box.inputs):
            return None
        del self._arrays[made.leaf, made.box.number]
        return self._composed(made.leaf, made.box, arrays)

    def _composed(
        self, number: int, box: ComposedBox, arrays: dict[int, np.ndarray]
    ) -> Wait | None:
        leaf, plan = self._leaves[number]
        in_order = iter(range(len(arrays)))

        def read(piece: AffinePiece) -> np.ndarray:
            values = arrays.pop(next(in_order))
            self._check(leaf, values)
            return values

        shape, dtype = box.box.shape, leaf.origin.dtype
        out = allocate(box.box.size * dtype.itemsize).view(dtype).reshape(shape)
        try:
            values = assemble_box(box.pieces, box.box, dtype, read, out=out, refined=True)
        except SafetensorsLayoutError as error:
            error.tensor = error.tensor or leaf.name
            raise
        except Exception as error:
            error.add_note(f"In a function that makes leaf {leaf.name!r}, of osl.opaque.")
            raise
        done = self._boxes.setdefault(number, {})
        done[box.number] = _cast(leaf, values)
        if len(done) < len(plan.composed):
            return None
        del self._boxes[number]
        return self._finish(number, [*done], [*done.values()])

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
    if isinstance(leaf.origin, Plain):
        return leaf.number
    boxes = [box.box for box in plan.composed] if plan.read is None else plan.read.local.boxes
    return origin_of(leaf), leaf.local, tuple(boxes)


def origin_of(leaf: WantedLeaf) -> object:
    """What leaves have in common that have the same values; tied leaves have one expression."""
    origin = leaf.origin
    if isinstance(origin, Plain):
        return leaf.number
    return id(origin.bound), leaf.dtype, leaf.cast


def _cast(leaf: WantedLeaf, values: np.ndarray) -> np.ndarray:
    if values.dtype == leaf.dtype:
        return values
    exact = leaf.cast is Fidelity.EXACT
    return cast(values, leaf.dtype, exact=exact, subject=subject_of(leaf))
