"""Compares what was saved with the arrays, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors
from cases import data_files
from child import assert_same_bits
from contenders import Abstract, Tree

import orbax_safetensors_layout as osl


def verify(result: str, folder: Path, arrays: Tree, names: Sequence[str]) -> int:
    """Compares some of the tensors; returns how many.

    Args:
        result: See `Contender.result`.
        folder: What was saved.
        arrays: What should have been.
        names: The tensors to compare. What only comes back as a whole (OCDBT, and this package's
            layout "sharded") is left alone unless these are all.

    Raises:
        AssertionError: A tensor is missing, or of another dtype, shape or value.
    """
    if result == "safetensors":
        return _verify_files(folder, arrays, names)
    if len(names) < len(arrays):
        return 0
    if result == "sharded":
        return _verify_arrays(osl.load(folder, _abstract(arrays)), arrays)
    # On one device, since Orbax would make eight copies of what is replicated.
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {name: leaf.update(sharding=one) for name, leaf in _abstract(arrays).items()}
    with ocp.StandardCheckpointer() as checkpointer:
        return _verify_arrays(checkpointer.restore(folder, abstract), arrays)


def _abstract(arrays: Tree) -> Abstract:
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in arrays.items()
    }


def _verify_files(folder: Path, arrays: Tree, names: Sequence[str]) -> int:
    """With the `safetensors` library."""
    wanted, seen = set(names), set()
    for path in data_files(folder):
        with safetensors.safe_open(path, "numpy") as file:
            keys = set(file.keys())
            seen |= keys
            for name in sorted(keys & wanted):
                _assert_same(name, file.get_tensor(name), arrays[name])
    _assert_names(seen, arrays)
    return len(names)


def _verify_arrays(found: Tree, arrays: Tree) -> int:
    """Uses up what was found, lest all of it is gathered at once."""
    _assert_names(set(found), arrays)
    for name, array in arrays.items():
        _assert_same(name, np.asarray(found.pop(name)), array)
    return len(arrays)


def _assert_names(found: set[str], arrays: Tree) -> None:
    if found != set(arrays):
        raise AssertionError(f"{len(found)} tensors were saved of {len(arrays)}.")


def _assert_same(name: str, found: np.ndarray, array: jax.Array) -> None:
    if found.dtype != array.dtype or found.shape != array.shape:
        raise AssertionError(f"{name} is {found.shape} {found.dtype}, saved as {array.aval}.")
    assert_same_bits(name, array, found.view(f"u{found.dtype.itemsize}"))
