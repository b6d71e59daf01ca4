"""Cuts a region that is copied into its place into blocks of bounded size.

A block is read into a staging buffer, in the order of the file, and copied from there. Its shape is
a compromise of long requests on one side of the copy, and whole cache lines on the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from orbax_safetensors_layout.geometry import row_major_strides
from orbax_safetensors_layout.options import StorageProfile

from .axes import Axis

_LINE_BYTES = 128
"""A transposing copy should write this many neighbouring bytes at least: two cache lines."""

_LEAST_REQUEST_BYTES = 4096
"""Blocks of a transposed region are not cut into shorter requests than this."""

_CONFLICT_BYTES = 512
"""Elements at multiples of this distance fall into few sets of a cache. A transposing copy that
gathers from rows of 8,192 bytes runs eight times faster where each row is followed by a gap of
one cache line (0.26 in place of 2.0 ns per two-byte element, EPYC, numpy 2)."""

_PAD_BYTES = 64


class Blocking(NamedTuple):
    """The shape of a region's blocks, and the layout of one in the staging buffer."""

    lengths: tuple[int, ...]  # indices of each axis in one block, at most
    # The axes from this one on share a request; a block has one for each index of those before.
    request: int
    # The axes from this one on are a row of the staging buffer: contiguous bytes of the file. Not
    # before `request`.
    row: int
    pad_bytes: int  # unused bytes after each row

    @classmethod
    def plan(
        cls, axes: Sequence[Axis], itemsize: int, request_bytes: int, profile: StorageProfile
    ) -> Blocking:
        """Return the blocking of a region whose requests, without blocks, have `request_bytes`."""
        if not axes:
            return cls((), 0, 0, 0)
        shape = _Shape(axes, itemsize, request_bytes)
        inner = min(range(len(axes)), key=lambda d: (abs(axes[d].within), -d))
        lengths, cut = shape.lengths(profile.staging_bytes)
        in_line = min(axes[inner].member, -(-_LINE_BYTES // itemsize))
        if inner < len(axes) - 1 and lengths[inner] < in_line:
            least = max(profile.max_gap_bytes, _LEAST_REQUEST_BYTES)
            rows = min(in_line, profile.staging_bytes // least)
            if rows > lengths[inner]:
                lengths, cut = shape.lengths(profile.staging_bytes // rows, inner + 1)
                lengths = (*lengths[:inner], rows, *lengths[inner + 1 :])
        request = max(cut, shape.outer)
        row, pad = _padding(axes, lengths, itemsize, inner, request)
        return cls(lengths, request, row, pad)

    def requests(self, axes: Sequence[Axis]) -> int:
        """Return the number of ranged reads of all blocks."""
        return math.prod(axis.extent for axis in axes[: self.request]) * self._blocks(axes)

    def read_bytes(self, axes: Sequence[Axis], itemsize: int) -> int:
        """Return the bytes of those reads: gaps between blocks are left out."""
        blocks = self._blocks(axes)
        nbytes = blocks * itemsize
        for axis, length in zip(axes[self.request :], self.lengths[self.request :], strict=True):
            ranges = _count(axis, length)
            # A range of n indices has n - 1 strides, and is in some of the blocks.
            nbytes += axis.source * (axis.extent - ranges) * (blocks // ranges)
        return math.prod(axis.extent for axis in axes[: self.request]) * nbytes

    def _blocks(self, axes: Sequence[Axis]) -> int:
        """Return the number of blocks of the axes that share a request."""
        tail = zip(axes[self.request :], self.lengths[self.request :], strict=True)
        return math.prod(_count(axis, length) for axis, length in tail)


def _count(axis: Axis, length: int) -> int:
    return sum(1 for _ in axis.ranges(length))


class _Shape(NamedTuple):
    """Sizes of blocks; `request_bytes` is the length of a request that is not cut."""

    axes: Sequence[Axis]
    itemsize: int
    request_bytes: int

    @property
    def outer(self) -> int:
        """Leading axes whose indices are requests of their own."""
        reach, axis = self.itemsize, len(self.axes)
        while axis and reach < self.request_bytes:
            axis -= 1
            reach += (self.axes[axis].extent - 1) * self.axes[axis].source
        return axis

    def staged_bytes(self, first: int) -> int:
        """Bytes of a staging buffer for all indices of the axes from `first` on."""
        outer = self.outer
        if first < outer:
            return math.prod(axis.extent for axis in self.axes[first:outer]) * self.request_bytes
        return sum((a.extent - 1) * a.source for a in self.axes[first:]) + self.itemsize

    def lengths(self, most_bytes: int, first: int = 0) -> tuple[tuple[int, ...], int]:
        """Return the longest blocks of `most_bytes`, and the axis that is cut: `first` or later.

        A block has one index of the axes before it, some of that axis (at least one, whatever its
        bytes), all of those after.
        """
        cut = first
        while cut < len(self.axes) - 1 and self.staged_bytes(cut + 1) > most_bytes:
            cut += 1
        axis, tail = self.axes[cut], self.staged_bytes(cut + 1)
        stride = axis.source if cut >= self.outer else tail
        length = _even(axis, 1 + max(0, most_bytes - tail) // stride)
        return (*[1] * cut, length, *[axis.whole for axis in self.axes[cut + 1 :]]), cut


def _even(axis: Axis, most: int) -> int:
    """Return a length up to `most` that cuts an axis evenly: whole members, or parts of one."""
    if most >= axis.extent:
        return axis.whole
    if most < axis.member:
        return -(-axis.member // -(-axis.member // most))
    cells = axis.whole // axis.member
    return -(-cells // -(-cells // (most // axis.member))) * axis.member


def _padding(
    axes: Sequence[Axis], lengths: Sequence[int], itemsize: int, inner: int, request: int
) -> tuple[int, int]:
    """Return `Blocking.row` and `pad_bytes`; a block that is transposed is padded.

    The copy gathers along axis `inner`, of the smallest stride in memory.
    """
    if inner < request:  # a row is a request
        tail = zip(axes[request:], lengths[request:], strict=True)
        row_bytes = sum((n - 1) * axis.source for axis, n in tail) + itemsize
        distance = row_bytes * row_major_strides(lengths[inner:request])[0]
        return request, 0 if distance % _CONFLICT_BYTES else _PAD_BYTES
    distance = axes[inner].source
    nested = all(
        axes[d].source == axes[d + 1].extent * axes[d + 1].source for d in range(request, inner)
    )
    if inner == len(axes) - 1 or not nested or distance % _CONFLICT_BYTES:
        return request, 0
    return inner + 1, _PAD_BYTES
