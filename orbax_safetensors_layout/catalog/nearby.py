"""Checkpoints below a folder that is not one: the item of a step, and hints for errors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import StorageError
from orbax_safetensors_layout.format import INDEX_SUFFIX, SUFFIX, natural_key
from orbax_safetensors_layout.storage import Storage, join

ORBAX_ITEM = "_METADATA"
"""The file that every tree has which Orbax saved."""

ORBAX_STEP = ("_CHECKPOINT_METADATA", "orbax.checkpoint")
"""The files that a step of Orbax has."""

USUAL_ITEMS = ("default", "state")
"""The items that are opened where a step has several: those of Orbax v0 and v1."""

_MOST_FOUND, _MOST_FOLDERS, _DEPTH = 5, 100, 3


class CheckpointRef(NamedTuple):
    """The place of a checkpoint's tree.

    Attributes:
        path: Its folder or file.
        is_orbax: Whether it is in Orbax's own format.
        item: Its item, of a checkpoint with several.
    """

    path: str
    is_orbax: bool
    item: str | None


class CheckpointsBelow(NamedTuple):
    """Paths of checkpoints, relative to the folder that they are below.

    Attributes:
        safetensors: Folders of safetensors files.
        orbax: Checkpoints in Orbax's own format.
    """

    safetensors: list[str]
    orbax: list[str]

    def hint(self) -> str | None:
        """Return which paths the user can give instead."""
        said = []
        if self.safetensors:
            said.append(f"Give a checkpoint below it: {', '.join(self.safetensors)}.")
        if self.orbax:
            said.append(
                f"In Orbax's own format stand below it: {', '.join(self.orbax)}. Restore those with"
                " Orbax's handlers, or make safetensors of them with `osl.convert`."
            )
        return " ".join(said) or None


def has_safetensors(names: Sequence[str]) -> bool:
    """Return whether a folder with these files is a safetensors checkpoint."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def item_of_step(storage: Storage, step: str) -> str | None:
    """Returns the name of the safetensors item of a step: the only one, else the usual one."""
    items = [
        name
        for name in storage.folders(step)
        if not name.startswith(".") and has_safetensors(storage.list(join(step, name)))
    ]
    if len(items) == 1:
        return items[0]
    return next((name for name in USUAL_ITEMS if name in items), None)


def checkpoints_below(storage: Storage, folder: str) -> CheckpointsBelow:
    """Looks for checkpoints in a folder's folders, those of the highest numbers first."""
    below = CheckpointsBelow([], [])
    left = [""]
    looked = 0
    while left and looked < _MOST_FOLDERS and len(below.safetensors) < _MOST_FOUND:
        inner = left.pop()
        looked += 1
        place = join(folder, inner) if inner else folder
        with contextlib.suppress(StorageError):  # one may not look into it
            names = storage.list(place) if inner else []
            if has_safetensors(names):
                below.safetensors.append(inner)
            elif ORBAX_ITEM in names:
                if len(below.orbax) < _MOST_FOUND:
                    below.orbax.append(inner)
            elif inner.count("/") + bool(inner) < _DEPTH:
                found = [name for name in storage.folders(place) if not name.startswith(".")]
                found.sort(key=natural_key)
                left += [join(inner, name) if inner else name for name in found]
    return below
