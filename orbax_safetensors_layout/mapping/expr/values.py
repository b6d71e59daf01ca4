"""Operations on each element by itself, on the shard that a process holds.

Every operation computes in the dtype of its operand, with its constant rounded to that dtype
first, as numpy does step by step: `x.cast("float32").scale(c).cast("bfloat16")` rounds once, at the
end, and `x.scale(c)` of a bfloat16 tensor rounds the constant and the product to bfloat16.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError, MappingError

from ..casting import (
    cast_problem,
    held,
    in_range,
    is_integer,
    is_number,
    is_whole,
    rounded,
    to_whole,
    whole_range,
)

_CHUNK_ELEMENTS = 1 << 16  # bounds what a chain of operations holds besides its result


Checked = tuple[np.ndarray, np.ndarray | np.bool_]
"""Results, and for each value whether its result is exact where it has to be."""


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of a name, a scalar type or a dtype of numbers, in native byte order."""
    try:
        known: np.dtype[Any] = np.dtype([] if dtype is None else dtype)  # None would be float64
    except (TypeError, ValueError) as error:
        raise MappingError(f"{dtype!r} is not a dtype") from error
    if not is_number(known):
        raise MappingError(f"{dtype!r} is not a dtype of numbers")
    return known.newbyteorder("=")


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype, by numpy's rounding; integers and booleans must hold every value."""

    dtype: np.dtype[Any]
    lossy_inverse: bool = False  # whether saving may undo it although loading has rounded

    def __str__(self) -> str:
        lossy = ", lossy_inverse=True" if self.lossy_inverse else ""
        return f"cast({self.dtype.name!r}{lossy})"

    def result(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        problem = cast_problem(dtype, self.dtype)
        if problem:
            raise MappingError(f"{self} of {dtype.name} {problem}")
        return self.dtype

    def checked(self, values: np.ndarray) -> Checked:
        if is_whole(self.dtype):
            return to_whole(values, self.dtype)
        return rounded(values, self.dtype), np.True_

    def inverse(self, dtype: np.dtype[Any]) -> Cast:
        return Cast(dtype)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Arithmetic:
    """An operation with a constant, which is equal to those of the same bits."""

    constant: float
    lossy_inverse: bool = False

    function: ClassVar[np.ufunc]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arithmetic) and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        constant = self.constant
        exact = constant if isinstance(constant, int) else np.asarray(constant).tobytes()
        return type(self), type(constant), exact, self.lossy_inverse

    def __str__(self) -> str:
        lossy = ", lossy_inverse=True" if self.lossy_inverse else ""
        return f"{type(self).__name__.lower()}({self.constant!r}{lossy})"

    def result(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        self._constant(dtype)  # refuses a dtype that cannot hold it
        return dtype

    def checked(self, values: np.ndarray) -> Checked:
        constant = self._constant(values.dtype)
        kept: np.ndarray | np.bool_ = np.True_
        if is_integer(values.dtype):
            kept = in_range(values, *self.operands(int(constant), *whole_range(values.dtype)))
        with np.errstate(all="ignore"):
            return self.function(values, constant), kept

    @staticmethod
    @abc.abstractmethod
    def operands(constant: int, low: int, high: int) -> tuple[int, int]:
        """Return the least and the greatest integer whose result is in a range."""

    def _constant(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Return the constant in an operand's dtype."""
        if dtype.kind == "b" or not is_number(dtype):
            raise MappingError(f"{self} of {dtype.name} has no numeric meaning")
        constant = held(np.asarray(self.constant), dtype)
        if constant is None:
            hint = "Cast to a floating-point dtype first." if is_integer(dtype) else None
            raise MappingError(f"{self}: {dtype.name} cannot hold the constant", hint=hint)
        return constant

    def _raise_error(self, hint: str | None) -> NoReturn:
        raise MappingError(f"{self} does not invert exactly", hint=hint)


class Scale(_Arithmetic):
    """Each element times a constant."""

    __slots__ = ()
    function = np.multiply

    @staticmethod
    def operands(constant: int, low: int, high: int) -> tuple[int, int]:
        if not constant:
            return low, high
        first, last = (low, high) if constant > 0 else (high, low)
        return -(-first // constant), last // constant

    def inverse(self, dtype: np.dtype[Any]) -> Scale:
        """Division by a power of two; `invert.py` checks whether it restores every value."""
        exact = self.constant != 0 and abs(math.frexp(self.constant)[0]) == 0.5
        if self.constant and not is_integer(dtype) and (exact or self.lossy_inverse):
            return Scale(1 / self.constant)
        hint = "A power of two does, in a wider dtype than the file's; or accept the rounding with"
        self._raise_error(f"{hint} lossy_inverse=True." if self.constant else None)


class Add(_Arithmetic):
    """Each element plus a constant."""

    __slots__ = ()
    function = np.add

    @staticmethod
    def operands(constant: int, low: int, high: int) -> tuple[int, int]:
        return low - constant, high - constant

    def inverse(self, dtype: np.dtype[Any]) -> Add:
        """Subtraction where it is exact: of zero, and of signed integers."""
        if self.constant == 0 or dtype.kind == "i" or self.lossy_inverse:
            return Add(-self.constant)
        self._raise_error("Accept the rounding with lossy_inverse=True.")


ValueOp = Cast | Scale | Add
"""One operation on values."""


def undone(op: ValueOp, operand: np.dtype[Any], values: np.dtype[Any]) -> tuple[ValueOp, ...]:
    """Return the operations that undo one on a leaf's values; `operand` is its operand's dtype.

    Arithmetic is undone in its own dtype where the leaf's holds less: a constant that is rounded to
    bfloat16 would shift all values.
    """
    back, done_in = op.inverse(operand), op.result(operand)
    if isinstance(op, Cast) or values.itemsize >= done_in.itemsize:
        return (back,)
    return Cast(done_in), back


def apply_ops(
    values: np.ndarray, ops: tuple[ValueOp, ...], out: np.ndarray | None = None
) -> np.ndarray:
    """Apply operations in order; into `out`, of the same shape, with small temporaries."""
    if out is None:
        for op in ops:
            result, kept = op.checked(values)
            if not kept.all():
                lost = values[~kept]
                raise DtypeMismatchError(
                    f"{lost.size} values do not fit the {op} of a mapping",
                    expected=result.dtype,
                    found=f"for instance {lost[0]}",
                    hint="Cast to a wider dtype; arithmetic is in the dtype of its operand.",
                )
            values = result
        return values
    for part, place in in_chunks(values, out):
        place[...] = apply_ops(part, ops)
    return out


def in_chunks(values: np.ndarray, out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields parts of an array that fit a core's cache, each with its place in an equal one."""
    if values.size <= _CHUNK_ELEMENTS or not values.ndim:
        yield values, out
        return
    rows = max(1, _CHUNK_ELEMENTS * len(values) // values.size)
    for start in range(0, len(values), rows):
        if rows == 1:
            yield from in_chunks(values[start], out[start, ...])
        else:
            yield values[start : start + rows], out[start : start + rows]
