"""Axes: the dimensions of a region in the order of the file, each with its strides in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.geometry import StridedRuns

from .tiles import TileLayout


class Axis(NamedTuple):
    """One dimension of a region.

    Index `i` of it is index `phase + i` of the consecutive members that it runs through. One that
    stays inside a member, or whose members are contiguous, has a member of its own extent.
    """

    extent: int
    source: int  # byte stride in the file; 0 where elements are repeated
    member: int  # number of indices of one member
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
        """Cuts the axis into half-open ranges of at most `length` indices.

        Ranges shorter than a member stay inside one, longer ones end at the end of a member; with
        `length=whole` there is one.
        """
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
            cells = (high - low) // self.member
            if inside or not cells:
                count = min(self.member - inside, high - low)
                yield low - self.phase, 1, count
                low += count
            else:
                yield low - self.phase, cells, self.member
                low += cells * self.member


def axes_of(
    layout: TileLayout, extents: Sequence[int], strides: Sequence[int], phases: Sequence[int]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return the axes of a region, outermost in the file first, and those that repeat elements.

    A dimension of negative stride (in bytes of the file) is reversed. `phases` are the first index
    of each dimension within its member, counted from the member's end where it is reversed.
    """
    axes = []
    members = layout.member_shape, layout.within, layout.across
    sides = zip(extents, strides, phases, *members, strict=True)
    for extent, stride, phase, member, within, across in sides:
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
    """Return the region's bytes in memory, in the order of the file, from its first byte.

    None where they are not regular runs: where the region begins or ends within a member.
    """
    run = itemsize
    levels: list[tuple[int, int]] = []
    for axis in reversed(axes):
        if axis.crosses and (axis.phase or axis.extent % axis.member):
            return None
        cells = axis.extent // axis.member
        for count, stride in ((axis.member, axis.within), (cells, axis.across)):
            if count == 1:
                continue
            if not levels and stride == run:
                run *= count
            elif levels and stride == levels[0][0] * levels[0][1]:
                levels[0] = (levels[0][0] * count, levels[0][1])
            else:
                levels.insert(0, (count, stride))
    return StridedRuns(0, run, tuple(levels))
