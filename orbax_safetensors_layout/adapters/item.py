"""One item of a checkpoint on its way to its folder and back, the same for both APIs of Orbax."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp

from orbax_safetensors_layout.catalog import Catalog, is_safetensors_checkpoint
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    InvalidManifestError,
    MismatchError,
    ShapeMismatchError,
    StorageError,
    UnexpectedTensorError,
    listed,
)
from orbax_safetensors_layout.format import MANIFEST, NamedRecord
from orbax_safetensors_layout.load import LoadRequest, begin_requested, telling_others
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import PathLike, ReadOptions, WriteOptions
from orbax_safetensors_layout.save import PreparedSave, save_group
from orbax_safetensors_layout.sharding import decode_sharding
from orbax_safetensors_layout.storage import open_storage, storage_errors

from . import _orbax
from .background import in_callers_context

_HINT = "This folder holds safetensors files, not a checkpoint in Orbax's own format"
ADVICE = (
    f"{_HINT}: restore it with orbax_safetensors_layout, for the item of this folder's name (v0:"
    " handler_registry=osl.handler_registry(name), v1: osl.context(name) or osl.install()), or make"
    " Orbax's own of it with osl.convert(...)"
)
# Orbax v1 takes a folder for a pytree by this file's presence. What is in it, only Orbax's own
# handlers read; theirs is then the error "ValueError: '<the advice>' is not a valid KeyType".
_ITEM_METADATA = {"tree_metadata": {"": {"key_metadata": [{"key": "", "key_type": ADVICE}]}}}
# A part of what was saved is gone if the manifest is; see `check_remains`.
_WITH_MANIFEST = _ITEM_METADATA | {MANIFEST: True}
_POLL_SECONDS = 0.05
_OURS = __name__.partition(".")[0]
STEP_FILES = {_orbax.STEP_METADATA, _orbax.STEP_INDICATOR, "commit_success.txt", *_orbax.RESERVED}
_REMAINS_HINT = "An interrupted deletion of the step leaves this: restore another step."
# The last two are all that releases of Orbax before the metadata file left in an item's folder.
_ORBAX_FILES = ("checkpoint", "manifest.ocdbt")


class InvalidLayoutError(CheckpointNotFoundError, ocp.errors.InvalidLayoutError):
    """Nothing, or something else, is at a path that Orbax was given."""


def item_metadata(*, has_manifest: bool) -> dict[str, bytes]:
    """Return the file by which Orbax takes a folder of ours for an item, by its name."""
    metadata = _WITH_MANIFEST if has_manifest else _ITEM_METADATA
    return {_orbax.ITEM_METADATA: json.dumps(metadata).encode() + b"\n"}


class _Turn:
    """Admits only the newest save to a folder: one that Orbax gave up may still run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.newest = 0


_turns: weakref.WeakValueDictionary[str, _Turn] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()


class ItemSave:
    """The blocking phase of a save; all processes make these in the same order.

    What this process writes is then on the host, or as much of it as the memory budget holds. The
    folder need not exist yet; processes find each other by it. `write` calls `wait`, which waits
    for the folder, unless it is None. `dtypes` has for each leaf the one to write it in.
    """

    def __init__(
        self,
        folder: PathLike,
        tree: Any,
        options: WriteOptions,
        *,
        mapping: LeafMapping | None,
        custom: object = None,
        dtypes: Sequence[Any] | None,
        wait: Callable[[], None] | None,
    ) -> None:
        if options.quantize is not None:
            raise InvalidArgumentError(
                "WriteOptions(quantize=...) is for osl.save: a step that is saved quantised could"
                " not be resumed."
            )
        self._retries = options.retries
        has_manifest = mapping is None or options.layout == "sharded"
        self._sidecar_files = item_metadata(has_manifest=has_manifest)
        self._wait = wait
        self._group = save_group(folder, options)
        with _turns_lock:
            self._turn = _turns.setdefault(os.fspath(folder), _Turn())
        with self._turn.lock:
            self._turn.newest = self._group.number
        try:
            self._prepared = PreparedSave.of(
                tree, options, mapping=mapping, custom=custom, dtypes=dtypes
            )
            self._prepared.capture()
        except BaseException as error:
            self._group.fail(error)
            raise
        # Where one process raises, all must: Orbax has them wait for each other when this returns.
        self._group.barrier("planning the save")
        self.write: Callable[[PathLike], None] = in_callers_context(self._write)

    def start(self, folder: PathLike) -> concurrent.futures.Future[None]:
        """Writes in a thread, and waits until the caller may change the arrays."""
        pool = concurrent.futures.ThreadPoolExecutor(1, "safetensors_save")
        future = pool.submit(self.write, folder)
        pool.shutdown(wait=False)
        while not self._prepared.values.wait_captured(_POLL_SECONDS) and not future.done():
            pass
        return future

    def _write(self, folder: PathLike) -> None:
        with contextlib.closing(self._prepared.values), self._group:
            if self._wait is not None:
                with (
                    self._group.together("making the folder"),
                    storage_errors("the folder cannot be made", os.fspath(folder)),
                ):
                    self._wait()
            storage, target = open_storage(folder, retries=self._retries)
            with self._turn.lock, storage:
                if self._turn.newest != self._group.number:
                    raise StorageError("a later save to this folder has begun", file=target)
                files = self._sidecar_files
                if self._group.is_leader:
                    files = {**self._prepared.sidecar_files(target), **files}
                self._prepared.write(
                    target, group=self._group, storage=storage, sidecar_files=files
                )


