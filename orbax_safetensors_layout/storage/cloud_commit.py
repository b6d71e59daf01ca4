"""Commits saves to folders of an object store, which cannot rename anything.

Every object appears complete or not at all, but several do not appear together: their order makes
sure that no part of a save passes for a checkpoint. docs/storage.md says what a crash leaves.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from absl import logging

from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError, redact
from orbax_safetensors_layout.runtime import Workers

from .base import NewFolder, Rank, Storage, join, write_file
from .commit_note import partial_folder

CLAIMS = ".partial-save.claims"  # a folder in that which is saved to: there who saves may write
_AT_ONCE = 16
_RENEWAL_SECONDS = 10.0
_DEAD_SECONDS = 60.0  # a claim that was not renewed for so long is of a process that died

LONGEST_REQUEST_SECONDS = _DEAD_SECONDS / 2
"""A request that is sent while a claim passes its check, and ends so soon, ends with the claim."""

Check: TypeAlias = "Callable[[], None]"
"""Called right before every request that changes the store; raises to prevent it."""


class _CopyingStorage(Storage, Protocol):
    def copy(self, source: str, target: str, *, check: Check) -> None: ...
    def look_again(self, file: str) -> None: ...
    def remove_pinned(self, file: str, *, check: Check) -> None: ...
    def remove(self, path: str, *, check: Check = ...) -> None: ...


class InPlace(NewFolder):
    """A save to a folder without a checkpoint: files appear there, in the order of their writer."""

    def __init__(
        self, target: str, storage: _CopyingStorage, rank: Rank, scratch: Sequence[str]
    ) -> None:
        self.target = self.folder = target
        self.storage = storage
        self._rank = rank
        self._scratch = scratch
        self._claim = _BucketClaim(target, storage)
        self._is_prepared = False

    def begin(self) -> None:
        self._claim.take()

    def prepare(self) -> None:
        self._clear()  # what a save left that crashed before it wrote a tensor
        self._is_prepared = True

    def commit(self) -> None:
        self._is_prepared = False  # what another has replaced, each process has looked for

    def end(self) -> None:
        try:
            if self._is_prepared and self._claim.is_in_store():
                with _warning_of_remains(self.folder):
                    self._clear()
            elif self._is_prepared:
                text = "What the save has written may be left in %s, where another may have begun"
                logging.warning(text, redact(self.folder))
        finally:
            self._claim.release()

    def _clear(self) -> None:
        names = _ranked(self.storage, self.folder, self._rank)
        call_for_all(self._remove, [*reversed(names)])
        for name in self._scratch:
            self._remove(name)

    def _remove(self, name: str) -> None:
        self.storage.remove(join(self.folder, name), check=self._claim.check)


class _BucketClaim:
    """Shows in the store that a save to `target` is running, as long as its process lives.

    Each save puts an object of its own into a folder and looks for others: of two, one or both see
    the other, whatever the order. The object is renewed, so that a dead process's shows its age.
    One that was once too old stays so, as another save may have taken its place.
    """

    def __init__(self, target: str, storage: Storage) -> None:
        self._folder = join(target, CLAIMS)
        self._file = join(self._folder, uuid.uuid4().hex)
        self._target = target
        self._storage = storage
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._renewed = 0.0

    def take(self) -> None:
        self._renewed = time.monotonic()
        self._write()
        names = self._list()
        now = self._storage.modified_seconds(self._file)
        others = [name for name in names if name != self._file]
        if any(now - self._storage.modified_seconds(name) < _DEAD_SECONDS for name in others):
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
        """Raises if another program may take this save for one of a dead process soon."""
        if self._age() > _DEAD_SECONDS / 2:
            raise StorageError(
                "this save was stopped or cut off, and another one may have taken its place",
                file=self._target,
                expected=f"a claim renewed in the last {_DEAD_SECONDS / 2:.0f} s",
                found=f"one renewed {self._age():.0f} s ago",
                hint="See what the folder has now, and save again.",
            )

    def check_in_store(self) -> None:
        """Raises if another program has removed the claim, or may do so soon."""
        with self._lock:
            self.check()
            self._check_there()

    def is_in_store(self) -> bool:
        """Whether no other program has taken this save for one of a dead process, or may soon."""
        try:
            self.check_in_store()
        except StorageError:
            return False
        return True

    def release(self) -> None:
        self._released.set()
        with self._lock, contextlib.suppress(SafetensorsLayoutError):
            self._storage.remove(self._file)

    def _keep(self) -> None:
        while not self._released.wait(_RENEWAL_SECONDS) and self._age() < _DEAD_SECONDS:
            with self._lock, contextlib.suppress(SafetensorsLayoutError):  # `check` sees a failure
                if not self._released.is_set():
                    self._check_there()  # else it would come back after its removal
                    self._write()

    def _check_there(self) -> None:
        if self._file not in self._list():
            raise not_alone(self._file)

    def _list(self) -> list[str]:
        return [join(self._folder, name) for name in self._storage.list(self._folder)]

    def _write(self) -> None:
        begun = time.monotonic()
        write_file(self._storage, self._file, b"1", durable=False)
        if self._age() < _DEAD_SECONDS:  # else it may have been removed before it was written
            self._renewed = begun

    def _age(self) -> float:
        return time.monotonic() - self._renewed


class StagedCopy(NewFolder):
    """A save that replaces a checkpoint: written beside it, then copied by the store."""

    def __init__(self, target: str, storage: _CopyingStorage, rank: Rank) -> None:
        self.target = target
        self.folder = partial_folder(target)
        self.storage = storage
        self._rank = rank
        self._claim = _BucketClaim(target, storage)
        self._keeps = True

    def begin(self) -> None:
        self._claim.take()

    def prepare(self) -> None:
        self._keeps = False
        self.storage.remove(self.folder, check=self._claim.check)

    def commit(self) -> None:
        new = _ranked(self.storage, self.folder, self._rank)
        old = _ranked(self.storage, self.target, self._rank)
        self._check_alone(self.folder, new)
        call_for_all(self.storage.look_again, [join(self.target, name) for name in old])
        self._claim.check()
        self._keeps = True
        try:
            # The index goes before the tensors that it names, and comes after them.
            for _, names in itertools.groupby(reversed(old), self._rank):
                call_for_all(self._remove, [*names])
            for _, names in itertools.groupby(new, self._rank):
                call_for_all(self._copy, [*names])
            self._check_alone(self.folder, new)  # what was copied is what this save wrote
            self._check_alone(self.target, new)
            self._claim.check_in_store()
        except SafetensorsLayoutError as error:
            raise StorageError(
                f"putting the finished checkpoint in its place failed: {error}",
                file=self.target,
                hint=self._describe_copy(new),
            ) from error
        self._keeps = False

    def end(self) -> None:
        try:
            if not self._keeps:
                with _warning_of_remains(self.folder):
                    self.storage.remove(self.folder, check=self._claim.check)
        finally:  # also when interrupted: a claim that is renewed keeps other saves out
            self._claim.release()

    def _check_alone(self, folder: str, names: Sequence[str]) -> None:
        """Checks that the files in a folder are those that this save wrote."""
        self.storage.check_written(folder)
        if not names or _ranked(self.storage, folder, self._rank) != names:
            raise not_alone(folder)

    def _describe_copy(self, names: Sequence[str]) -> str:
        """Describe where the finished checkpoint is, by the objects there."""
        try:
            self._check_alone(self.folder, names)
        except SafetensorsLayoutError:
            return (
                f"{self.folder}, where it was complete, does not have all of it any more, or cannot"
                " be read. See what the folder has now, and save again."
            )
        return f"It is complete in {self.folder}: copy it from there."

    def _copy(self, name: str) -> None:
        files = join(self.folder, name), join(self.target, name)
        self.storage.copy(*files, check=self._claim.check)

    def _remove(self, name: str) -> None:
        self.storage.remove_pinned(join(self.target, name), check=self._claim.check)


@contextlib.contextmanager
def _warning_of_remains(folder: str) -> Iterator[None]:
    """Warns where what a save has written cannot be removed: the error before that is raised."""
    try:
        yield
    except SafetensorsLayoutError as error:
        text = (
            "What the save has written is left in %s: remove it, or save with overwrite=True (%s)"
        )
        logging.warning(text, redact(folder), error)


def _ranked(storage: Storage, folder: str, rank: Rank) -> list[str]:
    """Return a folder's names that belong to a checkpoint, in their order of appearance."""
    names = [*storage.list(folder)]
    for inner in storage.folders(folder):
        if rank(f"{inner}/") is not None:
            names += [f"{inner}/{name}" for name in storage.list(join(folder, inner))]
    ranks = {name: rank(name) for name in names}
    return sorted((name for name in ranks if ranks[name] is not None), key=lambda n: (ranks[n], n))


def not_alone(file: str, expected: str = "the object that this one has written") -> StorageError:
    """Return the error for an object that another program has written or removed."""
    return StorageError(
        "another program has written to the folder at the same time",
        file=file,
        expected=expected,
        found="another, or none",
        hint="Save again, each program to a folder of its own.",
    )


def call_for_all(call: Callable[[str], None], names: Sequence[str]) -> None:
    """Calls for all names, several at once; raises the first error."""
    with Workers(_AT_ONCE, "safetensors-objects") as workers:
        for name in names:
            workers.submit(call, name)
        workers.join()
