"""Decoders that formats are composed of: bits taken out of words, and groups that share a scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.geometry import Box

from ..affine.bound import BoundExpr
from ..affine.index_nodes import Decoded
from ..expr.expression import Expr
from ..expr.opaque_ops import Compute
from ..expr.quantized import CHUNK_ELEMENTS, E2M1, E8M0, blocks_of
from ..expr.values import as_dtype

_IN_ORDER = (-1, 0)  # all indices of a model whose order was never set: as writers leave them
_UINT8 = np.dtype(np.uint8)
_WORDS = (_UINT8, np.dtype(np.int32), np.dtype(np.uint32))


@dataclasses.dataclass(frozen=True, slots=True)
class Unpack:
    """A `Kernel` and `Decoder`: integers without sign, packed densely along an axis.

    `added` is added to each value in the words, as GPTQModel does: what overflows a value goes to
    the next one of the word. Values that words do not hold whole are modulo `2**bits` instead.
    """

    bits: int
    axis: int
    extent: int | None  # of the result's axis; None where words hold as many as fit
    order: tuple[int, ...]  # of the values in a word, that at the lowest bits 0; () as stored
    of_bytes: bool = False  # words have any dtype, and the order is that of the values in a byte
    added: int = 0
    shape: tuple[int, ...] = ()  # the result's, known when bound
    word_bits: int = 32  # of the stored dtype, known when bound

    def describe(self, operands: Sequence[str]) -> str:
        more = f", order={self.order}" if self.order else ""
        more += f", added={self.added}" if self.added else ""
        return f"unpacked({operands[0]}, {self.bits}, {self.axis}, {self.extent}{more})"

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr:
        (packed,) = operands
        if not (packed.dtype in _WORDS or self.of_bytes) or len(packed.shape) <= self.axis:
            raise MappingError(f"packed values must be int32 or uint8, not {packed.dtype.name}")
        word_bits, words = packed.dtype.itemsize * 8, packed.shape[self.axis]
        extent = words * word_bits // self.bits if self.extent is None else self.extent
        if words != -(-extent * self.bits // word_bits):
            raise MappingError(
                f"{words} words do not hold {extent} values of {self.bits} bits: "
                f"{-(-extent * self.bits // word_bits)} do"
            )
        shape = (*packed.shape[: self.axis], extent, *packed.shape[self.axis + 1 :])
        decoder = dataclasses.replace(self, shape=shape, word_bits=word_bits)
        return Decoded(shape, _UINT8, operands, decoder)

    free = 0

    @property
    def _unit(self) -> int:
        """Values after which bits begin a word again."""
        return self.word_bits // math.gcd(self.word_bits, self.bits)

    def widen(self, box: Box) -> Box:
        start, stop, unit = box.start[self.axis], box.stop[self.axis], self._unit
        stop = min(-(-stop // unit) * unit, self.shape[self.axis])
        return box.along(self.axis, start // unit * unit, stop)

    def needs(self, box: Box) -> tuple[Box, ...]:
        start, stop = box.start[self.axis] * self.bits, box.stop[self.axis] * self.bits
        return (box.along(self.axis, start // self.word_bits, -(-stop // self.word_bits)),)

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        words = np.ascontiguousarray(np.moveaxis(inputs[0], self.axis, -1))
        is_bytes = self.of_bytes or (not self.order and 8 % self.bits == 0)
        if self.added and self.word_bits % self.bits == 0:
            words = words.view(f"u{self.word_bits // 8}")
            ones = sum(1 << place for place in range(0, self.word_bits, self.bits))
            words = words + words.dtype.type(ones * self.added)
        word_bits = 8 if is_bytes else self.word_bits
        words = words.view(np.uint8 if word_bits == 8 else np.uint32)
        unit = word_bits // math.gcd(word_bits, self.bits)
        per_unit = unit * self.bits // word_bits
        lacking = -words.shape[-1] % per_unit
        if lacking:
            words = np.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, lacking)])
        words = words.reshape(*words.shape[:-1], -1, per_unit)
        out = np.empty((*words.shape[:-1], unit), np.uint8)
        mask = (1 << self.bits) - 1
        for k, place in enumerate(self.order or range(unit)):
            word, shift = divmod(place * self.bits, word_bits)
            values = words[..., word] >> shift
            if shift + self.bits > word_bits:
                values |= words[..., word + 1] << (word_bits - shift)
            if self.word_bits % self.bits:
                values += np.uint32(self.added)
            out[..., k] = values & mask
        count = box.shape[self.axis]
        flat = out.reshape(*out.shape[:-2], -1)[..., :count]
        return np.moveaxis(flat, -1, self.axis)


def unpacked(
    packed: Expr,
    bits: int,
    axis: int,
    extent: int | None,
    order: Sequence[int] = (),
    *,
    of_bytes: bool = False,
    added: int = 0,
) -> Expr:
    """Return uint8 values of an expression of words."""
    return Compute((packed,), Unpack(bits, axis, extent, tuple(order), of_bytes, added))


@dataclasses.dataclass(frozen=True, slots=True)
class GroupScale:
    """A `Kernel` and `Decoder`: (value - zero) times the scale of its group, in float32.

    `roles` are those of the operands after the values: `scale` and `zero` have a value for each
    group; `factor` and `divisor` are one number, by which scales are multiplied or divided first;
    `index` has the group of each index of the last axis, unless all are one of `_IN_ORDER`, which
    only the whole of it tells; `table` has what values of `table_bits` stand for.
    """

    block: tuple[int, ...]  # extents of a group, of all axes
    roles: tuple[str, ...]
    dtype: np.dtype[Any]
    offset: int = 0  # added to zeros
    is_e2m1: bool = False
    table_bits: int = 0
    shape: tuple[int, ...] = ()  # the result's, known when bound
    groups: int = 0  # along the last axis, known when bound

    def describe(self, operands: Sequence[str]) -> str:
        given = [f"{role}={text}" for role, text in zip(self.roles, operands[1:], strict=True)]
        listed = ", ".join([operands[0], *given])
        listed += f", offset={self.offset}" * bool(self.offset) + ", e2m1" * self.is_e2m1
        return f"grouped({listed}, block={self.block}, dtype={self.dtype.name!r})"

    def bind(self, operands: tuple[BoundExpr, ...]) -> BoundExpr:
        shape, given = operands[0].shape, dict(zip(self.roles, operands[1:], strict=True))
        scale = given["scale"].shape
        if len(shape) != len(self.block) or len(scale) != len(shape):
            raise MappingError(
                f"values of shape {list(shape)} and scales of shape {list(scale)} have no groups of"
                f" {self.block}"
            )
        if "table" in given and operands[0].dtype != _UINT8:
            raise MappingError(f"values of a table are uint8, not {operands[0].dtype.name}")
        decoder = dataclasses.replace(self, shape=shape, groups=scale[-1])
        groups = decoder._groups(Box.whole(shape)).shape
        needed = {"scale": groups, "zero": groups, "index": (shape[-1],)}
        needed |= {"factor": (1,), "divisor": (1,), "table": (1 << self.table_bits,)}
        for role, operand in given.items():
            if operand.shape != needed[role]:
                raise MappingError(
                    f"the {role} has shape {list(operand.shape)}; values of shape {list(shape)} in"
                    f" groups of {self.block} need {list(needed[role])}"
                )
        return Decoded(shape, self.dtype, operands, decoder)

    free = 0

    def widen(self, box: Box) -> Box:
        return box

    def _groups(self, box: Box) -> Box:
        if "index" in self.roles:
            return blocks_of(box, self.block).along(len(self.shape) - 1, 0, self.groups)
        return blocks_of(box, self.block)

    def needs(self, box: Box) -> tuple[Box, ...]:
        groups = self._groups(box)
        index = Box((0,), (self.shape[-1],))
        table = Box((0,), (1 << self.table_bits,))
        boxes = {"scale": groups, "zero": groups, "index": index, "table": table}
        number = Box((0,), (1,))
        return (box, *(boxes.get(role, number) for role in self.roles))

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        values, given = inputs[0], dict(zip(self.roles, inputs[1:], strict=True))
        scale = given["scale"]
        scale = (scale.view(E8M0) if scale.dtype == np.uint8 else scale).astype(np.float32)
        zero = given.get("zero")
        table = E2M1 if self.is_e2m1 else given.get("table")
        where = [
            np.arange(start, stop) // n - first
            for start, stop, n, first in zip(*box, self.block, self._groups(box).start, strict=True)
        ]
        if "index" in given and not any((given["index"] == n).all() for n in _IN_ORDER):
            where[-1] = given["index"][box.start[-1] : box.stop[-1]]
            self._check_index(where[-1], scale.shape[-1])
        out = np.empty(box.shape, self.dtype)
        rows = max(1, CHUNK_ELEMENTS * len(out) // max(1, out.size))
        with np.errstate(all="ignore"):
            if "factor" in given:
                scale = scale * given["factor"].astype(np.float32)
            if "divisor" in given:
                scale = scale / given["divisor"].astype(np.float32)
            for start in range(0, len(out), rows):
                part = slice(start, start + rows)
                index = [where[0][part], *where[1:]]
                if table is None:
                    held = values[part].astype(np.float32)
                else:
                    held = table.astype(np.float32, copy=False).take(values[part])
                if zero is not None:
                    held -= _of_groups(zero, index).astype(np.float32) + np.float32(self.offset)
                elif self.offset:
                    held -= np.float32(self.offset)
                held *= _of_groups(scale, index)
                out[part] = held.astype(self.dtype, copy=False)
        return out

    def _check_index(self, index: np.ndarray, groups: int) -> None:
        if index.size and not 0 <= index.min() <= index.max() < groups:
            raise MappingError(
                "the groups of a quantised weight (g_idx) are not there",
                expected=f"0 to {groups - 1}",
                found=f"{index.min()} to {index.max()}",
            )


def _of_groups(groups: np.ndarray, index: Sequence[np.ndarray]) -> np.ndarray:
    for axis, where in enumerate(index):
        groups = groups.take(where, axis)
    return groups


def grouped(
    values: Expr,
    block: Sequence[int],
    dtype: str,
    operands: Mapping[str, Expr | None],
    *,
    offset: int = 0,
    is_e2m1: bool = False,
    table_bits: int = 0,
) -> Expr:
    """Return values times the scale of their group; `operands` by role, see `GroupScale`."""
    given = {role: operand for role, operand in operands.items() if operand is not None}
    roles = tuple(given)
    kernel = GroupScale(tuple(block), roles, as_dtype(dtype), offset, is_e2m1, table_bits)
    return Compute((values, *given.values()), kernel)
