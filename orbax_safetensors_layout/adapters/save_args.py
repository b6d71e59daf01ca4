"""What Orbax v0's save arguments say about single leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from orbax_safetensors_layout.errors import MismatchError


def leaf_dtypes(args: Any) -> Sequence[Any] | None:
    """The dtype that `save_args` ask for, for each leaf of `item`; None where they say nothing.

    Arguments are read by attribute, so that every registered class works. Of `ocp.SaveArgs` the
    `dtype` counts; the others are about how Orbax's own format stores arrays.

    Raises:
        MismatchError: `save_args` is no tree of the item's structure.
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
