"""Casts of host values that never turn a number into another one unseen."""

from __future__ import annotations

import numpy as np

from orbax_safetensors_layout.errors import DtypeMismatchError
from orbax_safetensors_layout.format.header import TensorEntry
from orbax_safetensors_layout.plan.reads import LeafRead

_NARROW_INTEGERS = {"int2", "uint2", "int4", "uint4"}  # ml_dtypes' integers have no numpy kind


def check_castable(entry: TensorEntry, leaf: str, dtype: np.dtype) -> None:
    """Refuses casts that have no numeric meaning.

    Raises:
        DtypeMismatchError: Complex to real, or to or from a dtype that is no number.
    """
    source = entry.dtype.numpy
    if source == dtype:
        return
    numeric = "biufcV"  # V: the ml_dtypes floats
    if source.kind not in numeric or dtype.kind not in numeric or dtype.names:
        problem = "a cast that has no numeric meaning"
    elif source.kind == "c" and dtype.kind != "c":
        problem = "a cast from complex to real numbers would drop the imaginary part"
    else:
        return
    raise DtypeMismatchError(
        problem, file=entry.file, tensor=leaf, expected=f"{dtype} (the abstract tree)", found=source
    )


def cast(value: np.ndarray, dtype: np.dtype, *, exact: bool, leaf: LeafRead) -> np.ndarray:
    """`value` as `dtype`.

    Floating-point targets round as numpy does, unless `exact`. Integer and boolean targets must
    hold every value.

    Args:
        value: One box of the tensor.
        dtype: The target.
        exact: Every value must survive: the cast was not asked for, JAX imposes it (x64 is off).
        leaf: The leaf, for the error.

    Raises:
        DtypeMismatchError: A value would change.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = value.astype(dtype)
        if exact or dtype.kind in "biu" or dtype.name in _NARROW_INTEGERS:
            back = result.astype(value.dtype)
            kept = (back == value) | ((back != back) & (value != value))
            kept &= (result < 0) == (value < 0)  # wrapping around comes back equal
            if not kept.all():
                _refuse(value[~kept], dtype, exact, leaf)
    return result


def _refuse(values: np.ndarray, dtype: np.dtype, exact: bool, leaf: LeafRead) -> None:
    hint = "Ask for a dtype that holds the values."
    if exact:
        hint = (
            "JAX's 64-bit types are off: set jax.config.update('jax_enable_x64', True), or ask for"
            f" {dtype} in the abstract tree if rounding is meant."
        )
    raise DtypeMismatchError(
        f"{values.size} values do not fit {dtype}",
        file=leaf.entry.file,
        tensor=leaf.name,
        expected=dtype,
        found=f"{leaf.entry.dtype.numpy}, for instance {values.flat[0]}",
        hint=hint,
    )
