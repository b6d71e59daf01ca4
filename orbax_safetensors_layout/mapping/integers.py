"""Integer dtypes, also those narrower than a byte, and casts to them that keep every value."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors_layout.format import NARROW_INTEGERS


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds integers."""
    return dtype.kind in "iu" or dtype.name in NARROW_INTEGERS


def is_whole(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds integers or truth values."""
    return is_integer(dtype) or dtype.kind == "b"


def to_whole(values: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Cast values to an integer dtype, or to truth values.

    Checked by range, not by a round trip: C leaves the cast of a number out of range undefined.

    Returns:
        The values in the dtype, and those that it cannot hold, flat. Where there are any, the
        former are undefined.

    Example:
        >>> to_whole(np.array([1.0, 2.5, 300.0]), np.dtype("int8"))[1]
        array([  2.5, 300. ])
    """
    result, kept = whole_or_lost(values, dtype)
    return result, values[~kept]


def whole_or_lost(values: np.ndarray, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Cast values to an integer dtype or truth values; return for each whether it is kept, too.

    Where it is not, the result is undefined.
    """
    low, high = (0, 1) if dtype.kind == "b" else whole_range(dtype)
    kept = np.ones(values.shape, np.bool_)
    if not is_whole(values.dtype):
        with np.errstate(invalid="ignore"):  # of signalling NaN
            values = values.astype(np.float64)  # holds every float of 32 bits and fewer
            # As floats: `high + 1` is a power of two and exact, `high` may not be.
            kept = np.isfinite(values) & (np.trunc(values) == values)
            kept &= (values >= low) & (values < float(high + 1))
    elif values.dtype.kind != "b":
        if values.dtype.name in NARROW_INTEGERS:
            values = values.astype(np.int8)
        bounds = np.iinfo(values.dtype)
        if low > bounds.min:
            kept &= values >= low
        if high < bounds.max:
            kept &= values <= high
    with np.errstate(invalid="ignore"):
        if dtype.name in NARROW_INTEGERS:
            values = values.astype(np.int8)  # numpy has no cast from all floats
        return values.astype(dtype), kept


def whole_range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Return the least and the greatest integer of a dtype."""
    narrow: Any = ml_dtypes.iinfo  # untyped
    bounds = narrow(dtype) if dtype.name in NARROW_INTEGERS else np.iinfo(dtype)
    return int(bounds.min), int(bounds.max)
