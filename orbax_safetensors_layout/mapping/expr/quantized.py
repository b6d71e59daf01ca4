"""Decodes quantised tensors on the shard that a process holds.

A shard needs its own part of the stored values, and the scales of the blocks that it touches. All
compute in float32 and round once, to the dtype of the result. None inverts: a mapping for saving
keeps quantised tensors as they are, with a `tensor` for the values and one for the scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box, unpack_bits

from ..affine.bound import BoundExpr
from ..affine.decoded import Computed
from ..argument_checks import integer, integers
from ..casting import is_number, is_whole
from .expression import Expr, as_expr
from .opaque_ops import Compute
from .values import as_dtype

MXFP4_GROUP = 32
"""Elements that share a scale, two a byte (OCP Microscaling Formats 1.0, section 5)."""

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_E2M1, -_E2M1])  # the high bit is the sign
_CHUNK_ELEMENTS = 1 << 17  # bounds the float32 values that are held besides the result


@dataclasses.dataclass(frozen=True, slots=True)
class BlockScale:
    """A value times the scale of its block."""

    block: tuple[int, ...]
    dtype: np.dtype[Any]
    integers: bool = True  # whether values may be int8
    free: int = 0  # as in `Decoder`; known when bound

    def describe(self, operands: Sequence[str]) -> str:
        listed = ", ".join(operands)
        return f"dequantize_block({listed}, block={self.block}, dtype={self.dtype.name!r})"

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr:
        weight, scale = operands
        is_int8 = self.integers and weight.dtype == np.int8
        kinds = "floats of 8 bits or fewer" + (", or int8" if self.integers else "")
        _check(weight, "the values", kinds, is_int8 or _is_small_float(weight.dtype))
        _check_scale(scale)
        free = len(weight.shape) - len(self.block)
        if free < 0:
            raise MappingError(f"the weight has fewer axes than the block {self.block}")
        decoder = dataclasses.replace(self, free=free)
        _, blocks = decoder.needs(Box.whole(weight.shape))
        if scale.shape != blocks.shape:
            raise MappingError(
                f"the scale has shape {list(scale.shape)}; blocks of {self.block} need"
                f" {list(blocks.shape)}"
            )
        return Computed(weight.shape, self.dtype, operands, decoder)

    def widen(self, region: Box) -> Box:
        return region

    def needs(self, region: Box) -> tuple[Box, ...]:
        start = [a // n for a, n in zip(region.start, self._sizes, strict=True)]
        stop = [-(-b // n) for b, n in zip(region.stop, self._sizes, strict=True)]
        return region, Box(tuple(start), tuple(stop))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (1,) * self.free + self.block

    def decode(self, region: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        weight, scale = inputs
        indices = [
            np.arange(a % size, a % size + n) // size
            for a, n, size in zip(region.start, weight.shape, self._sizes, strict=True)
        ]

        def rows(part: slice) -> np.ndarray:
            scales = scale[np.ix_(indices[0][part], *indices[1:])].astype(np.float32)
            values: np.ndarray = weight[part].astype(np.float32) * scales
            return values

        return _by_rows(weight.shape, self.dtype, rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Mxfp4:
    """Four-bit floats times a power of two for each 32."""

    dtype: np.dtype[Any]
    free: int = 0

    def describe(self, operands: Sequence[str]) -> str:
        return f"dequantize_mxfp4({', '.join(operands)}, dtype={self.dtype.name!r})"

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr:
        blocks, scales = operands
        if blocks.shape != (*scales.shape, MXFP4_GROUP // 2) or not scales.shape:
            raise MappingError(
                f"the blocks have shape {list(blocks.shape)}; with scales of shape"
                f" {list(scales.shape)} they need {[*scales.shape, MXFP4_GROUP // 2]}"
            )
        _check(blocks, "the blocks", "uint8", blocks.dtype == np.uint8)
        exponents = (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu))
        _check(scales, "the scales", "uint8 or float8_e8m0fnu", scales.dtype in exponents)
        shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4_GROUP)
        return Computed(shape, self.dtype, operands, dataclasses.replace(self, free=len(shape) - 1))

    def widen(self, region: Box) -> Box:
        return _scale_last(_divide_last(region, MXFP4_GROUP), MXFP4_GROUP)

    def needs(self, region: Box) -> tuple[Box, ...]:
        scales = _divide_last(region, MXFP4_GROUP)
        return Box((*scales.start, 0), (*scales.stop, MXFP4_GROUP // 2)), scales

    def decode(self, region: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        blocks, scales = (values.view(np.uint8) for values in map(np.ascontiguousarray, inputs))

        def rows(part: slice) -> np.ndarray:
            groups = scales[part].shape
            values = _FP4_VALUES[unpack_bits(blocks[part].reshape(-1), 4)]
            exponents = scales[part].astype(np.int32) - 127
            scaled = np.ldexp(values.reshape(*groups, MXFP4_GROUP), exponents[..., None])
            scaled[scales[part] == 255] = np.nan  # the only NaN of E8M0
            result: np.ndarray = scaled.reshape(*groups[:-1], groups[-1] * MXFP4_GROUP)
            return result

        return _by_rows(region.shape, self.dtype, rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Int4:
    """Four-bit integers times the scale of their group."""

    group: int
    dtype: np.dtype[Any]
    free: int = 0
    extent: int = 0  # of the last axis

    def describe(self, operands: Sequence[str]) -> str:
        listed = ", ".join(operands)
        return f"dequantize_int4({listed}, group={self.group}, dtype={self.dtype.name!r})"

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr:
        packed, scale = operands
        n = scale.shape[-1] * self.group if scale.shape else 0
        if not scale.shape or packed.shape != (*scale.shape[:-1], -(-n // 8)):
            raise MappingError(
                f"the packed values have shape {list(packed.shape)}; with scales of shape"
                f" {list(scale.shape)} of {self.group} each they need"
                f" {[*scale.shape[:-1], -(-n // 8)]}"
            )
        is_word = packed.dtype in (np.dtype(np.int32), np.dtype(np.uint32))
        _check(packed, "the packed values", "int32, eight in each", is_word)
        _check_scale(scale)
        decoder = dataclasses.replace(self, free=len(scale.shape) - 1, extent=n)
        return Computed((*scale.shape[:-1], n), self.dtype, operands, decoder)

    def widen(self, region: Box) -> Box:
        wide = _scale_last(_divide_last(region, 8), 8)
        return Box(wide.start, (*wide.stop[:-1], min(wide.stop[-1], self.extent)))

    def needs(self, region: Box) -> tuple[Box, ...]:
        return _divide_last(region, 8), _divide_last(region, self.group)

    def decode(self, region: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        packed, scale = inputs
        first, n = region.start[-1] % self.group, region.shape[-1]
        index = np.arange(first, first + n) // self.group

        def rows(part: slice) -> np.ndarray:
            words = np.ascontiguousarray(packed[part])
            nibbles = unpack_bits(words.reshape(-1).view(np.uint8), 4)
            values = nibbles.reshape(*words.shape[:-1], words.shape[-1] * 8)[..., :n]
            scales: np.ndarray = scale[part].astype(np.float32)[..., index]
            result: np.ndarray = (values.astype(np.float32) - 8) * scales
            return result

        return _by_rows(region.shape, self.dtype, rows)


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

    Example:
        >>> from orbax_safetensors_layout.mapping import tensor
        >>> dequantize_block(tensor("up.weight"), tensor("up.weight_scale_inv")).transpose()
        dequantize_block(tensor('up.weight'), tensor('up.weight_scale_inv'), block=(128, 128),
            dtype='bfloat16').transpose()
    """
    sizes = integers(block, "dequantize_block(block=...)")
    if not sizes or min(sizes) < 1:
        raise MappingError(f"dequantize_block: {block} is not a block")
    return _decoded("dequantize_block", (weight, scale), BlockScale(sizes, as_dtype(dtype)))


