"""Operations on one expression: how each is written and bound, and its inverse on shapes.

`bind` applies one to a bound expression. `operand_extents` gives the operand's shape from the
result's, which must determine it. The `str` of an operation is how a user calls it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import MappingError, listed
from orbax_safetensors_layout.format import short_repr

from .. import argument_checks
from ..affine.bound import BoundExpr, Constant
from ..affine.index_nodes import (
    Broadcast,
    concatenated,
    inverse_permutation,
    permuted,
    reshaped,
    sliced,
    taken,
)
from ..affine.window import put
from ..casting import held
from ..inverse.inference import LIKE, Extent, product, quotient
from . import einops

Extents = tuple[Extent, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Transpose:
    """`numpy.transpose`; without axes, in reverse order."""

    axes: tuple[int, ...]

    def __str__(self) -> str:
        return f"transpose({', '.join(map(str, self.axes))})"

    def _order(self, rank: int) -> tuple[int, ...]:
        if not self.axes:
            return tuple(reversed(range(rank)))
        order = tuple(axis + rank if axis < 0 else axis for axis in self.axes)
        if sorted(order) != list(range(rank)):
            raise MappingError(f"{self} does not name each of {rank} axes once")
        return order

    def bind(self, operand: BoundExpr) -> BoundExpr:
        return permuted(operand, self._order(len(operand.shape)))

    def operand_extents(self, result: Extents) -> Extents:
        return tuple(result[axis] for axis in inverse_permutation(self._order(len(result))))


@dataclasses.dataclass(frozen=True, slots=True)
class Rearrange:
    """einops' `rearrange`."""

    text: str
    sizes: tuple[tuple[str, int], ...]
    pattern: einops.Pattern = dataclasses.field(repr=False)

    @classmethod
    def of(cls, text: str, sizes: dict[str, int]) -> Rearrange:
        pattern = einops.parse(argument_checks.text(text, "rearrange"))
        unknown = sorted(set(sizes) - {name for group in pattern.left for name in group})
        if unknown:
            raise MappingError(f"rearrange pattern {text!r} has no {', '.join(unknown)}")
        checked = {
            name: argument_checks.integer(n, f"rearrange({name}=...)") for name, n in sizes.items()
        }
        negative = [f"{name}={n}" for name, n in checked.items() if n < 0]
        if negative:
            raise MappingError(f"rearrange: {', '.join(negative)} is not a size")
        return cls(text, tuple(sorted(checked.items())), pattern)

    def __str__(self) -> str:
        sizes = "".join(f", {name}={n}" for name, n in self.sizes)
        return f"rearrange({self.text!r}{sizes})"

    def bind(self, operand: BoundExpr) -> BoundExpr:
        shape = tuple(map(Extent, operand.shape))
        pattern = einops.expand(self.pattern, len(shape), "left")
        sizes = einops.solve(pattern.left, shape, dict(self.sizes))
        names = [name for group in pattern.left for name in group]
        order = [names.index(name) for group in pattern.right for name in group]
        moved = permuted(reshaped(operand, [sizes[name].n for name in names]), order)
        merged = [product(sizes[name] for name in group).n for group in pattern.right]
        return reshaped(moved, merged)

    def operand_extents(self, result: Extents) -> Extents:
        pattern = einops.expand(self.pattern, len(result), "right")
        sizes = einops.solve(pattern.right, result, dict(self.sizes))
        return tuple(product(sizes[name] for name in group) for group in pattern.left)


