"""Decodes quantised tensors on the shard that a process holds.

A shard needs its own part of the stored values, and the scales of the blocks that it touches. All
compute in float32 and round once, to the dtype of the result. None inverts: a mapping for saving
keeps quantised tensors as they are, with a `tensor` for the values and one for the scales.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.options import is_floating

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Decoded, reshaped
from ..argument_checks import integer, integers
from .expression import Expr, as_expr
from .opaque_ops import Compute
from .values import as_dtype

_MXFP4_GROUP = 32  # elements that share a scale (OCP Microscaling Formats 1.0, section 5)
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_POSITIVE, -_POSITIVE])  # the high bit is the sign
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
CHUNK_ELEMENTS = 1 << 17  # bounds the float32 values that are held besides the result


@dataclasses.dataclass(frozen=True, slots=True)
class _Scaled(abc.ABC):
    """A `Kernel` and `Decoder`: stored values times the scale of their block."""

    block: tuple[int, ...]  # extents, of the last axes
    dtype: np.dtype[Any]  # the result's
    shape: tuple[int, ...] = ()  # the result's, known when bound

    packed: ClassVar[int] = 1  # values in a stored element, along the last axis
    pairs: ClassVar[np.ndarray | None] = None  # see `_pairs`; None where values are stored as such
    call: ClassVar[str]  # as a user writes it

    def describe(self, operands: Sequence[str]) -> str:
        return self.call.format(", ".join(operands), block=self.block, dtype=self.dtype.name)

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr:
        stored, scale = operands
        shape = self.decoded_shape(stored, scale)
        decoder = dataclasses.replace(self, shape=shape)
        stored_box, _ = decoder.needs(Box.whole(shape))
        return Decoded(shape, self.dtype, (reshaped(stored, stored_box.shape), scale), decoder)

    @abc.abstractmethod
    def decoded_shape(self, stored: BoundExpr, scale: BoundExpr) -> tuple[int, ...]:
        """Check shapes and dtypes of the operands, and return the result's shape."""

    @property
    def free(self) -> int:
        return len(self.shape) - len(self.block)

    def widen(self, box: Box) -> Box:
        axis, n = len(self.shape) - 1, self.packed
        stop = -(-box.stop[-1] // n) * n
        return box.along(axis, box.start[-1] // n * n, min(stop, self.shape[-1]))

    def needs(self, box: Box) -> tuple[Box, ...]:
        stored = (*[1] * (len(self.shape) - 1), self.packed)
        return blocks_of(box, stored), blocks_of(box, self._sizes)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (1,) * self.free + self.block

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        stored, scale = inputs
        if scale.dtype == np.uint8:
            scale = scale.view(E8M0)
        blocks = [
            np.arange(start, stop) // n - start // n
            for start, stop, n in zip(*box, self._sizes, strict=True)
        ]
        out = np.empty(box.shape, self.dtype)
        rows = count = len(out)
        if out.ndim > 1:
            rows = max(1, CHUNK_ELEMENTS * count // out.size)
        with np.errstate(all="ignore"):
            for start in range(0, count, rows):
                part = slice(start, start + rows)
                scales = scale[blocks[0][part]].astype(np.float32)
                for axis, index in enumerate(blocks[1:], 1):
                    scales = scales.take(index, axis)
                if self.pairs is None:
                    values = stored[part].astype(np.float32)
                else:
                    data = np.ascontiguousarray(stored[part]).view(np.uint8)
                    values = self.pairs[data].view(np.float32)[..., : box.shape[-1]]
                out[part] = (values * scales).astype(self.dtype)
        return out


def _pairs(values: np.ndarray) -> np.ndarray:
    """Return for each byte the two float32 of its halves, the low one first, as one element."""
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], -1).view(np.uint64)[:, 0]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockScale(_Scaled):
    """Values as they are; with `integers` they may be int8."""

    integers: bool = True
    call = "dequantize_block({}, block={block}, dtype={dtype!r})"

    def decoded_shape(self, stored: BoundExpr, scale: BoundExpr) -> tuple[int, ...]:
        is_int8 = self.integers and stored.dtype == np.int8
        is_small = is_floating(stored.dtype) and stored.dtype.itemsize == 1
        kinds = "floats of 8 bits or fewer" + (", or int8" if self.integers else "")
        _check(stored, "the values", kinds, is_int8 or is_small)
        _check(scale, "the scale", "floats", is_floating(scale.dtype))
        free = len(stored.shape) - len(self.block)
        if free < 0:
            raise MappingError(f"the weight has fewer axes than the block {self.block}")
        blocks = blocks_of(Box.whole(stored.shape), (1,) * free + self.block)
        if scale.shape != blocks.shape:
            raise MappingError(
                f"the scale has shape {list(scale.shape)}; blocks of {self.block} need"
                f" {list(blocks.shape)}"
            )
        return stored.shape


class Mxfp4(_Scaled):
    """Four-bit floats, two a byte; scales are exponents."""

    __slots__ = ()
    packed = 2
    pairs = _pairs(E2M1)
    call = "dequantize_mxfp4({}, dtype={dtype!r})"

    def decoded_shape(self, stored: BoundExpr, scale: BoundExpr) -> tuple[int, ...]:
        (group,) = self.block
        shape = (*scale.shape, group // self.packed)
        if stored.shape != shape or not scale.shape:
            raise MappingError(
                f"the blocks have shape {list(stored.shape)}; with scales of shape"
                f" {list(scale.shape)} they need {list(shape)}"
            )
        is_exponent = scale.dtype in (np.dtype(np.uint8), E8M0)
        _check(stored, "the blocks", "uint8", stored.dtype == np.uint8)
        _check(scale, "the scales", "uint8 or float8_e8m0fnu", is_exponent)
        return (*scale.shape[:-1], scale.shape[-1] * group)


class Int4(_Scaled):
    """Four-bit integers, plus 8, eight in each of 32 bits."""

    __slots__ = ()
    packed = 8
    pairs = _pairs(np.arange(-8, 8, dtype=np.float32))
    call = "dequantize_int4({}, group={block[0]}, dtype={dtype!r})"

    def decoded_shape(self, stored: BoundExpr, scale: BoundExpr) -> tuple[int, ...]:
        (group,) = self.block
        *rows, groups = scale.shape or (0,)
        words = [*rows, -(-groups * group // self.packed)]
        if not scale.shape or list(stored.shape) != words:
            raise MappingError(
                f"the packed values have shape {list(stored.shape)}; with scales of shape"
                f" {list(scale.shape)} of {group} each they need {words}"
            )
        is_word = stored.dtype in (np.dtype(np.int32), np.dtype(np.uint32))
        _check(stored, "the packed values", "int32, eight in each", is_word)
        _check(scale, "the scale", "floats", is_floating(scale.dtype))
        return (*rows, groups * group)


def dequantize_block(
    weight: Expr, scale: Expr, block: Sequence[int] = (128, 128), dtype: Any = "bfloat16"
) -> Expr:
    """Values times the scale of their block: FP8 checkpoints such as DeepSeek-V3's.

    Args:
        weight: The stored values, `[..., rows, columns]`: floats of 8 bits or fewer, or int8.
        scale: One scale for each block, `[..., ceil(rows / 128), ceil(columns / 128)]`: the
            `weight_scale_inv` of those checkpoints, by which values are multiplied.
        block: Extents of a block, of the last axes. Blocks at the edges may be smaller.
        dtype: The result's dtype.

    Examples:
        >>> from orbax_safetensors_layout.mapping import tensor
        >>> dequantize_block(tensor("up.weight"), tensor("up.weight_scale_inv")).transpose()
        dequantize_block(tensor('up.weight'), tensor('up.weight_scale_inv'), block=(128, 128),
            dtype='bfloat16').transpose()
    """
    sizes = integers(block, "dequantize_block(block=...)")
    if not sizes or min(sizes) < 1:
        raise MappingError(f"dequantize_block: block must be positive integers, not {block}")
    return _decoded("dequantize_block", (weight, scale), BlockScale(sizes, as_dtype(dtype)))


def dequantize_fp8(weight: Expr, scale: Expr, block: tuple[int, int], dtype: str) -> Expr:
    """`dequantize_block` for floats alone: integers are other values than those of FP8's bytes."""
    return _decoded(
        "dequantize_block", (weight, scale), BlockScale(block, as_dtype(dtype), integers=False)
    )


def dequantize_mxfp4(blocks: Expr, scales: Expr, dtype: Any = "bfloat16") -> Expr:
    """MXFP4 as GPT-OSS stores it: groups of 32 four-bit floats that share a power of two.

    Args:
        blocks: `[..., groups, 16]` bytes of two values each, the low half first.
        scales: `[..., groups]` exponents, plus 127.
        dtype: The result's dtype. The result is `[..., groups * 32]`.
    """
    return _decoded("dequantize_mxfp4", (blocks, scales), Mxfp4((_MXFP4_GROUP,), as_dtype(dtype)))


def dequantize_int4(packed: Expr, scale: Expr, group: int = 32, dtype: Any = "bfloat16") -> Expr:
    """Symmetric four-bit integers as `compressed-tensors` packs them (`pack-quantized`).

    Args:
        packed: `[..., ceil(columns / 8)]` int32 of eight values each, the lowest bits first, each
            value plus 8: `weight_packed`.
        scale: `[..., columns / group]`: `weight_scale`.
        group: Values of a row that share a scale.
        dtype: The result's dtype.
    """
    group = integer(group, "dequantize_int4(group=...)")
    if group < 1:
        raise MappingError(f"dequantize_int4: group must be a positive integer, not {group}")
    return _decoded("dequantize_int4", (packed, scale), Int4((group,), as_dtype(dtype)))


def _decoded(name: str, operands: tuple[Expr, ...], kernel: _Scaled) -> Expr:
    if not is_floating(kernel.dtype):
        raise MappingError(f"{name} gives floating-point numbers", found=kernel.dtype.name)
    return Compute(tuple(as_expr(operand, name) for operand in operands), kernel)


def _check(operand: BoundExpr, subject: str, expected: str, fits: bool) -> None:
    if not fits:
        raise MappingError(f"{subject} must be {expected}, not {operand.dtype.name}")


def blocks_of(box: Box, sizes: Sequence[int]) -> Box:
    """Return the region of blocks that a region of values lies in."""
    start = [a // n for a, n in zip(box.start, sizes, strict=True)]
    stop = [-(-b // n) for b, n in zip(box.stop, sizes, strict=True)]
    return Box(tuple(start), tuple(stop))
