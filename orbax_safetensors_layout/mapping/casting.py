"""Casts host values: floats round, and where that is not intended every value must survive."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError

from .expr.values import assign, is_number, rounded
from .integers import is_whole, to_whole, whole_or_lost


class Subject(NamedTuple):
    """The leaf that is cast, for errors; `source` is its dtype before the cast."""

    name: str
    file: str | None
    source: np.dtype


def check_castable(source: np.dtype, dtype: np.dtype) -> None:
    """Refuses a cast from complex to real, or from or to a dtype that is not a number.

    Args:
        source: The dtype in the file.
        dtype: The dtype of the abstract tree.
    """
    if source == dtype:
        return
    if not (is_number(source) and is_number(dtype)):
        problem = "a cast that has no numeric meaning"
    elif source.kind == "c" and dtype.kind != "c":
        problem = "a cast from complex to real numbers would drop the imaginary part"
    else:
        return
    raise DtypeMismatchError(problem, expected=f"{dtype} (the abstract tree)", found=source)


def cast(value: np.ndarray, dtype: np.dtype, *, exact: bool, subject: Subject) -> np.ndarray:
    """Return `value` as `dtype`; see `cast_into`."""
    out = np.empty(value.shape, dtype)
    cast_into(out, value, exact=exact, subject=subject)
    return out


def cast_into(out: np.ndarray, value: np.ndarray, *, exact: bool, subject: Subject) -> None:
    """Cast `value` into `out`.

    Floating-point targets round as numpy does, unless `exact`. Integer and boolean targets must
    hold every value.

    Args:
        out: Where the values go.
        value: Some values of a tensor.
        exact: Every value must survive: the cast was not asked for, JAX imposes it (x64 is off).
        subject: The leaf, for the error.

    Raises:
        DtypeMismatchError: A value would change.
    """
    if is_whole(out.dtype):
        result, lost = to_whole(value, out.dtype)
        _refuse(lost, out.dtype, subject, exact or not is_whole(value.dtype))
        out[...] = result
        return
    assign(out, value)
    if exact:
        _refuse(value[~_survived(value, out)], out.dtype, subject, exact)


def _survived(value: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return for each value whether a cast to floating-point numbers has kept it."""
    real = result if value.dtype.kind == "c" else result.real
    kept: np.ndarray
    with np.errstate(invalid="ignore"):  # of signalling NaN
        if is_whole(value.dtype):
            back, held = whole_or_lost(real, value.dtype)
            kept = held & (back == value)
        else:
            back = rounded(real, value.dtype)
            kept = (back == value) | ((back != back) & (value != value))
    return kept


def python_scalar(value: np.ndarray, kind: type, subject: Subject) -> bool | int | float:
    """Return a 0-d array as a Python scalar of a type, which must hold the value."""
    number = value.item() if value.dtype.kind in "biufc" else float(value)
    try:
        scalar: bool | int | float = kind(number)
        kept = scalar == number or (kind is float and number != number)
    except (TypeError, ValueError, OverflowError):  # complex, NaN or infinite
        kept = False
    if not kept:
        raise DtypeMismatchError(
            f"the value is no {kind.__name__}",
            file=subject.file,
            tensor=subject.name,
            expected=kind.__name__,
            found=f"{number} ({value.dtype})",
        )
    return scalar


def _refuse(lost: np.ndarray, dtype: np.dtype, subject: Subject, exact: bool) -> None:
    if not lost.size:
        return
    source = subject.source
    hint = "Ask for a dtype that holds the values."
    if exact and source.itemsize == 8 and dtype.itemsize == 4:
        hint = (
            "If the tree asks for 64 bits: JAX's are off; set"
            " jax.config.update('jax_enable_x64', True), or ask for a dtype that holds the values."
        )
    raise DtypeMismatchError(
        f"{lost.size} values do not fit {dtype}",
        file=subject.file,
        tensor=subject.name,
        expected=dtype,
        found=f"{source}, for instance {lost[0]}",
        hint=hint,
    )
