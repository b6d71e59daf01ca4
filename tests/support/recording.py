"""A local storage that records every range it reads, and fails where a test wants it to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from unittest import mock

from orbax_safetensors_layout.storage import LocalStorage, Storage
from orbax_safetensors_layout.storage.schemes import OPENERS

S = TypeVar("S", bound=Storage)


class RecordingStorage(LocalStorage):
    """Ranges are (file, start, stop), in the order in which the reads began."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []
        self.before_read: Callable[[str, int, int], None] = lambda file, start, stop: None
        self.active = 0
        self._guard = threading.Lock()

    def read_into(
        self, file: str, offset: int, buffers: Sequence[memoryview], *, shared: bool = False
    ) -> None:
        stop = offset + sum(len(buffer) for buffer in buffers)
        with self._guard:
            self.ranges.append((file, offset, stop))
            self.active += 1
        try:
            self.before_read(file, offset, stop)
            super().read_into(file, offset, buffers, shared=shared)
        finally:
            with self._guard:
                self.active -= 1

    def tensor_ranges(self) -> list[tuple[str, int, int]]:
        """The ranges without the headers, which begin at 0."""
        return [r for r in self.ranges if r[1] > 0]


@contextlib.contextmanager
def serving(storage: S, prefix: str = "") -> Iterator[S]:
    """Inside the block the storage serves paths that begin so, by default all local ones."""
    with mock.patch.dict(OPENERS, {prefix: lambda path, retries: (storage, path)}):
        yield storage


@contextlib.contextmanager
def recording() -> Iterator[RecordingStorage]:
    """Inside the block every load of a local path goes through the storage."""
    storage = RecordingStorage()
    with contextlib.closing(storage), mock.patch.object(storage, "close"), serving(storage):
        yield storage
