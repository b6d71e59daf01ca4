"""The tensors of a quantised weight as expressions over the plain one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from orbax_safetensors_layout.errors import MappingError, SafetensorsLayoutError
from orbax_safetensors_layout.geometry import Box

from ..affine.bound import BoundExpr, Constant
from ..affine.index_nodes import Decoded, concatenated, permuted, reshaped
from ..casting import rounded
from ..expr.quantized import CHUNK_ELEMENTS, blocks_of
from .group_formats import GroupFormat

_HINT = "Leave it out: Quantization(..., ignore=[...]); or mend the weight."
_SHORT = 64  # values in a row of a group; of more numpy finds the largest fast

Part = Literal["values", "scales", "factor"]


class StoredScales(Protocol):
    """The scales of a weight that was quantised before."""

    def scales(self) -> np.ndarray:
        """Return one for each group, of two axes."""

    def factor(self) -> np.float32:
        """Return the factor that these were stored with."""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightEncoder:
    """A `Decoder` of one of the tensors that a weight of two axes is stored as.

    Groups that `before` gives the values that they have keep their scales, and so their bits.
    """

    format: GroupFormat  # with all extents of a block
    part: Part
    shape: tuple[int, int]  # the weight's
    name: str  # the weight's
    before: StoredScales | None = None
    most_of: list[np.float32] = dataclasses.field(default_factory=list, compare=False)
    """The largest magnitude of the weight, once it is known; of all its parts."""

    free = 0

    @property
    def by_rows(self) -> bool:
        """Whether a few rows are computed from a few rows of the weight."""
        return not self.format.has_factor

    @property
    def _sizes(self) -> tuple[int, int]:
        """Rows and columns of the weight for each element."""
        return self.format.block if self.part == "scales" else (1, self.format.per_element)

    def widen(self, box: Box) -> Box:
        return box

    def needs(self, box: Box) -> tuple[Box, ...]:
        if self.format.has_factor:
            return (Box.whole(self.shape),)
        return (self._region(box),)

    def _region(self, box: Box) -> Box:
        """Return the whole groups that a box of the part is computed from."""
        start, stop = [], []
        limits = zip(*box, self._sizes, self.format.block, self.shape, strict=True)
        for first, last, size, block, extent in limits:
            start.append(first * size // block * block)
            stop.append(min(-(-last * size // block) * block, extent))
        return Box(tuple(start), tuple(stop))

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        (weight,) = inputs
        form, before = self.format, self.before
        factor = np.float32(1)
        if form.has_factor:
            most = self._most(weight)
            factor = form.factor(most)
            if before is not None and form.fits(most, before.factor()):
                factor = before.factor()
            else:
                before = None
        if self.part == "factor":
            return np.array([factor])
        region = self._region(box)
        if form.has_factor:
            weight = weight[region.slices]
        known = None
        if before is not None:
            all_groups = blocks_of(Box.whole(self.shape), form.block)
            known = before.scales().reshape(all_groups.shape)[blocks_of(region, form.block).slices]
        part = blocks_of(region, self._sizes)
        result = np.empty(part.shape, form.scale_dtype if self.part == "scales" else form.dtype)
        (down, across), per_element = form.block, form.per_element
        for values, largest, top, left in self._chunks(weight):
            scales = form.scales(largest, factor)
            if not np.isfinite(form.units(scales, factor)).all():
                raise SafetensorsLayoutError(
                    f"the weight has values too large for scales in {form.scale_dtype.name}",
                    tensor=self.name,
                    found=f"{largest.max():g}",
                    hint=_HINT,
                )
            groups = _placed(scales, top // down, left // across)
            if known is not None:
                same = self._are_same(values, known[groups], factor, weight.dtype)
                scales = np.where(same, known[groups], scales)
            if self.part == "scales":
                result[groups] = scales
                continue
            codes = _codes(form, values, scales, factor)
            codes = codes.reshape(len(values) * down, -1)
            stored = form.stored(codes[: len(weight) - top, : weight.shape[1] - left])
            result[_placed(stored, top, left // per_element)] = stored
        return result[box.within(part).slices]

    def _most(self, weight: np.ndarray) -> np.float32:
        if not self.most_of:
            largest = (groups.largest.max() for groups in self._chunks(weight))
            self.most_of.append(max(largest, default=np.float32(0)))
        return self.most_of[0]

    def _are_same(
        self, values: np.ndarray, scales: np.ndarray, factor: np.float32, dtype: np.dtype[Any]
    ) -> np.ndarray:
        """Return which groups are stored exactly with given scales, to the bits of a dtype."""
        form = self.format
        units = form.units(scales, factor)[:, None, :, None]
        with np.errstate(all="ignore"):
            numbers = form.numbers(_codes(form, values, scales, factor)) * units
        again = rounded(numbers, dtype).astype(np.float32)
        same: np.ndarray = (again == values).all((1, 3))
        return same

    def _chunks(self, weight: np.ndarray) -> Iterator[_ValueGroups]:
        """Yields some groups at a time; those at the edges are filled up with zeros."""
        (down, across), (rows, columns) = self.format.block, weight.shape
        wide = max(1, CHUNK_ELEMENTS // (down * across)) * across
        high = max(1, CHUNK_ELEMENTS // (down * min(wide, max(1, columns)))) * down
        for top, left in itertools.product(range(0, rows, high), range(0, columns, wide)):
            values = weight[top : top + high, left : left + wide].astype(np.float32)
            missing = [(0, -n % size) for n, size in zip(values.shape, (down, across), strict=True)]
            if any(map(any, missing)):
                values = np.pad(values, missing)
            values = values.reshape(len(values) // down, down, -1, across)
            largest = _largest(values)
            if not np.isfinite(largest).all():
                raise SafetensorsLayoutError(
                    "the weight has values that are not finite, which its quantised form has not",
                    tensor=self.name,
                    found=f"{np.count_nonzero(~np.isfinite(values))} in some groups",
                    hint=_HINT,
                )
            yield _ValueGroups(values, largest, top, left)


def _placed(values: np.ndarray, row: int, column: int) -> tuple[slice, slice]:
    """Return where an array is in a larger one."""
    rows, columns = values.shape
    return slice(row, row + rows), slice(column, column + columns)


def _largest(values: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each group; by halves where groups are short."""
    magnitudes = np.abs(values).max(1) if values.shape[1] > 1 else np.abs(values)[:, 0]
    while magnitudes.shape[-1] < _SHORT and magnitudes.shape[-1] % 2 == 0:
        magnitudes = np.maximum(magnitudes[..., ::2], magnitudes[..., 1::2])
    largest: np.ndarray = magnitudes.max(-1, initial=0)
    return largest


