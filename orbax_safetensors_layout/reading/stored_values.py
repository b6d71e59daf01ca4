"""Stored bytes as values, where a file can hold bytes that are not values of its dtype."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orbax_safetensors_layout.errors import FormatError
from orbax_safetensors_layout.format import DTYPES, NARROW_INTEGERS, DType
from orbax_safetensors_layout.mapping import to_whole
from orbax_safetensors_layout.plan import LeafRead
from orbax_safetensors_layout.storage import Buffer


def check_booleans(values: Sequence[np.ndarray], file: str | None, name: str) -> None:
    """Refuses booleans whose bytes are neither 0 nor 1: numpy and XLA disagree about them."""
    if not values or values[0].dtype != np.bool_:
        return
    for value in values:
        if value.size and (most := value.view(np.uint8).max()) > 1:
            raise _no_values(file, name, "0 or 1", str(most))


def one_a_byte(leaf: LeafRead, value: np.ndarray) -> np.ndarray:
    """Sub-byte elements, each stored in a byte of its own, as numpy has them.

    A byte that is not an integer of the dtype is refused; of floats the low bits count.
    """
    stored = leaf.stored
    if stored.numpy.name not in NARROW_INTEGERS:
        mask = np.uint8((1 << DTYPES[stored.label].bits) - 1)
        return np.bitwise_and(value.view(np.uint8), mask).view(stored.numpy)
    return _narrow(value.view(DTYPES[stored.code].numpy), stored, leaf.file, leaf.name)


def has_all_values(dtype: DType) -> bool:
    """Whether all bytes are values of a dtype."""
    is_narrow = dtype.one_a_byte and dtype.numpy.name in NARROW_INTEGERS
    return dtype.numpy != np.bool_ and not is_narrow


def check_bytes(data: Buffer, dtype: DType, file: str, name: str) -> None:
    """Refuses bytes of a tensor that a load would refuse."""
    if dtype.numpy == np.bool_:
        check_booleans([np.frombuffer(data, np.bool_)], file, name)
    elif not has_all_values(dtype):
        _narrow(np.frombuffer(data, DTYPES[dtype.code].numpy), dtype, file, name)


def _narrow(values: np.ndarray, dtype: DType, file: str | None, name: str) -> np.ndarray:
    result, kept = to_whole(values, dtype.numpy)
    if not kept.all():
        raise _no_values(file, name, f"values of {dtype.numpy}", str(values[~kept][0]))
    return result


def _no_values(file: str | None, name: str, expected: str, found: str) -> FormatError:
    return FormatError(
        "the tensor has bytes that are not values of its dtype",
        file=file,
        tensor=name,
        expected=expected,
        found=found,
        hint="The file is damaged, or was not written as its header says: take another checkpoint.",
    )
