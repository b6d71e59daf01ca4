"""Sub-byte elements: the whole bytes of a region of a tensor whose elements share bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .box import Box


class PackedBox(NamedTuple):
    """The whole bytes of a region of packed elements."""

    shape: tuple[int, ...]  # the tensor as an array of bytes
    box: Box  # the region of that array to read
    skip: int  # elements of it before the slab
    slab: tuple[int, ...]  # shape of the elements that are used
    cut: Box  # the region within the slab


def packed_box(shape: tuple[int, ...], bits: int, box: Box) -> PackedBox:
    """Return the bytes to read for `box` of a tensor of `bits`-wide elements without padding.

    Where rows end on byte boundaries, the innermost bounds widen to whole bytes; elsewhere all
    bytes of the box's indices of the leading dimension are read.
    """
    group = 8 // math.gcd(8, bits)  # elements that fill whole bytes: 2 of 4 bits, 4 of 6 bits
    if shape[-1] % group == 0:
        last = len(shape) - 1
        low, high = box.start[-1] // group, -(-box.stop[-1] // group)
        group_bytes = group * bits // 8
        stored = (*shape[:-1], shape[-1] // group * group_bytes)
        first = box.start[-1] - low * group
        cut = Box.whole(box.shape).along(last, first, first + box.shape[-1])
        slab = (*box.shape[:-1], (high - low) * group)
        return PackedBox(
            stored, box.along(last, low * group_bytes, high * group_bytes), 0, slab, cut
        )
    size, per_row = math.prod(shape), math.prod(shape[1:])
    first, stop = box.start[0] * per_row, box.stop[0] * per_row
    low, high = first // group * group, min(-(-stop // group) * group, size)
    rows = box.shape[0]
    read = Box((low * bits // 8,), (high * bits // 8,))
    return PackedBox(
        (size * bits // 8,), read, first - low, (rows, *shape[1:]), box.along(0, 0, rows)
    )


def unpack_box(data: npt.NDArray[np.uint8], bits: int, packed: PackedBox) -> npt.NDArray[np.uint8]:
    """Return the elements of the region, one a byte, from the bytes of `packed.box`."""
    count = math.prod(packed.slab)
    elements = unpack_bits(data.reshape(-1), bits)[packed.skip : packed.skip + count]
    return np.ascontiguousarray(elements.reshape(packed.slab)[packed.cut.slices])


def unpack_bits(data: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return the elements of `bits` each, least significant bits first, one element a byte.

    Four-bit elements come low nibble first, as in torch's `float4_e2m1fn_x2`; six-bit ones are a
    little-endian bit stream of four elements in three bytes.
    """
    if bits == 4:
        out = np.empty((data.size, 2), np.uint8)
        np.bitwise_and(data, 0x0F, out=out[:, 0])
        np.right_shift(data, 4, out=out[:, 1])
    else:
        triple = data.reshape(-1, 3).astype(np.uint32)
        word = triple[:, 0] | triple[:, 1] << 8 | triple[:, 2] << 16
        out = np.stack([(word >> shift & 0x3F).astype(np.uint8) for shift in (0, 6, 12, 18)], -1)
    return out.reshape(-1)


def pack_bits(elements: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return the inverse of `unpack_bits`: elements that fill whole bytes, one a byte, packed."""
    flat = elements.reshape(-1)
    if bits == 4:
        low: npt.NDArray[np.uint8] = np.bitwise_and(flat[0::2], 0x0F)
        return np.bitwise_or(low, np.left_shift(flat[1::2], 4), out=low)
    word = np.zeros(flat.size // 4, np.uint32)
    for number in range(4):
        word |= (flat[number::4].astype(np.uint32) & 0x3F) << (6 * number)
    parts = [(word >> shift & 0xFF).astype(np.uint8) for shift in (0, 8, 16)]
    return np.stack(parts, -1).reshape(-1)