class _ValueGroups(NamedTuple):
    values: np.ndarray  # [groups down, rows of each, groups across, columns of each], float32
    largest: np.ndarray  # [groups down, groups across]: the largest magnitudes
    top: int  # the first row
    left: int  # the first column


def _codes(
    form: GroupFormat, values: np.ndarray, scales: np.ndarray, factor: np.float32
) -> np.ndarray:
    units = form.units(scales, factor)
    with np.errstate(all="ignore"):
        return form.codes(values / np.where(units, units, np.float32(1))[:, None, :, None])


class WeightLayout(NamedTuple):
    """Names of the tensors of a quantised weight, after its plain name, and how they are made."""

    format: GroupFormat
    values: str
    scales: str
    factor: str = ""
    shape: str = ""  # a tensor with the weight's rows and columns
    is_grouped: bool = False  # stored transposed, and values with an axis of groups, as GPT-OSS's

    def tensors(
        self,
        name: str,
        weight: BoundExpr,
        *,
        before: StoredScales | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, BoundExpr]:
        """Return the tensors of a weight; `shapes` are other than usual ones, by axes of one."""
        if self.is_grouped and len(weight.shape) > 1:
            axes = range(len(weight.shape))
            weight = permuted(weight, (*axes[:-2], axes[-1], axes[-2]))
        down, group = self.format.block
        if len(weight.shape) < 2 or (len(weight.shape) > 2 and weight.shape[-2] % (down or 1)):
            raise MappingError(
                f"{name!r} has shape {list(weight.shape)}; a quantised weight has rows and columns,"
                " and further axes if their groups are whole"
            )
        *outer, rows, columns = weight.shape
        down, across = down or rows or 1, group or columns or 1
        if self.format.is_whole and columns % (across or 1):
            raise MappingError(
                f"the {columns} columns of {name!r} are not groups of {group}",
                hint=f"Leave it out: Quantization(..., ignore=[{name.removesuffix('.weight')!r}]).",
            )
        form = dataclasses.replace(self.format, block=(down, across))
        merged = reshaped(weight, (math.prod(outer) * rows, columns))
        groups, packed = -(-columns // across), -(-columns // form.per_element)
        parts: list[tuple[Part, str, tuple[int, ...], tuple[int, ...], np.dtype[Any]]] = [
            (
                "values",
                self.values,
                (merged.shape[0], packed),
                (*outer, rows, *((groups, packed // groups) if self.is_grouped else (packed,))),
                form.dtype,
            ),
            (
                "scales",
                self.scales,
                (-(-merged.shape[0] // down), groups),
                (*outer, -(-rows // down), groups),
                form.scale_dtype,
            ),
        ]
        if form.has_factor:
            parts.append(("factor", self.factor, (1,), (1,), np.dtype(np.float32)))
        result: dict[str, BoundExpr] = {}
        most: list[np.float32] = []
        for part, ending, own, shape, dtype in parts:
            full = joined_name(name, ending)
            encoder = WeightEncoder(form, part, (merged.shape[0], columns), name, before, most)
            expr = Decoded(own, dtype, (merged,), encoder)
            stored = (shapes or {}).get(full, shape)
            if _longer_than_one(stored) != _longer_than_one(shape):
                raise MappingError(
                    f"{name!r} has another shape than in the folder that it is saved like",
                    expected=f"one that makes {full!r} {list(stored)}",
                    found=f"{list(weight.shape)}, which makes it {list(shape)}",
                )
            result[full] = reshaped(expr, stored)
        if self.shape:
            extents = [Constant((1,), np.dtype(np.int64), np.int64(n)) for n in weight.shape]
            result[joined_name(name, self.shape)] = concatenated(extents, 0)
        return result


def add_parts(
    result: dict[str, BoundExpr],
    name: str,
    parts: Mapping[str, BoundExpr],
    plain: Mapping[str, BoundExpr],
) -> None:
    """Adds the tensors of a weight, none of which may have the name of another."""
    for part, expr in parts.items():
        if part in result or (part in plain and part != name):
            raise MappingError(
                f"there are two tensors {part!r}: one of the quantised weight {name!r}"
            )
        result[part] = expr


def _longer_than_one(shape: tuple[int, ...]) -> list[int]:
    return [extent for extent in shape if extent != 1]


def joined_name(name: str, part: str) -> str:
    """Return the name of a part of a weight: `/` begins one beside it, others follow its name."""
    return f"{name.rpartition('.')[0]}.{part[1:]}" if part.startswith("/") else name + part
