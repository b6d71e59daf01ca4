"""What is at a path: a safetensors checkpoint, or one of Orbax's, in a step or an item."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from orbax_safetensors_layout.catalog import USUAL_ITEMS, CheckpointRef, is_safetensors_checkpoint
from orbax_safetensors_layout.conversion import (
    CheckpointReader,
    SafetensorsReader,
)
from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.options import ReadOptions

from .._orbax import ITEM_METADATA, STEP_METADATA
from .orbax_reader import OrbaxReader

_STEP = re.compile(r"(?:.*[^0-9])?0*([0-9]+)")


def locate(path: str, *, step: int | None = None, item: str | None = None) -> CheckpointRef:
    """Finds the tree that is meant.

    Args:
        path: A checkpoint, or with `step` the directory of a `CheckpointManager`.
        step: The step.
        item: The item; by default the only one, `default` or `state`.

    Raises:
        CheckpointNotFoundError: There is none, or it is not clear which is meant.
    """
    folder = path if step is None else _step_folder(path, step)
    if item is None and _is_tree(folder):
        return CheckpointRef(folder, not is_safetensors_checkpoint(folder), None)
    items = [name for name in _folders(folder) if _is_tree(os.path.join(folder, name))]
    usual = [name for name in USUAL_ITEMS if name in items]
    chosen = [item] if item is not None else items if len(items) == 1 else usual
    found = next((name for name in chosen if name in items), None)
    if found is None:
        raise CheckpointNotFoundError(
            "no checkpoint stands there",
            file=folder,
            expected="a safetensors checkpoint, or one that Orbax saved",
            found=f"the items {items}" if items else "none of their files",
            hint=_hint(folder, items, step),
        )
    inner = os.path.join(folder, found)
    return CheckpointRef(inner, not is_safetensors_checkpoint(inner), found)


def _hint(folder: str, items: list[str], step: int | None) -> str | None:
    if items:
        return "Name the item's folder; `convert` also takes item= (--item)."
    steps = [int(match[1]) for name in _folders(folder) if (match := _STEP.fullmatch(name))]
    if steps and step is None and not is_orbax_checkpoint(folder):
        return (
            f"Name the step's folder; `convert` also takes step= (--step). There are"
            f" {sorted(steps)[-5:]}."
        )
    return None


def holds_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint of either kind, or a step."""
    return _is_tree(folder) or is_orbax_checkpoint(folder)


def is_orbax_checkpoint(folder: str) -> bool:
    """Whether Orbax made a folder."""
    return any(os.path.exists(os.path.join(folder, n)) for n in (ITEM_METADATA, STEP_METADATA))


def open_reader(
    location: CheckpointRef,
    options: ReadOptions,
    tell: Callable[[StorageError], None] | None = None,
) -> CheckpointReader:
    """Opens a checkpoint to read it.

    Args:
        location: Where it is.
        options: How to read safetensors.
        tell: Told of arrays of Orbax that cannot be opened, which are then left out.

    Raises:
        CheckpointNotFoundError: It cannot be opened.
        FormatError: It is malformed.
        StorageError: Arrays cannot be opened, and `tell` is not given.
    """
    if location.is_orbax:
        return OrbaxReader(location.path, tell)
    return SafetensorsReader(location.path, options)


def _is_tree(path: str) -> bool:
    return is_safetensors_checkpoint(path) or os.path.isfile(os.path.join(path, ITEM_METADATA))


def _step_folder(path: str, step: int) -> str:
    names = [
        name
        for name in _folders(path)
        if (match := _STEP.fullmatch(name)) is not None and int(match[1]) == step
    ]
    if len(names) != 1:
        raise CheckpointNotFoundError(
            f"there is no step {step}" if not names else f"several folders are step {step}",
            file=path,
            found=names or _folders(path)[-10:],
        )
    return os.path.join(path, names[0])


def _folders(path: str) -> list[str]:
    if not os.path.isdir(path):
        return []
    return sorted(name for name in os.listdir(path) if os.path.isdir(os.path.join(path, name)))