@dataclasses.dataclass(frozen=True, slots=True)
class Reshape:
    """`numpy.reshape`; one extent may be -1."""

    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"reshape({', '.join(map(str, self.shape))})"

    def bind(self, operand: BoundExpr) -> BoundExpr:
        size, shape = math.prod(operand.shape), self.shape
        if shape.count(-1) == 1:
            rest = math.prod(n for n in shape if n != -1)
            shape = tuple((size // rest if rest else 0) if n == -1 else n for n in shape)
        if min(shape, default=0) < 0 or math.prod(shape) != size:
            raise MappingError(f"{self} does not hold the {size} elements of {[*operand.shape]}")
        return reshaped(operand, shape)

    def operand_extents(self, result: Extents) -> Extents:
        raise MappingError(
            f"{self} does not determine the input shape",
            hint=f"Write it with rearrange, whose pattern does, or {LIKE}.",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """`x[..., start:stop:step, ...]`, but no index may be beyond the axis."""

    axis: int
    start: int | None
    stop: int | None
    step: int

    def __str__(self) -> str:
        step = "" if self.step == 1 else f", {self.step}"
        stop = "" if self.stop is None and not step else f", {self.stop}"
        return f"slice({self.axis}, {self.start}{stop}{step})"

    def bind(self, operand: BoundExpr) -> BoundExpr:
        axis = axis_of(self, self.axis, len(operand.shape))
        n = operand.shape[axis]
        if any(bound is not None and abs(bound) > n for bound in (self.start, self.stop)):
            raise MappingError(f"{self} reaches beyond axis {axis} of extent {n}")
        indices = range(n)[self.start : self.stop : self.step]
        return sliced(operand, axis, indices.start if len(indices) else 0, len(indices), self.step)

    def operand_extents(self, result: Extents) -> Extents:
        axis = axis_of(self, self.axis, len(result))
        (count, exact), start, stop = result[axis], self.start or 0, self.stop
        if self.step > 0 and start >= 0 and stop is None:
            extent = Extent(start + (count - 1) * self.step + 1, exact and self.step == 1)
        elif self.step == 1 and start >= 0 and stop is not None and stop < 0:
            extent = Extent(start + count - stop, exact)
        else:
            bounds = [abs(bound) for bound in (self.start, self.stop) if bound is not None]
            extent = Extent(max([count, *bounds]), exact=False)
        return put(result, axis, extent)


@dataclasses.dataclass(frozen=True, slots=True)
class Take:
    """`numpy.take`."""

    axis: int
    indices: tuple[int, ...]

    def __str__(self) -> str:
        return f"take({self.axis}, [{listed(self.indices, 8)}])"

    def bind(self, operand: BoundExpr) -> BoundExpr:
        axis = axis_of(self, self.axis, len(operand.shape))
        n = operand.shape[axis]
        beyond = [i for i in self.indices if not -n <= i < n]
        if beyond:
            raise MappingError(
                f"{self} reaches beyond axis {axis} of extent {n}: [{listed(beyond)}]"
            )
        return taken(operand, axis, [i + n if i < 0 else i for i in self.indices])

    def operand_extents(self, result: Extents) -> Extents:
        axis = axis_of(self, self.axis, len(result))
        if result[axis].join(Extent(len(self.indices))) is None:
            raise MappingError(f"{self} gives extent {len(self.indices)}, not {result[axis]}")
        least = max([(i + 1 if i >= 0 else -i) for i in self.indices], default=0)
        return put(result, axis, Extent(least, exact=False))


@dataclasses.dataclass(frozen=True, slots=True)
class Pad:
    """`numpy.pad` along an axis, with one value."""

    axis: int
    before: int
    after: int
    value: Any

    def __str__(self) -> str:
        return f"pad({self.axis}, {self.before}, {self.after}, {self.value!r})"

    def bind(self, operand: BoundExpr) -> BoundExpr:
        axis = axis_of(self, self.axis, len(operand.shape))
        value = scalar(self.value, operand.dtype)
        first, last = (
            [Constant(put(operand.shape, axis, n), operand.dtype, value)] if n else []
            for n in (self.before, self.after)
        )
        return concatenated([*first, operand, *last], axis)

    def operand_extents(self, result: Extents) -> Extents:
        axis = axis_of(self, self.axis, len(result))
        n, exact = result[axis]
        rest = n - self.before - self.after
        if rest < 0 and exact:
            raise MappingError(f"{self} gives at least extent {self.before + self.after}, not {n}")
        return put(result, axis, Extent(max(0, rest), exact))


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """`numpy.repeat` along an axis."""

    axis: int
    count: int
    lossy_inverse: bool = False  # whether saving drops the others than the first

    def __str__(self) -> str:
        lossy = ", lossy_inverse=True" if self.lossy_inverse else ""
        return f"repeat({self.axis}, {self.count}{lossy})"

    def bind(self, operand: BoundExpr) -> BoundExpr:
        axis = axis_of(self, self.axis, len(operand.shape))
        shape, n = operand.shape, operand.shape[axis]
        many = put(shape, axis, n, self.count)
        repeated = Broadcast(many, operand.dtype, operand, axis + 1, not self.lossy_inverse)
        return reshaped(repeated, put(shape, axis, n * self.count))

    def operand_extents(self, result: Extents) -> Extents:
        axis = axis_of(self, self.axis, len(result))
        once = quotient(result[axis], Extent(self.count))
        if once is None:
            raise MappingError(f"{self} gives a multiple of {self.count}, not {result[axis]}")
        return put(result, axis, once)


Op = Transpose | Rearrange | Reshape | Slice | Take | Pad | Repeat


def extent(
    op: Op, axis: int, rank: int, of_operand: Callable[[int, int], int | None]
) -> int | None:
    """Return the extent of an axis of a result, if the operation or its operand says it."""
    if isinstance(op, Rearrange):
        group, sizes = einops.expand(op.pattern, rank, "right").right[axis], dict(op.sizes)
        return math.prod(sizes[name] for name in group) if sizes.keys() >= {*group} else None
    if isinstance(op, Reshape):
        return None
    if isinstance(op, Transpose):
        return of_operand(op._order(rank)[axis], rank)
    if axis_of(op, op.axis, rank) != axis:
        return of_operand(axis, rank)
    if isinstance(op, Slice) and op.stop is not None:
        start = op.start or 0
        return len(range(start, op.stop, op.step)) if min(start, op.stop) >= 0 else None
    return len(op.indices) if isinstance(op, Take) else None


def axis_of(op: object, axis: int, rank: int) -> int:
    """Return an axis of an array of `rank`, counted from 0."""
    if not -rank <= axis < rank:
        raise MappingError(f"{op} needs an axis {axis}; there are {rank}")
    return axis + rank if axis < 0 else axis


def scalar(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a value as a scalar of a dtype, which must hold it."""
    problem = f"{short_repr(value)} is not a value of {dtype.name}"
    if isinstance(value, complex | np.complexfloating) and (dtype.kind == "c" or not value.imag):
        number = np.asarray(value if dtype.kind == "c" else value.real)
    else:
        number = np.asarray(argument_checks.number(value, f"{problem}: pad or fill"))
    result = held(number, dtype)
    if result is None:
        raise MappingError(problem)
    return result[()]
