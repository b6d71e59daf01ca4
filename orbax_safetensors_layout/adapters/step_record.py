"""The record of a step that gets items of another: which handlers restore them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp_v0
import orbax.checkpoint.experimental.v1 as ocp

from . import _orbax
from .item import STEP_FILES, read_json
from .v1 import SafetensorsHandler

_NO_RECORD: dict[str, Any] = {"metrics": {}, "performance_metrics": {}, "custom_metadata": {}}


def step_files(
    source: str, target: str, items: Sequence[str], copied: Sequence[str], kind: str
) -> dict[str, bytes]:
    """Return the files, by name, of a step that gets converted and copied items of another.

    A step that is there keeps its own; a new one has those of the source. Both then name the
    handlers by which Orbax restores the items where no arguments say so.
    """
    files: dict[str, bytes] = {}
    of_source, record = _record(source), _record(target)
    saved, handlers = _handlers(of_source), _handlers(record)
    if not record:
        record = of_source
        names = (name for name in os.listdir(source) if name in STEP_FILES)
        paths = ((name, ocp.path.Path(source) / name) for name in names)
        files = {name: path.read_bytes() for name, path in paths if path.is_file()}
    is_v1 = (ocp.path.Path(source) / _orbax.STEP_INDICATOR).exists()
    orbaxs = ocp.handlers.PyTreeHandler if is_v1 else ocp_v0.PyTreeCheckpointHandler
    ours = _orbax.typestr(SafetensorsHandler)
    handlers |= {name: saved[name] for name in copied if name in saved}
    for name in items:
        known = saved.get(name, ours)
        handlers[name] = ours
        if kind == "orbax":
            handlers[name] = _orbax.typestr(orbaxs) if known == ours else known
    text = json.dumps({**_NO_RECORD, **record, "item_handlers": handlers})
    return files | {_orbax.STEP_METADATA: text.encode()}


def _record(folder: str) -> dict[str, Any]:
    return read_json(ocp.path.Path(folder) / _orbax.STEP_METADATA)


def _handlers(record: dict[str, Any]) -> dict[str, Any]:
    """Return the handlers of a record's items; none where the step is a tree without a name."""
    handlers = record.get("item_handlers")
    return dict(handlers) if isinstance(handlers, dict) else {}
