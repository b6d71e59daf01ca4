"""Rounds of an exchange: what each device contributes, and what it gathers.

Devices that hold an array are a grid: a row for each distinct box, a column for each replica. In a
round each device contributes one piece, and the devices of a row gather theirs to whole boxes. A
round moves several leaves of one shape, one to a group of columns (a lane) that splits it, or many
small ones, packed into one buffer a column.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.geometry import Box, Ints, replaced
from orbax_safetensors_layout.sharding import ReplicaGrid, Replicas


class SharedLeaf(NamedTuple):
    """A leaf that several processes hold, or hold parts of."""

    number: int
    replicas: Replicas  # its boxes
    shape: tuple[int, ...]  # of each of them
    dtype: np.dtype  # the dtype that it will have
    is_direct: bool  # whether gathered values remain on the devices, not to pass through the host
    place: tuple[str, int]  # the file and the offset that it, or its first part, begins at
    strides: tuple[int, ...]  # its byte strides in the file
    cut_axes: tuple[int, ...] = ()  # the dimensions along which several boxes are merged
    # Leaves with equal values in the same places, for each of which these are exchanged again.
    tied: tuple[int, ...] = ()
    joint_axes: tuple[int, ...] = ()  # dimensions of which any part is read with all
    # The share of a box that a process reads by itself, and the requests that gaps between its rows
    # take beyond those of its bytes; and those of a box that is exchanged.
    share: float = 1.0
    requests: int = 0
    shared_requests: int = 0
    stored: float = 1.0  # bytes in the files for each of its values'

    @property
    def stored_bytes(self) -> float:
        """Bytes of a box in the files."""
        return self.box_bytes * self.stored

    @property
    def box_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes of it on a device in the end."""
        return self.box_bytes // math.prod(self.replicas.grid.cuts)


class Item(NamedTuple):
    """A leaf in a lane, by number: its box for each row, and its first byte in a packed lane."""

    leaf: int
    boxes: tuple[Box, ...]
    offset: int = 0


class Fragment(NamedTuple):
    """A box of a leaf that the device at `row` and `column` contributes; `offset` as in `Item`."""

    leaf: int
    box: Box
    row: int
    column: int
    offset: int


@dataclasses.dataclass(frozen=True)
class RoundForm:
    """The devices of a round and how they share it, without the leaves; one for many rounds."""

    grid: ReplicaGrid  # the devices
    lanes: int  # number of lanes
    shape: tuple[int, ...]  # that a lane gathers in each row: a box, or `[bytes]` of packed ones
    dtype: np.dtype  # dtype of its elements
    axis: int  # the dimension that the columns of a lane split it along
    is_packed: bool  # whether a lane is bytes of many leaves
    is_direct: bool  # whether the gathered values remain on the devices
    cut_axes: tuple[int, ...] = ()  # dimensions along which each device keeps its own part of them

    @functools.cached_property
    def parts(self) -> int:
        """Columns that split a lane among them."""
        return self.grid.columns // self.lanes

    @functools.cached_property
    def part_shape(self) -> tuple[int, ...]:
        """Shape that one device contributes, padded to be equal for all."""
        return replaced(self.shape, self.axis, -(-self.shape[self.axis] // self.parts))

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes that one device contributes."""
        return math.prod(self.part_shape) * self.dtype.itemsize

    @functools.cached_property
    def most_slot_bytes(self) -> int:
        """Bytes that the devices of a process contribute, the most of any."""
        return self.slot_bytes * self.grid.most_slots

    @functools.cached_property
    def gathered_bytes(self) -> int:
        """Bytes that every device of the grid gathers."""
        return self.slot_bytes * self.grid.replicas

    @functools.cached_property
    def device_received_bytes(self) -> int:
        """Bytes that a device gets from others: all that it gathers but its own piece."""
        return self.gathered_bytes - self.slot_bytes // math.prod(self.grid.cuts)

    def received_bytes(self, process: int) -> int:
        """Bytes that the devices of a process get from others."""
        return len(self.grid.slots(process)) * self.device_received_bytes

    def part_of(self, boxes: Sequence[Box], row: int, column: int) -> Box | None:
        """Return what the device at a place reads of a leaf; None where others take all of it."""
        box = boxes[row]
        if self.parts == 1:
            return box
        extent = self.part_shape[self.axis]
        low = box.start[self.axis] + column % self.parts * extent
        high = min(low + extent, box.stop[self.axis])
        return box.along(self.axis, low, high) if low < high else None

    def own_parts(self, process: int, boxes: tuple[Box, ...]) -> Mapping[int, tuple[Box, ...]]:
        """Return by lane, in the order of the devices, what a process reads of a leaf in it."""
        known = self._parts.get((process, id(boxes)))
        if known is None:
            of_lane: dict[int, list[Box]] = {}
            for row, column in self.grid.slots(process):
                box = self.part_of(boxes, row, column)
                if box is not None:
                    of_lane.setdefault(column // self.parts, []).append(box)
            parts = {lane: tuple(of_lane[lane]) for lane in of_lane}
            known = self._parts[process, id(boxes)] = boxes, parts
        return known[1]

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, int], tuple[tuple[Box, ...], dict[int, tuple[Box, ...]]]]:
        """By process and the id of the boxes, which the values keep."""
        return {}


class Round(NamedTuple):
    """Leaves that are exchanged together."""

    form: RoundForm
    lanes: tuple[tuple[Item, ...], ...]  # the leaves of each; at most one, unless they are packed

    def column_bytes(self, box_bytes: Mapping[int, int]) -> Ints:
        """Return the bytes that the devices of each column read, of boxes of leaves of a size."""
        lanes = np.array([sum(box_bytes[item.leaf] for item in lane) for lane in self.lanes])
        form = self.form
        if form.parts == 1:
            return lanes
        length = form.shape[form.axis]
        bounds = np.minimum(np.arange(form.parts + 1) * form.part_shape[form.axis], length)
        extents = np.diff(bounds)
        each, rest = np.divmod(lanes[:, None], length)  # the product itself may be too large
        columns: Ints = each * extents + rest * extents // length
        return columns.reshape(-1)

    def fragments(self, process: int) -> Iterator[Fragment]:
        """Yields the boxes that a process reads for the round, device by device."""
        form = self.form
        for row, column in form.grid.slots(process):
            for leaf, boxes, offset in self.lanes[column // form.parts]:
                box = form.part_of(boxes, row, column)
                if box is not None:
                    yield Fragment(leaf, box, row, column, offset)

    def reads(self, process: int) -> Iterator[tuple[int, tuple[Box, ...]]]:
        """Yields the same leaf by leaf: its number, and the boxes."""
        own_parts = self.form.own_parts
        for number, lane in enumerate(self.lanes):
            for leaf, boxes, _ in lane:
                parts = own_parts(process, boxes).get(number)
                if parts is not None:
                    yield leaf, parts


Stage = tuple[Round, ...]
"""Rounds whose pieces are read before the first of them is held."""
