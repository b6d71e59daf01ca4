"""A tree that is being filled: what was read becomes the leaves' values as it comes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from orbax_safetensors_layout import prng
from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.mapping.pieces import AffinePiece, assemble_box
from orbax_safetensors_layout.mapping.values import apply_ops
from orbax_safetensors_layout.origins import ComposedBox, LeafPlan
from orbax_safetensors_layout.plan.leaves import LeafRead
from orbax_safetensors_layout.plan.shards import sharding_of
from orbax_safetensors_layout.transfer.assemble import Assembler
from orbax_safetensors_layout.transfer.buffers import allocate
from orbax_safetensors_layout.transfer.casting import Subject, cast, python_scalar
from orbax_safetensors_layout.tree import Want
from orbax_safetensors_layout.wants import Fidelity

Wait = Callable[[], object]


class _Input(NamedTuple):
    """What a read is for: a leaf itself, or one input of a box that is put together."""

    want: int
    box: ComposedBox | None = None
    number: int = 0


class Filling:
    """Values of wanted leaves, from reads that are delivered in any order.

    Args:
        wants: What is wanted.
        plans: How each is read.
        casts: What a cast of each has to keep.
    """

    def __init__(
        self, wants: Sequence[Want], plans: Sequence[LeafPlan], casts: Sequence[Fidelity]
    ) -> None:
        self._wants = wants
        self._plans = plans
        self._casts = casts
        self._values: list[Any] = [None] * len(wants)
        self._assembler = Assembler()
        self._shards: dict[int, dict[Any, jax.Array]] = {}
        self._boxes: dict[int, dict[int, np.ndarray]] = {}
        self._arrays: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        self.reads: list[LeafRead] = []
        self._inputs: list[_Input] = []
        for number, plan in enumerate(plans):
            if plan.read is not None:
                self._add(plan.read, _Input(number))
                continue
            for box in plan.composed:
                for which, read in enumerate(box.inputs):
                    self._add(read, _Input(number, box, which))

    def begin(self) -> None:
        """Fills what nothing has to be read for."""
        for number, plan in enumerate(self._plans):
            if plan.read is not None:
                continue
            for box in plan.composed:
                if not box.inputs:
                    self._composed(number, box, {})
            if not plan.composed:
                self._fill(number, [], [])

    def _add(self, read: LeafRead, made: _Input) -> None:
        self.reads.append(read)
        self._inputs.append(made)

    def convert(self, number: int, values: np.ndarray) -> np.ndarray:
        """Values of a read, as they stand in the file, in the dtype that the read wants."""
        made = self._inputs[number]
        plan = self._plans[made.want]
        if made.box is not None:
            return values
        if plan.ops:
            values = apply_ops(values, plan.ops)
        return self._cast(made.want, values)

    def deliver(
        self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]
    ) -> Wait | None:
        """Takes some boxes of a read."""
        made = self._inputs[number]
        if made.box is None:
            return self._fill(made.want, boxes, parts)
        arrays = self._arrays.setdefault((made.want, made.box.number), {})
        (arrays[made.number],) = parts
        if len(arrays) < len(made.box.inputs):
            return None
        del self._arrays[made.want, made.box.number]
        return self._composed(made.want, made.box, arrays)

    def values(self) -> Iterator[Any]:
        """The leaves' values, when all has been delivered."""
        for want, value in zip(self._wants, self._values, strict=True):
            yield value if want.key_impl is None else prng.wrap(value, want.key_impl)

    def _composed(
        self, number: int, box: ComposedBox, arrays: dict[int, np.ndarray]
    ) -> Wait | None:
        plan = self._plans[number]
        in_order = iter(range(len(arrays)))

        def read(piece: AffinePiece) -> np.ndarray:
            return arrays.pop(next(in_order))

        shape, dtype = box.box.shape, plan.values
        out = allocate(box.box.size * dtype.itemsize).view(dtype).reshape(shape)
        try:
            values = assemble_box(box.pieces, box.box, dtype, read, out=out, refined=True)
        except SafetensorsLayoutError as error:
            error.tensor = error.tensor or plan.name
            raise
        done = self._boxes.setdefault(number, {})
        done[box.number] = self._cast(number, values)
        if len(done) < len(plan.composed):
            return None
        del self._boxes[number]
        return self._fill(number, [*done], [*done.values()])

    def _cast(self, number: int, values: np.ndarray) -> np.ndarray:
        plan, kind = self._plans[number], self._casts[number]
        if values.dtype == plan.dtype:
            return values
        if kind is Fidelity.RAW:
            return values.view(plan.dtype)
        return cast(values, plan.dtype, exact=kind is Fidelity.EXACT, subject=_subject(plan))

    def _fill(self, number: int, boxes: Sequence[int], parts: Sequence[np.ndarray]) -> Wait | None:
        want, plan = self._wants[number], self._plans[number]
        shape, dtype, local = plan.shape, plan.dtype, plan.local
        if want.placement is None:
            self._values[number] = self._host_value(want, plan, parts[0])
            return None
        by_box = dict(zip(boxes, parts, strict=True))
        if len(by_box) == len(local.boxes):
            in_order = [by_box[box] for box in range(len(by_box))]
            array = self._assembler.array(shape, dtype, want.placement, local, in_order)
            self._values[number] = array
            wait: Wait = array.block_until_ready
            return wait
        some = self._assembler.shards(shape, want.placement, local, by_box)
        mine = self._shards.setdefault(number, {})
        mine.update(some)
        if len(mine) == len(sharding_of(want.placement).addressable_devices):
            shards = self._shards.pop(number)
            self._values[number] = self._assembler.join(shape, dtype, want.placement, shards)
        return lambda: [shard.block_until_ready() for shard in some.values()]

    def _host_value(self, want: Want, plan: LeafPlan, value: np.ndarray) -> Any:
        if want.scalar is None:
            return value
        if want.scalar is np.generic:
            return value[()]
        return python_scalar(value, want.scalar, _subject(plan))


def _subject(plan: LeafPlan) -> Subject:
    return Subject(plan.name, plan.file, plan.values)
