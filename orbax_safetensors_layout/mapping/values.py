"""Operations on values: they act on each element alone, on the shard that a process holds.

Every operation computes in the dtype of its operand, with its constant rounded to that dtype
first, as numpy does step by step: `x.cast("float32").scale(c).cast("bfloat16")` rounds once, at the
end, and `x.scale(c)` of a bfloat16 tensor rounds the constant and the product to bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError, MappingError

_CHUNK_ELEMENTS = 1 << 20  # bounds what a chain of operations holds besides its result
NARROW_INTEGERS = {"int1", "uint1", "int2", "uint2", "int4", "uint4"}  # of ml_dtypes, kind "V"


def as_dtype(dtype: Any) -> np.dtype[Any]:
    """The numpy or ml_dtypes dtype of a name, a scalar type or a dtype, in native byte order.

    Raises:
        MappingError: It is none.

    >>> as_dtype("bfloat16")
    dtype(bfloat16)
    """
    try:
        known: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise MappingError(f"{dtype!r} is no dtype") from error
    return known.newbyteorder("=")


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds integers."""
    return dtype.kind in "iu" or dtype.name in NARROW_INTEGERS


def is_number(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds numbers or truth values."""
    return dtype.kind in "biufc" or dtype.type.__module__ == ml_dtypes.bfloat16.__module__


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype, by numpy's rounding; integers and truth values must hold every value.

    Attributes:
        dtype: The dtype of the result.
    """

    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"cast({self.dtype.name!r})"

    def result(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of the result for an operand's.

        Raises:
            MappingError: The cast has no numeric meaning.
        """
        if dtype.kind == "c" and self.dtype.kind != "c":
            raise MappingError(f"{self} of {dtype.name} would drop the imaginary part")
        if not (is_number(dtype) and is_number(self.dtype)):
            raise MappingError(f"{self} of {dtype.name} has no numeric meaning")
        return self.dtype

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The values as the new dtype.

        Raises:
            DtypeMismatchError: An integer dtype can not hold a value.
        """
        if is_integer(self.dtype) or self.dtype.kind == "b":
            return _to_integer(values, self.dtype)
        with np.errstate(all="ignore"):
            return values.astype(self.dtype)

    def inverse(self, dtype: np.dtype[Any]) -> Cast:
        """Back to the operand's dtype."""
        return Cast(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """Each element times a constant.

    Attributes:
        factor: The constant.
        lossy_inverse: Whether saving may divide although that rounds.
    """

    factor: float
    lossy_inverse: bool = False

    def __str__(self) -> str:
        return f"scale({self.factor!r}{_lossy(self.lossy_inverse)})"

    def result(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of the result for an operand's; the same.

        Raises:
            MappingError: The dtype can not hold the constant.
        """
        _constant(self, self.factor, dtype)
        return dtype

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The products."""
        with np.errstate(all="ignore"):
            product: np.ndarray = np.multiply(values, _constant(self, self.factor, values.dtype))
        return product

    def inverse(self, dtype: np.dtype[Any]) -> Scale:
        """Division, where it is exact: by a power of two.

        Raises:
            MappingError: It would round.
        """
        exact = self.factor != 0 and abs(math.frexp(self.factor)[0]) == 0.5
        if self.factor and not is_integer(dtype) and (exact or self.lossy_inverse):
            return Scale(1 / self.factor)
        raise MappingError(
            f"{self} does not invert exactly",
            hint="A factor that is a power of two does; or accept the rounding with"
            " lossy_inverse=True."
            if self.factor
            else None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
    """Each element plus a constant.

    Attributes:
        term: The constant.
        lossy_inverse: Whether saving may subtract although that rounds.
    """

    term: float
    lossy_inverse: bool = False

    def __str__(self) -> str:
        return f"add({self.term!r}{_lossy(self.lossy_inverse)})"

    def result(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of the result for an operand's; the same.

        Raises:
            MappingError: The dtype can not hold the constant.
        """
        _constant(self, self.term, dtype)
        return dtype

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The sums."""
        with np.errstate(all="ignore"):
            total: np.ndarray = np.add(values, _constant(self, self.term, values.dtype))
        return total

    def inverse(self, dtype: np.dtype[Any]) -> Add:
        """Subtraction, where it is exact: of zero, and of integers, which wrap around.

        Raises:
            MappingError: It would round.
        """
        wraps = is_integer(dtype) and dtype.kind == "i"
        if self.term == 0 or wraps or self.lossy_inverse:
            return Add(-self.term)
        raise MappingError(
            f"{self} does not invert exactly",
            hint="Accept the rounding with lossy_inverse=True.",
        )


ValueOp = Cast | Scale | Add
"""One operation on values."""


def apply_ops(
    values: np.ndarray, ops: tuple[ValueOp, ...], out: np.ndarray | None = None
) -> np.ndarray:
    """The operations one after the other.

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
    if values.size <= _CHUNK_ELEMENTS or not values.ndim:
        out[...] = apply_ops(values, ops)
        return out
    if len(values) == 1:
        apply_ops(values[0], ops, out[0])
        return out
    rows = max(1, _CHUNK_ELEMENTS * len(values) // values.size)
    for start in range(0, len(values), rows):
        part = slice(start, start + rows)
        if rows == 1:
            apply_ops(values[start], ops, out[start, ...])
        else:
            out[part] = apply_ops(values[part], ops)
    return out


def _lossy(flag: bool) -> str:
    return ", lossy_inverse=True" if flag else ""


def _constant(op: Scale | Add, value: float, dtype: np.dtype[Any]) -> np.ndarray:
    """A constant as an operand's dtype: rounded among floats, exact among integers."""
    if dtype.kind == "b" or not is_number(dtype):
        raise MappingError(f"{op} of {dtype.name} has no numeric meaning")
    if is_integer(dtype):
        held = float(value).is_integer()
        try:
            result = np.asarray(int(value) if held else 0, np.int64).astype(dtype)
        except OverflowError:
            held = False
        if not held or int(result) != value:
            raise MappingError(
                f"{op} of {dtype.name}: an integer tensor can not hold the constant",
                hint="Cast to a floating-point dtype first.",
            )
        return result
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype)


def _to_integer(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Checked: what C makes of a number out of range is undefined."""
    if not (is_integer(values.dtype) or values.dtype.kind == "b"):
        values = values.astype(np.float64)  # holds every float of 32 bits and fewer
        kept = np.isfinite(values) & (np.trunc(values) == values)
    else:
        kept = np.ones(values.shape, np.bool_)
        if values.dtype.name in NARROW_INTEGERS:
            values = values.astype(np.int8)
    low, high = (0, 1) if dtype.kind == "b" else integer_range(dtype)
    if values.dtype.kind == "f":  # `high + 1` is a power of two and exact, `high` may not be
        kept &= (values >= low) & (values < float(high + 1))
    elif values.dtype.kind != "b":
        bounds = np.iinfo(values.dtype)
        if low > bounds.min:
            kept &= values >= low
        if high < bounds.max:
            kept &= values <= high
    if not kept.all():
        lost = values[~kept]
        raise DtypeMismatchError(
            f"{lost.size} values do not fit the {Cast(dtype)} of a mapping",
            expected=dtype,
            found=f"for instance {lost.flat[0]}",
        )
    if dtype.name in NARROW_INTEGERS:
        values = values.astype(np.int8)  # numpy has no cast from all floats
    return values.astype(dtype)


def integer_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The least and the greatest integer of an integer dtype."""
    narrow: Any = ml_dtypes.iinfo  # untyped
    bounds = narrow(dtype) if dtype.name in NARROW_INTEGERS else np.iinfo(dtype)
    return int(bounds.min), int(bounds.max)
