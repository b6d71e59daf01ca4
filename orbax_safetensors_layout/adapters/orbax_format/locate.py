"""Resolves a path to a safetensors checkpoint or one of Orbax's, in a step or an item."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from orbax_safetensors_layout.catalog import USUAL_ITEMS, CheckpointRef, is_safetensors_checkpoint
from orbax_safetensors_layout.conversion import CheckpointReader, SafetensorsReader
from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError, listed
from orbax_safetensors_layout.options import ReadOptions

from .._orbax import ITEM_METADATA, STEP_METADATA
from .orbax_reader import OrbaxReader


def locate(path: str, *, step: int | None = None, item: str | None = None) -> CheckpointRef:
    """Resolves a path, with a step a manager's, to an item: by default the only or a usual one."""
    folder = path if step is None else _step_folder(path, step)
    if item is None and _is_tree(folder):
        return CheckpointRef(folder, not is_safetensors_checkpoint(folder), None)
    items = [name for name in _folders(folder) if _is_tree(os.path.join(folder, name))]
    candidates = (item,) if item is not None else items if len(items) == 1 else USUAL_ITEMS
    chosen = next((name for name in candidates if name in items), None)
    if chosen is None:
        raise CheckpointNotFoundError(
            "the path does not hold a checkpoint",
            file=folder,
            expected="a safetensors checkpoint, or one that Orbax saved",
            found=f"the items {listed(items)}" if items else "none of their files",
            hint=_hint(folder, items, step),
        )
    inner = os.path.join(folder, chosen)
    return CheckpointRef(inner, not is_safetensors_checkpoint(inner), chosen)


def _hint(folder: str, items: list[str], step: int | None) -> str | None:
    if items:
        return "Name the item's folder; `convert` also takes item= (--item)."
    steps = sorted(_steps(folder).values())
    if not steps or step is not None or is_orbax_checkpoint(folder):
        return None
    return f"Name the step's folder; `convert` also takes step= (--step). There are {steps[-5:]}."


def holds_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint of either kind, or a step."""
    return is_safetensors_checkpoint(folder) or is_orbax_checkpoint(folder)


def is_orbax_checkpoint(folder: str) -> bool:
    """Whether Orbax made a folder."""
    return any(os.path.exists(os.path.join(folder, n)) for n in (ITEM_METADATA, STEP_METADATA))


def open_reader(
    ref: CheckpointRef, options: ReadOptions, on_error: Callable[[StorageError], None] | None = None
) -> CheckpointReader:
    """Opens a checkpoint: one of safetensors with `options`, one of Orbax with `on_error`."""
    if ref.is_orbax:
        return OrbaxReader(ref.path, on_error)
    return SafetensorsReader(ref.path, options)


def _is_tree(path: str) -> bool:
    return is_safetensors_checkpoint(path) or os.path.isfile(os.path.join(path, ITEM_METADATA))


def _step_folder(path: str, step: int) -> str:
    names = [name for name, number in _steps(path).items() if number == step]
    if len(names) != 1:
        raise CheckpointNotFoundError(
            f"there is no step {step}" if not names else f"several folders are step {step}",
            file=path,
            found=listed(names or _folders(path)[::-1]),
        )
    return os.path.join(path, names[0])


def _steps(path: str) -> dict[str, int]:
    """The steps that folders are named after, as `step_0007` is."""
    matches = {name: re.fullmatch(r"(?:.*[^0-9])?0*([0-9]+)", name) for name in _folders(path)}
    return {name: int(match[1]) for name, match in matches.items() if match is not None}


def _folders(path: str) -> list[str]:
    if not os.path.isdir(path):
        return []
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
