"""One item of a checkpoint on its way from its folder, the same for both APIs of Orbax.

`check_step` and `check_remains` refuse what an interrupted deletion of a step leaves; Orbax deletes
a step file by file, and lists it as long as its folder is there.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import Catalog, is_safetensors_checkpoint
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidManifestError,
    UnexpectedTensorError,
)
from orbax_safetensors_layout.format import MANIFEST
from orbax_safetensors_layout.load import load_catalog
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import ReadOptions
from orbax_safetensors_layout.pytree import dotted_name

from . import _orbax
from .item_save import HINT

_PathLike = str | os.PathLike[str]
_OURS = __name__.partition(".")[0]
_STEP_FILES = {_orbax.STEP_METADATA, _orbax.STEP_INDICATOR, "commit_success.txt", *_orbax.RESERVED}
_REMAINS_HINT = "An interrupted deletion of the step leaves this: restore another step."
# The last two are all that releases of Orbax before the metadata file left in an item's folder.
_ORBAX_FILES = ("checkpoint", "manifest.ocdbt")


def begin_load(
    path: _PathLike,
    abstract: Any,
    mapping: LeafMapping | None,
    options: ReadOptions,
    switch: str | None = None,
) -> Callable[[], Any]:
    """Checks the headers of what is wanted; returns what loads it, as `osl.load` does.

    `switch` says how a user of the calling API lets the checkpoint hold more than the tree names,
    for the hint of the `UnexpectedTensorError`.
    """
    check_remains(path)
    opening = _open_checked(path, abstract, mapping, options)

    def load() -> Any:
        try:
            return load_catalog(opening, path, abstract, mapping=mapping, options=options)
        except UnexpectedTensorError as error:
            if switch is not None:
                error.hint = (
                    f"Pass {switch} to leave them out, or put `...` where a tensor is not wanted."
                )
            raise

    return load


def _open_checked(
    path: _PathLike, abstract: Any, mapping: LeafMapping | None, options: ReadOptions
) -> Callable[[], Catalog]:
    opening = functools.partial(Catalog.open, path, retries=options.retries)
    if options.replicated == "read_once" and jax.process_count() > 1:
        return opening  # all processes have to learn together that one has failed
    with contextlib.ExitStack() as on_error:
        catalog = on_error.enter_context(opening())
        names: Iterable[str] = catalog.names
        if abstract is not None and mapping is None:
            paths = jax.tree_util.tree_flatten_with_path(abstract)[0]
            names = {dotted_name(path) for path, _ in paths}.intersection(names)
        catalog.entries(names)
        on_error.pop_all()
    return lambda: catalog


def is_orbax_item(directory: _PathLike) -> bool:
    """Whether a folder holds a tree in Orbax's own format, and no safetensors files."""
    if is_safetensors_checkpoint(directory):
        return False
    folder = ocp.path.Path(directory)
    metadata = folder / _orbax.ITEM_METADATA
    if metadata.exists():  # ours is left where the files of an item of ours are gone
        return HINT not in metadata.read_text()
    return any((folder / name).exists() for name in _ORBAX_FILES)


def check_remains(folder: _PathLike) -> None:
    """Refuses an item that this package saved and whose manifest or files are gone.

    Without the manifest, the rest would load as a flat dict of some of the tensors. Published
    weights have no manifest either, so an `InvalidManifestError` needs a sign: the item's own
    metadata say that there was more; or they are gone as well, and the step's say that this package
    saved it, or are gone from a step of v1.
    """
    path = ocp.path.Path(folder)
    has_manifest, has_data = (path / MANIFEST).exists(), is_safetensors_checkpoint(path)
    if has_manifest:
        is_lost = not has_data
    elif (path / _orbax.ITEM_METADATA).exists():
        metadata = _read_json(path / _orbax.ITEM_METADATA)
        is_lost = MANIFEST in metadata or (not has_data and HINT in str(metadata))
    else:
        record = path.parent / _orbax.STEP_METADATA
        handlers: Any = _read_json(record).get("item_handlers")
        handler = handlers.get(path.name) if isinstance(handlers, dict) else None
        is_torn = (path.parent / _orbax.STEP_INDICATOR).exists() and not record.exists()
        is_lost = path.is_dir() and (is_torn or _OURS in str(handler))
    if is_lost:
        raise InvalidManifestError(
            "a part of the checkpoint is gone",
            file=path,
            expected=f"{_orbax.ITEM_METADATA}, and what it names",
            found=_names(path),
            hint=_REMAINS_HINT,
        )


def check_step(folder: _PathLike, *, has_layout: bool) -> None:
    """Refuses a step that Orbax lists, and of which nothing is left that can be read.

    With a layout the items are checked, too, which otherwise a handler does.
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
            "the step holds no item", file=path, found=_names(path), hint=_REMAINS_HINT
        )


def _names(path: Any) -> str:
    return ", ".join(sorted(child.name for child in path.iterdir())) or "an empty folder"


def _read_json(path: Any) -> dict[str, Any]:
    """A JSON object; an empty one if it cannot be read."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