def begin_load(
    path: PathLike,
    abstract: Any,
    mapping: LeafMapping | None,
    options: ReadOptions,
    *,
    partial: bool,
    resizes: str,
    leaves_out: str | None = None,
) -> Callable[[], Any]:
    """Holds the tree against the headers; returns a function that loads it.

    With `partial`, leaves that the checkpoint lacks come back as they are given. `resizes` is for
    a hint what lets arrays be of other shapes than the tree's, `leaves_out` what lets the
    checkpoint hold more than the tree.
    """
    request = LoadRequest(abstract, mapping, None, options, partial)

    def open_catalog() -> Catalog:
        check_remains(path)
        with contextlib.ExitStack() as on_error:
            catalog = on_error.enter_context(request.open(path))
            if abstract is None and mapping is None:
                _check_devices(catalog)
            on_error.pop_all()
        return catalog

    try:
        return begin_requested(path, request, open_catalog)
    except UnexpectedTensorError as error:
        if leaves_out is not None:
            error.hint = f"Pass {leaves_out} to leave them out, or put `...` in their place."
        raise
    except ShapeMismatchError as error:
        if mapping is None:
            error.hint = (
                f"{error.hint} {resizes} cuts `jax.Array`s of as many dimensions, or fills them up"
                " with zeros."
            )
        raise


def _check_devices(catalog: Catalog) -> None:
    """Refuses to restore everything as it was where there are no such devices, as Orbax does."""
    manifest = catalog.manifest()
    for record in () if manifest is None else manifest.shardings:
        if decode_sharding(record) is None:
            devices = record.mesh.devices if isinstance(record, NamedRecord) else [record.device]
            memory = f" with {record.memory_kind} memory" if record.memory_kind else ""
            raise MismatchError(
                "arrays cannot go back to the devices that they were saved from",
                file=catalog.path,
                expected=f"{1 + max(devices)} devices or more{memory}",
                found=f"{len(jax.devices())} devices",
                hint="Give a tree with shardings to restore; the item's metadata is one without, of"
                " which arrays go to all devices. Or give StandardRestore(fallback_sharding=...)."
                " `osl.load(path)` gives numpy arrays.",
            )


def loads_orbax_item(
    path: PathLike,
    abstract: Callable[[], Any],
    mapping: LeafMapping | None,
    options: ReadOptions,
) -> bool:
    """Whether a load is one of `is_orbax_item`; where a process cannot tell, all fail."""
    try:
        return is_orbax_item(path)
    except BaseException:
        with telling_others(path, LoadRequest(abstract(), mapping, None, options)):
            raise


def is_orbax_item(directory: PathLike) -> bool:
    """Whether a folder holds a tree in Orbax's own format, and no safetensors files."""
    if is_safetensors_checkpoint(directory):
        return False
    folder = ocp.path.Path(directory)
    metadata = folder / _orbax.ITEM_METADATA
    if metadata.exists():  # ours is left where the files of an item of ours are gone
        return _HINT not in metadata.read_text()
    return any((folder / name).exists() for name in _ORBAX_FILES)


def check_remains(folder: PathLike) -> None:
    """Refuses an item of ours of which an interrupted deletion took the manifest or the files.

    What is left would load as a flat dict of some of the tensors. Published weights have no
    manifest either: an error needs the item's metadata, or where these are gone the step's, to say
    that there was more; or a step of v1 without metadata.
    """
    path = ocp.path.Path(folder)
    has_manifest, has_data = (path / MANIFEST).exists(), is_safetensors_checkpoint(path)
    if has_manifest:
        is_lost = not has_data
    elif (path / _orbax.ITEM_METADATA).exists():
        metadata = read_json(path / _orbax.ITEM_METADATA)
        is_lost = MANIFEST in metadata or (not has_data and _HINT in str(metadata))
    else:
        record = path.parent / _orbax.STEP_METADATA
        handlers: Any = read_json(record).get("item_handlers")
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


def check_step(folder: PathLike, *, has_layout: bool) -> None:
    """Refuses a step that a deletion left without items; with a layout, also torn items."""
    path = ocp.path.Path(folder)
    if not path.is_dir() or is_safetensors_checkpoint(path):
        return
    children = list(path.iterdir())
    items = [child for child in children if child.is_dir() and child.name not in _orbax.RESERVED]
    if has_layout and not any(map(is_safetensors_checkpoint, items)):
        for item in items:
            check_remains(item)
    is_step = bool(children) or path.name[-1:].isdigit()
    if is_step and not items and {child.name for child in children} <= STEP_FILES:
        raise InvalidLayoutError(
            "the step holds no item", file=path, found=_names(path), hint=_REMAINS_HINT
        )


def _names(path: Any) -> str:
    return listed(sorted(child.name for child in path.iterdir())) or "an empty folder"


def read_json(path: Any) -> dict[str, Any]:
    """A JSON object; an empty one if it cannot be read."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
