"""Items of which a part is gone, as an interrupted deletion of a step leaves them."""

from __future__ import annotations

import json
import os
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.errors import InvalidManifestError
from orbax_safetensors_layout.format import MANIFEST

from . import _orbax

_OURS = __name__.partition(".")[0]


def check_remains(folder: str | os.PathLike[str]) -> None:
    """Refuses an item that this package saved and whose manifest is gone.

    Orbax deletes a step file by file, and lists it as long as its folder is there. Without the
    manifest, what is left would load as a flat dict of some of the tensors. Published weights have
    no manifest either: what nothing says that this package saved is loaded.

    Args:
        folder: The item.

    Raises:
        InvalidManifestError: The item's own metadata say that there was one; or they are gone as
            well, and the step's say that this package saved it, or are gone from a step of v1.
    """
    path = ocp.path.Path(folder)
    if (path / MANIFEST).exists():
        return
    if (path / _orbax.ITEM_METADATA).exists():
        is_lost = MANIFEST in _read(path / _orbax.ITEM_METADATA)
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
            found=", ".join(sorted(one.name for one in path.iterdir())),
            hint="An interrupted deletion of the step leaves this: restore another step.",
        )


def _read(path: Any) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
