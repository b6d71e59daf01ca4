"""How a save comes to stand in a folder of an object store, which can not rename anything.

Every object appears complete or not at all, but several do not appear together. So the order in
which they appear has to make sure that no part of a save passes for a checkpoint; docs/storage.md
tells what a crash at each point leaves.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError
from orbax_safetensors_layout.storage.base import Rank, Storage, join

_AT_ONCE = 16


class CopyingStorage(Storage, Protocol):
    """A storage that copies files by itself."""

    def copy(self, source: str, target: str) -> None:
        """Copies a file; one that stands at `target` is replaced at once."""
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


class StagedCopy:
    """A save that replaces what stands in a folder: written beside it, then copied by the store.

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
        self._keeps = False

    def begin(self) -> None:
        pass  # a claim in the store would outlive a process that dies

    def prepare(self) -> None:
        self._storage.remove(self.folder)

    def publish(self) -> None:
        new = _ranked(self._storage, self.folder, self._rank)
        old = _ranked(self._storage, self.target, self._rank)
        self._keeps = True
        try:
            # The index goes before the tensors that it names, and comes after them.
            for names in _by_rank(reversed(old), self._rank):
                _all_at_once(self._storage.remove, [join(self.target, name) for name in names])
            for names in _by_rank(new, self._rank):
                _all_at_once(self._copy, names)
            self._storage.check_written(self.target)
        except SafetensorsLayoutError as error:
            raise StorageError(
                f"putting the finished checkpoint in its place failed: {error}",
                file=self.target,
                hint=f"It stands complete in {self.folder}: copy it from there.",
            ) from error
        self._keeps = False

    def end(self) -> None:
        if not self._keeps:
            with contextlib.suppress(SafetensorsLayoutError):  # what failed before is what counts
                self._storage.remove(self.folder)

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
