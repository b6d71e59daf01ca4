"""Tiles in memory, and the axes of regions of them: their strides in the file and in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.geometry import Box, StridedRuns, Tile, row_major_strides
from orbax_safetensors_layout.runtime import SLOT_ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class TileLayout:
    """One tile of a leaf in memory; shared by all leaves of a shape and sharding."""

    tile: Tile  # the tile; its members are box numbers of the leaf, of which it may have a part
    regions: tuple[Box, ...]  # the part of the leaf that each member is
    shared: bool  # other processes hold this tile too
    is_scratch: bool  # its values are computed from this memory into that of the arrays
    itemsize: int  # bytes of an element (1 where elements are packed into bytes)
    member_shape: tuple[int, ...]
    member_bytes: int
    slot_bytes: int  # bytes from one member to the next
    memory_bytes: int  # bytes that all members take
    within: tuple[int, ...]  # byte strides inside a member
    across: tuple[int, ...]  # byte strides from member to member

    @classmethod
    def of(
        cls,
        tile: Tile,
        itemsize: int,
        *,
        shared: bool,
        is_scratch: bool,
        regions: Iterable[Box] | None = None,
    ) -> TileLayout:
        member_shape = tile.member_shape
        member_bytes = math.prod(member_shape) * itemsize
        slot_bytes = -(-member_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        return cls(
            tile=tile,
            regions=tuple(tile.member_boxes() if regions is None else regions),
            shared=shared,
            is_scratch=is_scratch,
            itemsize=itemsize,
            member_shape=member_shape,
            member_bytes=member_bytes,
            slot_bytes=slot_bytes,
            memory_bytes=slot_bytes * len(tile.members),
            within=tuple(n * itemsize for n in row_major_strides(member_shape)),
            across=tuple(n * slot_bytes for n in row_major_strides(tile.grid)),
        )


class Axis(NamedTuple):
    """One dimension of a region: index `i` is index `phase + i` of the members it runs through."""

    extent: int
    source: int  # byte stride in the file; 0 where elements are repeated
    member: int  # indices of one member; the extent where bounds of members do not matter
    phase: int  # place of the first index within its member
    within: int  # byte stride in memory inside a member; may be negative
    across: int  # byte stride in memory from member to member

    @property
    def crosses(self) -> bool:
        """Whether it runs through several members that are not contiguous."""
        return self.member < self.phase + self.extent

    @property
    def whole(self) -> int:
        """Number of indices of all members that it touches."""
        return -(-(self.phase + self.extent) // self.member) * self.member

    def memory_offset(self, index: int) -> int:
        """Return the bytes from index 0 to `index` in memory."""
        cell, inside = divmod(self.phase + index, self.member)
        return cell * self.across + (inside - self.phase) * self.within

    def ranges(self, length: int) -> Iterator[tuple[int, int]]:
        """Cuts it into half-open ranges of up to `length` indices: whole members, or inside one."""
        low, stop = self.phase, self.phase + self.extent
        while low < stop:
            cell = low // self.member * self.member
            if length < self.member:
                high = min(cell + (low - cell) // length * length + length, cell + self.member)
            else:
                high = cell + length // self.member * self.member
            high = min(high, stop)
            yield low - self.phase, high - self.phase
            low = high

    def segments(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Cuts a range into (first index, members, indices of each): whole members, or a part."""
        low, high = low + self.phase, high + self.phase
        while low < high:
            inside = low % self.member
            members = (high - low) // self.member
            if inside or not members:
                count = min(self.member - inside, high - low)
                yield low - self.phase, 1, count
                low += count
            else:
                yield low - self.phase, members, self.member
                low += members * self.member


def axes_of(
    layout: TileLayout, extents: Sequence[int], strides: Sequence[int], phases: Sequence[int]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return a region's axes, outermost in the file first, and those that repeat elements."""
    axes = []
    members = layout.member_shape, layout.within, layout.across
    dimensions = zip(extents, strides, phases, *members, strict=True)
    for extent, stride, phase, member, within, across in dimensions:
        if extent > 1:
            if phase + extent <= member or across == member * within:
                member, phase, across = extent, 0, 0  # the bounds of members do not matter
            sign = -1 if stride < 0 else 1
            axes.append(Axis(extent, abs(stride), member, phase, sign * within, sign * across))
    repeats = tuple(axis for axis in axes if not axis.source)
    moving = sorted((axis for axis in axes if axis.source), key=lambda a: -a.source)
    return tuple(_merged(moving)), repeats


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """Joins axes that are contiguous both in the file and in memory."""
    merged: list[Axis] = []
    for inner in axes:
        outer = merged[-1] if merged else None
        if (
            outer is not None
            and not inner.crosses
            and outer.source == inner.extent * inner.source
            and outer.within == inner.extent * inner.within
        ):
            count = inner.extent
            sizes = outer.member * count, outer.phase * count
            merged[-1] = Axis(
                outer.extent * count, inner.source, *sizes, inner.within, outer.across
            )
        else:
            merged.append(inner)
    return merged


def memory_runs(axes: Sequence[Axis], itemsize: int) -> StridedRuns | None:
    """Return the region's bytes in memory, in file order; None where they are not regular runs."""
    levels: list[tuple[int, int]] = []
    for axis in reversed(axes):
        if axis.crosses and (axis.phase or axis.extent % axis.member):
            return None
        levels += [(axis.member, axis.within), (axis.extent // axis.member, axis.across)]
    return StridedRuns.nested(0, itemsize, [level for level in levels if level[0] > 1])
