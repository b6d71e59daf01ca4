"""How a save appears in a folder of an object store, which cannot rename anything.

Every object appears complete or not at all, but several do not appear together. So the order in
which they appear has to make sure that no part of a save passes for a checkpoint; docs/storage.md
tells what a crash at each point leaves.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError

from .base import Rank, Storage, join
from .cloud_object import not_alone

_AT_ONCE = 16
_RENEWAL_SECONDS = 10.0
_DEAD_SECONDS = 60.0  # a claim that was not renewed for so long is of a process that died


class CopyingStorage(Storage, Protocol):
    """A storage that copies files by itself."""

    def copy(self, source: str, target: str) -> None:
        """Copies a file; one that is at `target` is replaced at once."""
        ...


class InPlace:
    """A save to a folder that holds no checkpoint: every file is written under its final name.

    Who writes them sees to their order.

    Attributes:
        target: The folder.
        folder: The same.

    Args:
        target: The folder.
        storage: Where it is.
        rank: Which names in it belong to a checkpoint.
        scratch: Folders in it that only a save uses.
    """

    def __init__(self, target: str, storage: Storage, rank: Rank, scratch: Sequence[str]) -> None:
        self.target = self.folder = target
        self._storage = storage
        self._rank = rank
        self._scratch = scratch
        self._is_prepared = False

    def begin(self) -> None:
        pass  # a claim in the store would outlive a process that dies

    def prepare(self) -> None:
        self._clear()  # what a save left that crashed before it wrote a tensor
        self._is_prepared = True

    def publish(self) -> None:
        self._is_prepared = False

    def end(self) -> None:
        if self._is_prepared:
            with contextlib.suppress(SafetensorsLayoutError):  # what failed before is what counts
                self._clear()

    def _clear(self) -> None:
        names = _ranked(self._storage, self.folder, self._rank)
        _all_at_once(self._storage.remove, [join(self.folder, name) for name in reversed(names)])
        for name in self._scratch:
            self._storage.remove(join(self.folder, name))


class _Claim:
    """Says in the store that a save to a folder is running, for as long as its process lives.

    Each save puts an object of its own and looks for others: of two, one or both see the other,
    whatever the order. The object is renewed, so that one of a process that died shows its age.

    Args:
        folder: Where the claims of all saves are.
        target: The folder that is saved to.
        storage: Where both are.
    """

    def __init__(self, folder: str, target: str, storage: Storage) -> None:
        self._folder = folder
        self._file = join(folder, uuid.uuid4().hex)
        self._target = target
        self._storage = storage
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._renewed = 0.0

    def take(self) -> None:
        """Claims the target.

        Raises:
            StorageError: Another save to it is running.
        """
        self._renew()
        names = [join(self._folder, name) for name in self._storage.list(self._folder)]
        now = self._storage.modified_seconds(self._file)
        others = [name for name in names if name != self._file]
        ages = {name: now - self._storage.modified_seconds(name) for name in others}
        if any(age < _DEAD_SECONDS for age in ages.values()):
            self.release()
            raise StorageError(
                "another save to this path is running",
                file=self._target,
                hint="Save to another folder. If that program has died, try again in"
                f" {_DEAD_SECONDS:.0f} s.",
            )
        for name in others:
            self._storage.remove(name)
        threading.Thread(target=self._keep, name="safetensors-claim", daemon=True).start()

    def check(self) -> None:
        """Checks that nobody can have taken this save for one of a process that died.

        Raises:
            StorageError: The claim was not renewed for too long.
        """
        if time.monotonic() - self._renewed > _DEAD_SECONDS / 2:
            raise not_alone(self._file)

    def release(self) -> None:
        """Gives the claim up, as far as possible."""
        self._released.set()
        with self._lock, contextlib.suppress(SafetensorsLayoutError):
            self._storage.remove(self._file)

    def _keep(self) -> None:
        while not self._released.wait(_RENEWAL_SECONDS):
            with self._lock, contextlib.suppress(SafetensorsLayoutError):  # `check` sees a failure
                if not self._released.is_set():
                    self._renew()

    def _renew(self) -> None:
        begun = time.monotonic()
        writer = self._storage.create(self._file, 1, durable=False)
        writer.write_at(0, [memoryview(b"1")])
        writer.finish()
        self._renewed = begun


class StagedCopy:
    """A save that replaces what is in a folder: written beside it, then copied by the store.

    Attributes:
        target: The folder.
        folder: Where the files are written.

    Args:
        target: The folder.
        storage: Where it is.
        rank: Which names in it belong to a checkpoint, and in which order they appear.
    """

    def __init__(self, target: str, storage: CopyingStorage, rank: Rank) -> None:
        self.target = target
        parent, _, name = target.rpartition("/")
        tag = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.folder = join(parent, f".{tag}.partial-save")
        self._storage = storage
        self._rank = rank
        self._claim = _Claim(f"{self.folder}.claims", target, storage)
        self._keeps = True

    def begin(self) -> None:
        self._claim.take()

    def prepare(self) -> None:
        self._keeps = False
        self._storage.remove(self.folder)

    def publish(self) -> None:
        new = _ranked(self._storage, self.folder, self._rank)
        old = _ranked(self._storage, self.target, self._rank)
        self._check_alone(new)
        self._claim.check()  # last before what is there goes
        self._keeps = True
        try:
            # The index goes before the tensors that it names, and comes after them.
            for names in _by_rank(reversed(old), self._rank):
                _all_at_once(self._storage.remove, [join(self.target, name) for name in names])
            for names in _by_rank(new, self._rank):
                _all_at_once(self._copy, names)
            self._check_alone(new)  # what was copied is what this save wrote
            self._storage.check_written(self.target)
            if _ranked(self._storage, self.target, self._rank) != new:
                raise not_alone(self.target)
        except SafetensorsLayoutError as error:
            raise StorageError(
                f"putting the finished checkpoint in its place failed: {error}",
                file=self.target,
                hint=f"It stands complete in {self.folder}: copy it from there.",
            ) from error
        self._keeps = False

    def end(self) -> None:
        try:
            if not self._keeps:
                with contextlib.suppress(SafetensorsLayoutError):  # what failed before counts
                    self._storage.remove(self.folder)
        finally:  # also when interrupted: a claim that is renewed keeps other saves out
            self._claim.release()

    def _check_alone(self, names: Sequence[str]) -> None:
        """Checks that these are the files beside the folder, as this save has written them."""
        self._storage.check_written(self.folder)
        if not names or _ranked(self._storage, self.folder, self._rank) != names:
            raise not_alone(self.folder)

    def _copy(self, name: str) -> None:
        self._storage.copy(join(self.folder, name), join(self.target, name))


def _ranked(storage: Storage, folder: str, rank: Rank) -> list[str]:
    """The names in a folder that belong to a checkpoint, in the order in which they appear."""
    ranks = {name: rank(name) for name in storage.list(folder)}
    return sorted((name for name in ranks if ranks[name] is not None), key=lambda n: (ranks[n], n))


def _by_rank(names: Iterable[str], rank: Rank) -> list[list[str]]:
    return [list(some) for _, some in itertools.groupby(names, key=rank)]


def _all_at_once(call: Callable[[str], None], names: Sequence[str]) -> None:
    """Calls for all names, several at once; raises what the first to fail raised."""
    if names:
        with ThreadPoolExecutor(min(_AT_ONCE, len(names)), "safetensors-publish") as pool:
            for done in [pool.submit(call, name) for name in names]:
                done.result()