def dequantize_fp8(weight: Expr, scale: Expr, block: tuple[int, int], dtype: str) -> Expr:
    """`dequantize_block` for floats alone: integers are other values than FP8's bytes stand for."""
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
    return _decoded("dequantize_mxfp4", (blocks, scales), Mxfp4(as_dtype(dtype)))


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
        raise MappingError(f"dequantize_int4: {group} is not a group size")
    return _decoded("dequantize_int4", (packed, scale), Int4(group, as_dtype(dtype)))


def _decoded(name: str, operands: tuple[Expr, ...], kernel: BlockScale | Mxfp4 | Int4) -> Expr:
    dtype = kernel.dtype
    if is_whole(dtype) or dtype.kind == "c":
        raise MappingError(f"{name} gives floating-point numbers", found=dtype.name)
    return Compute(tuple(as_expr(operand, name) for operand in operands), kernel)


def _check(operand: BoundExpr, subject: str, expected: str, fits: bool) -> None:
    """Refuses the dtype of an operand."""
    if not fits:
        raise MappingError(f"{subject} must be {expected}, not {operand.dtype.name}")


def _check_scale(scale: BoundExpr) -> None:
    _check(scale, "the scale", "floats", _is_float(scale.dtype))


def _is_float(dtype: np.dtype[Any]) -> bool:
    return is_number(dtype) and not is_whole(dtype) and dtype.kind != "c"


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    return _is_float(dtype) and dtype.itemsize == 1


def _by_rows(
    shape: tuple[int, ...], dtype: np.dtype[Any], rows: Callable[[slice], np.ndarray]
) -> np.ndarray:
    out = np.empty(shape, dtype)
    step = max(1, _CHUNK_ELEMENTS * shape[0] // out.size) if out.size else 1
    with np.errstate(all="ignore"):
        for start in range(0, shape[0], step):
            part = slice(start, min(start + step, shape[0]))
            out[part] = rows(part).astype(dtype)
    return out


def _divide_last(region: Box, size: int) -> Box:
    """Return the blocks of `size` along the last axis that a region touches."""
    low, high = region.start[-1] // size, -(-region.stop[-1] // size)
    return Box((*region.start[:-1], low), (*region.stop[:-1], high))


def _scale_last(region: Box, size: int) -> Box:
    low, high = region.start[-1] * size, region.stop[-1] * size
    return Box((*region.start[:-1], low), (*region.stop[:-1], high))
