"""Operations on values: they act on each element by itself, on the shard that a process holds.

Every operation computes in the dtype of its operand, with its constant rounded to that dtype
first, as numpy does step by step: `x.cast("float32").scale(c).cast("bfloat16")` rounds once, at the
end, and `x.scale(c)` of a bfloat16 tensor rounds the constant and the product to bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError, MappingError

from ..integers import is_integer, is_whole, to_whole

_CHUNK_ELEMENTS = 1 << 16  # bounds what a chain of operations holds besides its result


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of a name, a scalar type or a dtype of numbers, in native byte order.

    >>> as_dtype("bfloat16")
    dtype(bfloat16)
    """
    try:
        known: np.dtype[Any] = np.dtype([] if dtype is None else dtype)  # None would be float64
    except (TypeError, ValueError) as error:
        raise MappingError(f"{dtype!r} is no dtype") from error
    if not is_number(known):
        raise MappingError(f"{dtype!r} is no dtype of numbers")
    return known.newbyteorder("=")


def rounded(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `values.astype(dtype)`; see `assign`."""
    result = np.empty_like(values, dtype)
    assign(result, values)
    return result


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """`target[...] = values`, also between small dtypes of which ml_dtypes has no cast.

    Those go through float32, which holds every value of both.
    """
    with np.errstate(all="ignore"):
        try:
            target[...] = values
        except TypeError:
            target[...] = values.astype(np.float32)


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds numbers or truth values."""
    return dtype.kind in "biufc" or dtype.type.__module__ == ml_dtypes.bfloat16.__module__


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype, by numpy's rounding; integers and truth values must hold every value.

    Attributes:
        dtype: The dtype of the result.
        lossy_inverse: Whether saving may cast back although loading has rounded.
    """

    dtype: np.dtype[Any]
    lossy_inverse: bool = False

    def __str__(self) -> str:
        return f"cast({self.dtype.name!r}{_lossy(self.lossy_inverse)})"

    def result(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of the result; refuses casts without numeric meaning."""
        if dtype.kind == "c" and self.dtype.kind != "c":
            raise MappingError(f"{self} of {dtype.name} would drop the imaginary part")
        if not (is_number(dtype) and is_number(self.dtype)):
            raise MappingError(f"{self} of {dtype.name} has no numeric meaning")
        return self.dtype

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the values as the new dtype; an integer dtype must hold every one."""
        if is_whole(self.dtype):
            result, lost = to_whole(values, self.dtype)
            if not lost.size:
                return result
            raise DtypeMismatchError(
                f"{lost.size} values do not fit the {self} of a mapping",
                expected=self.dtype,
                found=f"for instance {lost[0]}",
            )
        return rounded(values, self.dtype)

    def inverse(self, dtype: np.dtype[Any]) -> Cast:
        """Back to the operand's dtype."""
        return Cast(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class _Arithmetic:
    """An operation on each element and a constant; `lossy_inverse` as in `Cast`."""

    constant: float
    lossy_inverse: bool = False

    name: ClassVar[str]
    function: ClassVar[np.ufunc]

    def __str__(self) -> str:
        return f"{self.name}({self.constant!r}{_lossy(self.lossy_inverse)})"

    def result(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of the result, that of the operand; it must hold the constant."""
        self._constant(dtype)
        return dtype

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the results."""
        with np.errstate(all="ignore"):
            result: np.ndarray = self.function(values, self._constant(values.dtype))
        return result

    def _constant(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Return the constant in an operand's dtype: rounded among floats, exact in integers."""
        if dtype.kind == "b" or not is_number(dtype):
            raise MappingError(f"{self} of {dtype.name} has no numeric meaning")
        if not is_integer(dtype):
            constant = rounded(np.asarray(self.constant), dtype)
            if np.isfinite(self.constant) and not np.isfinite(constant):
                raise MappingError(f"{self} of {dtype.name}: the dtype cannot hold the constant")
            return constant
        result, lost = to_whole(np.asarray(self.constant), dtype)
        if lost.size:
            raise MappingError(
                f"{self} of {dtype.name}: an integer tensor cannot hold the constant",
                hint="Cast to a floating-point dtype first.",
            )
        return result

    def _refuse(self, hint: str | None) -> NoReturn:
        raise MappingError(f"{self} does not invert exactly", hint=hint)


class Scale(_Arithmetic):
    """Each element times a constant."""

    __slots__ = ()
    name = "scale"
    function = np.multiply

    def inverse(self, dtype: np.dtype[Any]) -> Scale:
        """Division by a power of two; `exactness.py` checks whether it restores every value."""
        exact = self.constant != 0 and abs(math.frexp(self.constant)[0]) == 0.5
        if self.constant and not is_integer(dtype) and (exact or self.lossy_inverse):
            return Scale(1 / self.constant)
        hint = "A power of two does, in a wider dtype than the file's; or accept the rounding with"
        self._refuse(f"{hint} lossy_inverse=True." if self.constant else None)


class Add(_Arithmetic):
    """Each element plus a constant."""

    __slots__ = ()
    name = "add"
    function = np.add

    def inverse(self, dtype: np.dtype[Any]) -> Add:
        """Subtraction where it is exact: of zero, and of integers, which wrap around."""
        wraps = is_integer(dtype) and dtype.kind == "i"
        if self.constant == 0 or wraps or self.lossy_inverse:
            return Add(-self.constant)
        self._refuse("Accept the rounding with lossy_inverse=True.")


ValueOp = Cast | Scale | Add
"""One operation on values."""


def undone(op: ValueOp, operand: np.dtype[Any], values: np.dtype[Any]) -> tuple[ValueOp, ...]:
    """Return the operations that undo one on a leaf's values.

    Arithmetic is undone in its own dtype where the leaf's holds less: a constant that is rounded to
    bfloat16 would shift all values.

    Args:
        op: The operation.
        operand: Dtype of its operand.
        values: Dtype of the leaf's values.

    Raises:
        MappingError: It does not invert.
    """
    back, done_in = op.inverse(operand), op.result(operand)
    if isinstance(op, Cast) or values.itemsize >= done_in.itemsize:
        return (back,)
    return Cast(done_in), back


def _lossy(accepted: bool) -> str:
    return ", lossy_inverse=True" if accepted else ""


def apply_ops(
    values: np.ndarray, ops: tuple[ValueOp, ...], out: np.ndarray | None = None
) -> np.ndarray:
    """Apply operations in order.

    Args:
        values: The operand.
        ops: The operations.
        out: Where to put the result, of the same shape; temporaries then stay small.

    >>> apply_ops(np.float32([1, 2]), (Scale(3.0), Add(1.0)))
    array([4., 7.], dtype=float32)
    """
    if out is None:
        for op in ops:
            values = op.apply(values)
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
