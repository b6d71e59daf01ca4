"""What users give to expressions and rules, as the type that is meant, or an error by name."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

_INT64_MAX = (1 << 63) - 1


def integer(value: Any, what: str) -> int:
    """An integer that an index can be.

    Raises:
        MappingError: It is none.
    """
    return integers((value,), what)[0]


def integers(items: Iterable[Any], what: str) -> tuple[int, ...]:
    """Integers that indices can be.

    Args:
        items: The integers, or one iterable of them.
        what: What takes them, for the message.

    Raises:
        MappingError: They are none.
    """
    try:
        found = tuple(map(operator.index, items))
    except TypeError as error:
        raise MappingError(f"{what} takes integers", found=short_repr(items)) from error
    if found and max(map(abs, found)) > _INT64_MAX:
        raise MappingError(f"{what} takes integers of 64 bits", found=short_repr(found))
    return found


def number(value: Any, what: str) -> float:
    """A real number.

    Raises:
        MappingError: It is none, or too large.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "__array__"):  # of JAX too
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # keys, traced, deleted
            value = np.asarray(value)
    kind = getattr(value, "dtype", None)
    is_array = isinstance(value, np.ndarray) and not value.shape
    if isinstance(value, int | float) or (is_array and np.dtype(kind).kind in "biufV"):
        try:
            value = value.item() if isinstance(value, np.ndarray) else value
            if isinstance(value, int | float):
                float(value)
                return value
            return float(value)
        except (OverflowError, TypeError, ValueError):
            pass
    raise MappingError(f"{what} takes a real number", found=short_repr(value))


def text(value: Any, what: str) -> str:
    """A string.

    Raises:
        MappingError: It is none.
    """
    if not isinstance(value, str):
        raise MappingError(f"{what} takes a string", found=short_repr(value))
    return value


def several(items: Any, what: str) -> tuple[Any, ...]:
    """The items of a list, or of anything else that has some; a string is none.

    Raises:
        MappingError: It has no items.
    """
    try:
        if not isinstance(items, str | bytes):
            return tuple(items)
    except TypeError:
        pass
    raise MappingError(f"{what} takes a list", found=short_repr(items))
