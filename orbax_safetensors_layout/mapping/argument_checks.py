"""Checks what users give to expressions and rules, and returns it as the intended type.

Others are refused with a `MappingError` that names `what`, the user's function that takes it.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

_INT64_MAX = (1 << 63) - 1
_MOST_ITEMS = 1 << 24  # several times the tokens of the largest vocabularies


def integer(value: Any, what: str) -> int:
    """Return an integer that can be an index."""
    return integers((value,), what)[0]


def integers(items: Iterable[Any], what: str, most: int = _MOST_ITEMS) -> tuple[int, ...]:
    """Return integers that can be indices, `most` at most."""
    try:
        given = several(items, what, most)
        if any(isinstance(item, bool | np.bool_) for item in given):
            raise TypeError("an index cannot be a boolean")
        indices = tuple(map(operator.index, given))
    except TypeError as error:
        raise MappingError(f"{what} takes integers", found=short_repr(items)) from error
    if indices and max(map(abs, indices)) > _INT64_MAX:
        raise MappingError(f"{what} takes integers of 64 bits", found=short_repr(indices))
    return indices


def number(value: Any, what: str) -> float:
    """Return a real number that is a Python int or float, or a 0-d array."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "__array__"):  # of JAX too
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # keys, traced, deleted
            value = np.asarray(value)
    kind = getattr(value, "dtype", None)
    is_array = isinstance(value, np.ndarray) and not value.shape
    if isinstance(value, int | float) or (is_array and np.dtype(kind).kind in "biufV"):
        with contextlib.suppress(OverflowError, TypeError, ValueError):
            scalar = value.item() if isinstance(value, np.ndarray) else value
            real = float(scalar)
            return scalar if isinstance(scalar, int | float) else real
    raise MappingError(f"{what} takes a real number", found=short_repr(value))


def text(value: Any, what: str) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise MappingError(f"{what} takes a string", found=short_repr(value))
    return value


def several(items: Any, what: str, most: int = _MOST_ITEMS) -> tuple[Any, ...]:
    """Return the items of an iterable that is not a string, `most` at most."""
    with contextlib.suppress(TypeError):
        if not isinstance(items, str | bytes):
            first = tuple(itertools.islice(items, most + 1))
            if len(first) <= most:
                return first
            raise MappingError(f"{what} takes {most:,} items at most", found=short_repr(items))
    raise MappingError(f"{what} takes a list", found=short_repr(items))
