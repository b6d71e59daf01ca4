"""One item of a checkpoint on its way to its folder, the same for both APIs of Orbax."""

from __future__ import annotations

import concurrent.futures
import json
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from orbax_safetensors_layout.errors import StorageError
from orbax_safetensors_layout.format import MANIFEST
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.save import PreparedSave, save_group
from orbax_safetensors_layout.storage import open_storage, storage_errors

from . import _orbax
from .background import in_callers_context

_PathLike = str | os.PathLike[str]
HINT = (
    "This folder holds safetensors files, not a checkpoint in Orbax's own format: restore it with"
    " orbax_safetensors_layout (v0: handler_registry=osl.handler_registry(...), v1:"
    " osl.context(...) or osl.install()), or make Orbax's own of it with osl.convert(...)"
)
# Orbax v1 takes a folder for a pytree by this file's presence. What is in it, only Orbax's own
# handlers read; theirs is then the error "ValueError: '<the hint>' is not a valid KeyType".
_ITEM_METADATA = {"tree_metadata": {"": {"key_metadata": [{"key": "", "key_type": HINT}]}}}
# A part of what was saved is gone if the manifest is; see `item_load.check_remains`.
_WITH_MANIFEST = _ITEM_METADATA | {MANIFEST: True}
_POLL_SECONDS = 0.05


class _Turn:
    """Whose turn it is to write to a folder: one save's at a time, and the newest's.

    Where another item of a step cannot be saved, Orbax gives the step up and lets our thread run.
    When the step is saved again, into a folder of the same name, that must not mix in.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.newest = 0


_turns: weakref.WeakValueDictionary[str, _Turn] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()


class ItemSave:
    """The blocking phase of a save; all processes make these in the same order.

    When it is made, what this process writes is on the host, or, with a memory budget, as much of
    it as fits. Settings of the caller, such as whether x64 is on, hold in `write`, too.

    The folder need not exist yet; processes find each other by it. `wait` waits for it, in `write`;
    None if it is there when that is called. `dtypes` has for each leaf the one to write it in.
    """

    def __init__(
        self,
        folder: _PathLike,
        tree: Any,
        options: WriteOptions,
        *,
        mapping: LeafMapping | None,
        custom: object = None,
        dtypes: Sequence[Any] | None,
        wait: Callable[[], None] | None,
    ) -> None:
        self._retries = options.retries
        has_manifest = mapping is None or options.layout == "sharded"
        metadata = _WITH_MANIFEST if has_manifest else _ITEM_METADATA
        self._sidecar_files = {_orbax.ITEM_METADATA: json.dumps(metadata).encode() + b"\n"}
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
        self.write: Callable[[_PathLike], None] = in_callers_context(self._write)

    @property
    def is_captured(self) -> bool:
        """Whether the caller may change the arrays; if not yet, `write` will come to that."""
        return self._prepared.wait_captured(0)

    def start(self, folder: _PathLike) -> concurrent.futures.Future[None]:
        """Writes in a thread, and waits until the caller may change the arrays."""
        pool = concurrent.futures.ThreadPoolExecutor(1, "safetensors_save")
        future = pool.submit(self.write, folder)
        pool.shutdown(wait=False)
        while not self._prepared.wait_captured(_POLL_SECONDS) and not future.done():
            pass
        return future

    def _write(self, folder: _PathLike) -> None:
        with self._group:
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
                self._prepared.write(
                    target, group=self._group, storage=storage, sidecar_files=self._sidecar_files
                )
