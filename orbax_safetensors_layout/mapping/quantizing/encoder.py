"""The tensors of a quantised weight as expressions over the plain one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
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
_MOST_IN_ROWS = 1 << 22  # values of a row of groups
_SHORT = 64  # values in a row of a group; of more numpy finds the largest fast

Part = Literal["values", "scales", "factor"]


class StoredScales(Protocol):
    """The scales of a weight that was quantised before, and its elements."""

    def scales(self) -> np.ndarray:
        """Return one for each group, of two axes."""

    def factor(self) -> np.float32:
        """Return the factor that these were stored with."""

    def elements(self, rows: range, of: int) -> np.ndarray:
        """Return some of all rows, as they are stored."""


class SeenValues:
    """Facts of all values of a weight, which its parts need; see `WeightEncoder.scan`."""

    def __init__(self) -> None:
        self.most = np.float32(0)  # the largest magnitude
        self.largest: np.ndarray | None = None  # of each group, where groups are tall
        self.same: np.ndarray | None = None  # whether each is stored exactly with its scale before
        self.is_known = False
        self.is_complete = False
        self.lock = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class WeightEncoder:
    """A `Decoder` of one of the tensors that a weight of two axes is stored as.

    Groups that `before` gives the values that they have keep their scales, and so their bits.

    A few rows are computed from a few rows of the weight. A factor, and scales of groups with many
    values in a row of groups, are those of values that were seen before: who can read the weight
    twice passes all its rows to `scan`, then calls `complete`; for others it needs the whole.
    """

    format: GroupFormat  # with all extents of a block
    part: Part
    shape: tuple[int, int]  # the weight's
    name: str  # the weight's
    before: StoredScales | None = None
    seen: SeenValues = dataclasses.field(default_factory=SeenValues, compare=False)
    """Of all parts of the weight."""

    free = 0
    by_rows = True

    @property
    def is_tall(self) -> bool:
        """Whether too many rows share scales to have them in memory at once."""
        down = self.format.block[0]
        return down > 1 and down * self.shape[1] > _MOST_IN_ROWS

    @property
    def unseen(self) -> bool:
        """Whether it needs the whole weight, unless that is scanned."""
        return (self.format.has_factor or self.is_tall) and not self.seen.is_complete

    @property
    def _sizes(self) -> tuple[int, int]:
        """Rows and columns of the weight for each element."""
        return self.format.block if self.part == "scales" else (1, self.format.per_element)

    def widen(self, box: Box) -> Box:
        return box

    def needs(self, box: Box) -> tuple[Box, ...]:
        return (Box.whole(self.shape) if self.unseen else self._region(box),)

    def _region(self, box: Box) -> Box:
        """Return what a box of the part is computed from: whole groups, unless they are tall."""
        if self.part == "factor" or (self.is_tall and self.part == "scales"):
            return Box((0, 0), (min(1, self.shape[0]), self.shape[1]))  # has been seen
        start, stop = [], []
        down, across = self.format.block
        units = (1 if self.is_tall else down, across)
        for first, last, size, unit, extent in zip(
            *box, self._sizes, units, self.shape, strict=True
        ):
            start.append(first * size // unit * unit)
            stop.append(min(-(-last * size // unit) * unit, extent))
        return Box(tuple(start), tuple(stop))

    def scan(self, first: int, weight: np.ndarray) -> None:
        """Sees rows of the weight, from number `first` on; twice and on several threads, too."""
        seen, before = self.seen, self.before if self.is_tall else None
        known = None if before is None else self._scales_before(before)
        if self.is_tall:
            with seen.lock:
                if seen.largest is None or seen.same is None:
                    seen.largest = np.zeros(self._groups, np.float32)
                    seen.same = np.ones(self._groups, np.bool_)
        for values, largest, top, left in self._chunks(weight, first):
            where = _placed(largest, (first + top) // self.format.block[0], left)
            same: Any = False
            if known is not None:
                same = self._are_same(values, known[where], np.float32(1), weight.dtype)
            with seen.lock:
                seen.most = max(seen.most, largest.max(initial=0))
                if seen.largest is not None and seen.same is not None:
                    seen.largest[where] = np.maximum(seen.largest[where], largest)
                    seen.same[where] &= same

    def complete(self) -> None:
        """Says that all rows were scanned."""
        self.seen.is_known = self.seen.is_complete = True

    def decode(self, box: Box, inputs: Sequence[np.ndarray]) -> np.ndarray:
        (weight,) = inputs
        form, before, seen = self.format, self.before, self.seen
        if self.unseen and not seen.is_known:
            self.scan(0, weight)
            seen.is_known = True
        factor = np.float32(1)
        if form.has_factor:
            factor = form.factor(seen.most)
            if before is not None and form.fits(seen.most, before.factor()):
                factor = before.factor()
            else:
                before = None
        if self.part == "factor":
            return np.array([factor])
        known = None if before is None else self._scales_before(before)
        if self.is_tall and self.part == "scales":
            return self._scales(seen.largest, known, seen.same, factor)[box.slices]
        region = self._region(box)
        if weight.shape != region.shape:
            weight = weight[region.slices]
        (row, column), (down, across) = region.start, form.block
        part = blocks_of(region, self._sizes)
        result = np.empty(part.shape, form.scale_dtype if self.part == "scales" else form.dtype)
        for values, largest, top, left in self._chunks(weight, row):
            groups = _placed(largest, (row + top) // down, column // across + left)
            before_here = None if known is None else known[groups]
            same = None
            if seen.largest is not None and seen.same is not None:
                largest, same = seen.largest[groups], seen.same[groups]
            elif before_here is not None:
                same = self._are_same(values, before_here, factor, weight.dtype)
            scales = self._scales(largest, before_here, same, factor)
            if self.part == "scales":
                result[_placed(scales, top // down, left)] = scales
                continue
            codes = _codes(form, values, scales, factor)
            codes = codes.reshape(-1, codes.shape[2] * across)
            first = left * across
            stored = form.stored(codes[: len(weight) - top, : weight.shape[1] - first])
            if before is not None and same is not None:
                here = range(row + top, row + top + len(stored))
                first_stored = column // form.per_element + first // form.per_element
                is_lost = same & (form.units(scales, factor) == 0)
                self._keep_elements(stored, is_lost, before, here, first_stored)
            result[_placed(stored, top, first // form.per_element)] = stored
        return result[box.within(part).slices]

    def _keep_elements(
        self,
        stored: np.ndarray,
        is_lost: np.ndarray,
        before: StoredScales,
        rows: range,
        column: int,
    ) -> None:
        """Gives groups the elements that they have, where no value tells them: scales are zero."""
        if is_lost.any():
            down, across = self.format.block
            high = len(stored) if self.is_tall else down
            wide = -(-across // self.format.per_element)
            where = is_lost.repeat(high, 0)[: len(stored)].repeat(wide, 1)[:, : stored.shape[1]]
            kept = before.elements(rows, self.shape[0])[:, column : column + stored.shape[1]]
            np.copyto(stored, kept, where=where)

    @property
    def _groups(self) -> tuple[int, ...]:
        return blocks_of(Box.whole(self.shape), self.format.block).shape

    def _scales_before(self, before: StoredScales) -> np.ndarray:
        return before.scales().reshape(self._groups)

    def _scales(
        self,
        largest: np.ndarray | None,
        known: np.ndarray | None,
        same: np.ndarray | None,
        factor: np.float32,
    ) -> np.ndarray:
        """Return the scales of groups: those known, where the values are the same."""
        assert largest is not None
        scales = self.format.scales(largest, factor)
        if known is not None and same is not None:
            scales = np.where(same, known, scales)
        if not np.isfinite(self.format.units(scales, factor)).all():
            raise SafetensorsLayoutError(
                f"the weight has values too large for scales in {self.format.scale_dtype.name}",
                tensor=self.name,
                found=f"{largest.max():g}",
                hint=_HINT,
            )
        return scales

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

    def _chunks(self, weight: np.ndarray, first: int) -> Iterator[_ValueGroups]:
        """Yields some groups at a time; those at the edges are filled up with zeros.

        Of tall groups some rows, which are of one row of groups; `first` is that of the weight.
        """
        (down, across), (rows, columns) = self.format.block, weight.shape
        unit = 1 if self.is_tall else down
        wide = max(1, CHUNK_ELEMENTS // (unit * across)) * across
        high = max(1, CHUNK_ELEMENTS // (unit * min(wide, max(1, columns)))) * unit
        tops = [*range(0, rows, high)]
        if self.is_tall:
            tops = sorted({*tops, *range(-first % down, rows, down)})
        for (top, bottom), left in itertools.product(
            itertools.pairwise([*tops, rows]), range(0, columns, wide)
        ):
            values = weight[top:bottom, left : left + wide].astype(np.float32)
            missing = [(0, -n % size) for n, size in zip(values.shape, (unit, across), strict=True)]
            if any(map(any, missing)):
                values = np.pad(values, missing)
            in_group = len(values) if self.is_tall else down
            values = values.reshape(len(values) // in_group, in_group, -1, across)
            largest = _largest(values)
            if not np.isfinite(largest).all():
                raise SafetensorsLayoutError(
                    "the weight has values that are not finite, which its quantised form has not",
                    tensor=self.name,
                    found=f"{np.count_nonzero(~np.isfinite(values))} in some groups",
                    hint=_HINT,
                )
            yield _ValueGroups(values, largest, top, left // across)


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
    left: int  # the first group of columns


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
        if across < columns and across % form.per_element:
            raise MappingError(
                f"groups of {across} columns of {name!r} end within stored elements",
                expected=f"groups of a multiple of {form.per_element}",
            )
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
        seen = SeenValues()
        for part, ending, own, shape, dtype in parts:
            full = joined_name(name, ending)
            encoder = WeightEncoder(form, part, (merged.shape[0], columns), name, before, seen)
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
