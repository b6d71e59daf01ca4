"""Turns shards in memory into the bytes of a part of a file.

Shards whose bytes already are in the order of the file are written from where they are. Otherwise
rows of the tensor are assembled in a staging buffer, a block at a time, whatever the tensor's size;
values are cast, and sub-byte elements packed, on the way.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import NARROW_INTEGERS, PACKED, DType
from orbax_safetensors_layout.geometry import pack_bits
from orbax_safetensors_layout.mapping import assign
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.plan import FilePart, LeafWrite
from orbax_safetensors_layout.runtime import Bytes
from orbax_safetensors_layout.storage import ByteBuffer

from .host import HostValues, PendingShards

_STAGING_BYTES = MIB  # a block of staged rows: what a core's cache holds
_LONGEST_ROW_BYTES = 8 * _STAGING_BYTES  # longer ones are cut, and copied element by element


class TileRows(NamedTuple):
    """A tile cut into rows that can be staged."""

    axis: int  # the last dimension that is unrolled; -1 for a 0-d tile
    elements: int  # of a row
    block: int  # rows that are staged together

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: DType) -> TileRows:
        """Return the rows of a tile; blocks have a multiple of `dtype.group` rows."""
        if not shape:
            return cls(-1, 1, 1)
        # A row has the innermost dimension whole, so that it can be copied as wide elements.
        axis = 0
        while axis < len(shape) - 2 and math.prod(shape[axis + 1 :]) * dtype.bits > _STAGING_BYTES:
            axis += 1
        if axis == len(shape) - 2 and shape[-1] * dtype.bits > 8 * _LONGEST_ROW_BYTES:
            axis += 1
        elements = math.prod(shape[axis + 1 :])
        block = max(1, _STAGING_BYTES * 8 // max(1, elements * dtype.bits))
        block = -(-block // dtype.group) * dtype.group
        return cls(axis, elements, block)


class PartBytes:
    """One part's bytes, from the members of its tile. Safe to use from many threads."""

    def __init__(self, part: FilePart, leaf: LeafWrite, values: HostValues, held: int) -> None:
        self.part = part
        self.held_bytes = held  # of host memory
        self.unwritten_bytes = part.stop - part.start
        self._leaf = leaf
        in_order = values.in_order(part) and _members_in_order(part)
        self._values = values
        self._pending: PendingShards | None = values.begin(part)
        self._members: list[np.ndarray] = []
        self._lock = threading.Lock()
        # Sub-byte elements that another file than the final one holds are stored one a byte.
        self._packed = part.dtype.packed
        raw = self._packed or (part.dtype.code == "U8" and leaf.values in PACKED)
        self._cast = None if raw or leaf.values == part.dtype.numpy else part.dtype.numpy
        self.staged = self._packed or self._cast is not None or not in_order

    @functools.cached_property
    def rows(self) -> TileRows:
        return TileRows.of(self.part.tile.box.shape, self.part.dtype)

    @property
    def block_bytes(self) -> int:
        return self.rows.block * self.rows.elements * self.part.dtype.bits // 8

    def buffers(self, start: int, stop: int, scratch: Bytes) -> list[ByteBuffer]:
        """Return bytes `start` to `stop` of the part; if staged, whole blocks in `scratch`."""
        members = self._wait()
        if not self.staged:
            return _concatenated(members, start, stop)
        return [self._stage(members, start, stop, scratch)]

    def drop(self) -> None:
        self._members = []

    def _wait(self) -> list[np.ndarray]:
        with self._lock:
            if self._pending is not None:
                members = self._values.wait(self._pending)
                if not self.staged:  # a device may have laid it out in another way
                    members = [np.ascontiguousarray(member) for member in members]
                self._members = members
                self._pending = None
            return self._members

    def _stage(
        self, members: Sequence[np.ndarray], start: int, stop: int, scratch: Bytes
    ) -> ByteBuffer:
        rows, bits = self.rows, self.part.dtype.bits
        first = start * 8 // (rows.elements * bits)
        last = -(-stop * 8 // (rows.elements * bits))
        if self._packed:
            elements = np.empty((last - first) * rows.elements, np.uint8)
            _copy_rows([m.view(np.uint8) for m in members], self.part, rows, first, last, elements)
            data = pack_bits(elements, bits)
            scratch[: data.size] = data
            return scratch[: data.size]
        out = scratch[: stop - start]
        if self._cast is not None:
            _copy_rows(members, self.part, rows, first, last, out.view(self._cast))
        else:
            width = members[0].itemsize
            if rows.axis < len(self.part.tile.box.shape) - 1:
                width = _width(members, self.part)
            views = [member.view(f"u{width}") for member in members]
            _copy_rows(views, self.part, rows, first, last, out.view(f"u{width}"))
        return out


def stored_bytes(values: np.ndarray, dtype: DType) -> Bytes:
    """Return the bytes in a file of contiguous values, which have its dtype but for packing.

    Integers narrower than a byte, whose upper bits say nothing, become whole ones.
    """
    if values.dtype.name in NARROW_INTEGERS:
        values = values.astype(dtype.numpy)
    data = values.reshape(-1).view(np.uint8)
    return pack_bits(data, dtype.bits) if dtype.packed else data


def _members_in_order(part: FilePart) -> bool:
    """Whether the file's bytes are the members' bytes, one member after the other."""
    tile = part.tile
    split = [axis for axis, count in enumerate(tile.grid) if count > 1]
    return not split or all(extent == 1 for extent in tile.member_shape[: split[-1]])


def _concatenated(members: Sequence[np.ndarray], start: int, stop: int) -> list[ByteBuffer]:
    size = members[0].nbytes
    if not start and stop == size * len(members) and members[0].ndim:
        return [member.view(np.uint8) for member in members]
    buffers: list[ByteBuffer] = []
    for number in range(start // size, -(-stop // size)):
        low, high = max(start - number * size, 0), min(stop - number * size, size)
        buffers.append(members[number].reshape(-1).view(np.uint8)[low:high])
    return buffers


def _width(members: Sequence[np.ndarray], part: FilePart) -> int:
    """Return the bytes of the widest unsigned integer that rows can be copied as.

    Copying wide elements is faster, and numpy knows no fast copy of `bfloat16` and its like.
    """
    itemsize = members[0].itemsize
    if not all(member.flags.c_contiguous for member in members) or not part.tile.member_shape:
        return itemsize
    return max(itemsize, math.gcd(part.tile.member_shape[-1] * itemsize, 8))


def _copy_rows(
    members: Sequence[np.ndarray],
    part: FilePart,
    rows: TileRows,
    first: int,
    last: int,
    out: np.ndarray,
) -> None:
    """Puts rows `first` to `last` of a tile into the flat `out`, from its members.

    Members, in C order of the tile's grid, and `out` may have wider elements than the tile.
    """
    if rows.axis < 0:
        assign(out, members[0].reshape(1))
        return
    grid, axis = part.tile.grid, rows.axis
    member = members[0].shape
    extents = tuple(n * g for n, g in zip(member, grid, strict=True))
    if not all(extents):
        return
    target = out.reshape(last - first, *extents[axis + 1 :])
    inner_indices = list(itertools.product(*map(range, grid[axis + 1 :])))
    row_shape = member[axis + 1 :]
    inner = [
        tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell, row_shape, strict=True))
        for cell in inner_indices
    ]
    unrolled = extents[: axis + 1]
    row = first
    while row < last:
        index = np.unravel_index(row, unrolled)
        outer_cell = tuple(int(i) // n for i, n in zip(index, member, strict=False))
        within = tuple(int(i) % n for i, n in zip(index, member, strict=False))
        count = min(last - row, member[axis] - within[-1])
        source = (*within[:-1], slice(within[-1], within[-1] + count))
        for inner_cell, place in zip(inner_indices, inner, strict=True):
            number = 0
            for cell, n in zip((*outer_cell, *inner_cell), grid, strict=True):
                number = number * n + cell
            region = target[(slice(row - first, row - first + count), *place)]
            assign(region, members[number][source])
        row += count
