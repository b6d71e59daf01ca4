"""Casts of host values: floats round, and where that is not meant every value must survive."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError
from orbax_safetensors_layout.mapping.integers import is_whole, to_whole
from orbax_safetensors_layout.mapping.values import is_number, rounded
from orbax_safetensors_layout.transfer.buffers import allocate

_CHUNK_ELEMENTS = 1 << 20  # bounds what a cast holds besides its result


class Subject(NamedTuple):
    """What is cast, for errors.

    Attributes:
        name: The leaf's name.
        file: A file that it comes from.
        source: Its dtype before the cast.
    """

    name: str
    file: str | None
    source: np.dtype


def check_castable(source: np.dtype, dtype: np.dtype) -> None:
    """Refuses casts that have no numeric meaning.

    Args:
        source: The dtype in the file.
        dtype: The dtype that is wanted.

    Raises:
        DtypeMismatchError: Complex to real, or to or from a dtype that is no number.
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
    """`value` as `dtype`, in memory that JAX's CPU backend adopts.

    Floating-point targets round as numpy does, unless `exact`. Integer and boolean targets must
    hold every value.

    Args:
        value: One box of the tensor, contiguous.
        dtype: The target.
        exact: Every value must survive: the cast was not asked for, JAX imposes it (x64 is off).
        subject: What is cast, for the error.

    Raises:
        DtypeMismatchError: A value would change.
    """
    flat = value.reshape(-1)
    result = allocate(flat.size * dtype.itemsize).view(dtype)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        result[start : start + part.size] = _cast(part, dtype, exact, subject)
    return result.reshape(value.shape)


def python_scalar(value: np.ndarray, kind: type, subject: Subject) -> bool | int | float:
    """A 0-d array as a Python scalar of the wanted type.

    Raises:
        DtypeMismatchError: The type can not hold the value.
    """
    found = value.item() if value.dtype.kind in "biufc" else float(value)
    try:
        scalar: bool | int | float = kind(found)
        kept = scalar == found or (kind is float and found != found)
    except (TypeError, ValueError, OverflowError):  # complex, NaN or infinite
        kept = False
    if not kept:
        raise DtypeMismatchError(
            f"the value is no {kind.__name__}",
            file=subject.file,
            tensor=subject.name,
            expected=kind.__name__,
            found=f"{found} ({value.dtype})",
        )
    return scalar


def _cast(value: np.ndarray, dtype: np.dtype, exact: bool, subject: Subject) -> np.ndarray:
    if is_whole(dtype):
        result, lost = to_whole(value, dtype)
        _refuse(lost, dtype, subject, exact or not is_whole(value.dtype))
        return result
    result = rounded(value, dtype)
    if exact:
        back = rounded(result, value.dtype)
        kept = (back == value) | ((back != back) & (value != value))
        _refuse(value[~kept], dtype, subject, exact)
    return result


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
