"""What Orbax's save arguments (v0) and storage options (v1) ask of single leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.errors import MismatchError

from . import _orbax

_StorageOptions = ocp.options.ArrayOptions.Saving.StorageOptions


def leaf_dtypes(args: Any) -> Sequence[Any] | None:
    """The dtype that `save_args` ask for, for each leaf of `item`; None where they say nothing.

    Arguments are read by attribute, so that every registered class works. Of `ocp.SaveArgs` the
    `dtype` counts; the others are about how Orbax's own format stores arrays.

    Raises:
        MismatchError: `save_args` is not a tree of the item's structure.
    """
    save_args = getattr(args, "save_args", None)
    if save_args is None:
        return None
    structure: Any = jax.tree.structure(args.item)
    try:
        found = structure.flatten_up_to(save_args)
    except (ValueError, TypeError, KeyError) as error:
        raise MismatchError(
            f"save_args does not fit the item: {error}",
            expected="a tree of the item's structure, of `ocp.SaveArgs` or None",
        ) from error
    return [getattr(leaf, "dtype", None) for leaf in found]


def storage_dtypes(tree: Any) -> Sequence[Any] | None:
    """The dtype that Orbax's context (v1) asks for, for each leaf; None where it says nothing.

    Of `context.array.saving.storage_options`, and of what `scoped_storage_options_creator` returns
    for a leaf, the `dtype` counts; the others are about how Orbax's own format stores arrays.

    Raises:
        ValueError: An option is none, or its dtype.
    """
    saving = _orbax.get_context().array.saving
    create = saving.scoped_storage_options_creator
    usual = _dtype(saving.storage_options, "storage_options")
    if create is None and usual is None:
        return None

    def asked(path: Any, leaf: Any) -> Any:
        options = None if create is None else create(path, leaf)
        scoped = _dtype(options, "scoped_storage_options_creator")
        return usual if scoped is None else scoped

    return [asked(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _dtype(options: Any, name: str) -> Any:
    if options is not None and not isinstance(options, _StorageOptions):
        raise ValueError(
            f"context.array.saving.{name} gives {options!r}; it must be `StorageOptions` or None."
        )
    if options is None or options.dtype is None:
        return None
    try:
        return np.dtype(options.dtype)
    except TypeError as error:
        raise ValueError(
            f"context.array.saving.{name} gives the dtype {options.dtype!r}, which is none."
        ) from error
