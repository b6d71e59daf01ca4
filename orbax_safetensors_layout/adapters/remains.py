"""Items of which a part is gone, as an interrupted deletion of a step leaves them."""

from __future__ import annotations

import json
import os
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import CheckpointNotFoundError, InvalidManifestError
from orbax_safetensors_layout.format import MANIFEST

from . import _orbax
from .item_save import HINT

_OURS = __name__.partition(".")[0]
_HINT = "An interrupted deletion of the step leaves this: restore another step."
_STEP_FILES = {_orbax.STEP_METADATA, _orbax.STEP_INDICATOR, "commit_success.txt", *_orbax.RESERVED}


def check_remains(folder: str | os.PathLike[str]) -> None:
    """Refuses an item that this package saved and whose manifest or files are gone.

    Orbax deletes a step file by file, and lists it as long as its folder is there. Without the
    manifest, what is left would load as a flat dict of some of the tensors. Published weights have
    no manifest either: what nothing says that this package saved is loaded.

    Args:
        folder: The item.

    Raises:
        InvalidManifestError: The item's own metadata say that there was more; or they are gone as
            well, and the step's say that this package saved it, or are gone from a step of v1.
    """
    path = ocp.path.Path(folder)
    has_manifest, has_data = (path / MANIFEST).exists(), is_safetensors_checkpoint(path)
    if has_manifest and has_data:
        return
    if has_manifest:
        is_lost = True
    elif (path / _orbax.ITEM_METADATA).exists():
        metadata = _read(path / _orbax.ITEM_METADATA)
        is_lost = MANIFEST in metadata or (not has_data and HINT in str(metadata))
    else:
        record = path.parent / _orbax.STEP_METADATA
        handlers: Any = _read(record).get("item_handlers")
        handler = handlers.get(path.name) if isinstance(handlers, dict) else None
        is_torn = (path.parent / _orbax.STEP_INDICATOR).exists() and not record.exists()
        is_lost = path.is_dir() and (is_torn or _OURS in str(handler))
    if is_lost:
        raise InvalidManifestError(
            "a part of the checkpoint is gone",
            file=path,
            expected=f"{_orbax.ITEM_METADATA}, and what it names",
            found=_names(path),
            hint=_HINT,
        )


def check_step(folder: str | os.PathLike[str], *, has_layout: bool) -> None:
    """Refuses a step that Orbax lists, and of which nothing is left that can be read.

    Args:
        folder: The step.
        has_layout: Whether to check items, which otherwise a handler does.

    Raises:
        CheckpointNotFoundError: There is no item.
        InvalidManifestError: See `check_remains`.
    """
    path = ocp.path.Path(folder)
    if not path.is_dir() or is_safetensors_checkpoint(path):
        return
    children = list(path.iterdir())
    items = [child for child in children if child.is_dir() and child.name not in _orbax.RESERVED]
    if has_layout and not any(map(is_safetensors_checkpoint, items)):
        for item in items:
            check_remains(item)
    is_step = bool(children) or path.name[-1:].isdigit()
    if is_step and not items and {child.name for child in children} <= _STEP_FILES:
        raise CheckpointNotFoundError(
            "the step holds no item", file=path, found=_names(path), hint=_HINT
        )


def _names(path: Any) -> str:
    return ", ".join(sorted(child.name for child in path.iterdir())) or "an empty folder"


def _read(path: Any) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
