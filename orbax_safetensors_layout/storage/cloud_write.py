"""Writes an object as a stream of parts, whatever the order in which its bytes come.

An object store shows an object when its last part has come. What comes before its turn is held in
memory, up to a bound, and beyond that in a temporary file: to make the writers of later bytes wait
could make them wait for each other.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
from absl import logging

from orbax_safetensors_layout.errors import StorageError
from orbax_safetensors_layout.options import MIB

from .base import ByteBuffer
from .buffers import transfer
from .cloud_client import classify, describe
from .local_file import storage_errors
from .local_write import write_fully

PARTS_AT_ONCE = 4  # of one object, on their way together; one more is being filled
HELD_BYTES = 32 * MIB  # of one object, waiting in memory for their turn
_PART_BYTES = 8 * MIB  # at 8 to 16 MiB a request, S3's latency is a tenth of its time
_MOST_PARTS = 10_000  # of S3 and GCS


def part_bytes(size: int) -> int:
    """Return the size of an object's parts: 8 MiB, or enough for at most 10,000 of them."""
    needed = -(-size // _MOST_PARTS)
    return max(_PART_BYTES, -(-needed // MIB) * MIB)


class CloudFileWriter:
    """A new object of known size. Safe to use from many threads, for ranges that do not overlap.

    `put` stores the object of its bytes, where those are no more than one part, or else of an
    iterator of all parts, and drops it if that raises. `done` is called when it is complete.
    """

    def __init__(
        self, file: str, size: int, put: Callable[[Any], None], done: Callable[[], None]
    ) -> None:
        self.file = file
        self._size = size
        self._part_bytes = part_bytes(size)
        self._put = put
        self._done = done
        self._order = threading.Lock()  # who holds it may append
        self._position = 0
        # Bytes before their turn: in memory, or else so many in the temporary file.
        self._held: dict[int, np.ndarray | int] = {}
        self._held_bytes = 0
        self._spill: IO[bytes] | None = None
        self._part = np.empty(0, np.uint8)
        self._filled = 0
        self._finished = False
        # State that writers and the uploading thread share, one part at a time.
        self._changed = threading.Condition()
        self._ready: np.ndarray | None = None
        self._is_last = False
        self._error: StorageError | None = None
        self._thread: threading.Thread | None = None

    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        sources = [np.frombuffer(buffer, np.uint8) for buffer in buffers if buffer.nbytes]
        if not sources:
            return
        with self._order:
            self._check()
            if offset != self._position:
                self._hold(offset, sources)
                return
            for source in sources:
                self._append(source)
            while self._position in self._held:
                self._append(self._take(self._position))

    def finish(self) -> None:
        with self._order:
            self._check()
            if self._position != self._size:
                raise StorageError(
                    "the object is not complete",
                    file=self.file,
                    expected=f"{self._size} bytes",
                    found=f"{self._position} bytes",
                )
            if self._size <= self._part_bytes:
                self._put(self._part[: self._filled])
            else:
                self._send_part()
                with self._changed:
                    self._is_last = True
                    self._changed.notify_all()
                self._join()
                self._check()
            self._finished = True
            self._drop()
            self._done()

    def abort(self) -> None:
        if self._finished:
            return
        # Before the lock is taken: its holder may wait for the upload, which this ends.
        self._fail(StorageError("the upload was given up", file=self.file))
        self._join()
        with self._order:
            self._join()  # who held it may have begun the upload meanwhile
            self._drop()

    def _hold(self, offset: int, sources: Sequence[np.ndarray]) -> None:
        total = sum(source.nbytes for source in sources)
        if self._held_bytes + total <= HELD_BYTES:
            self._held[offset] = np.concatenate(sources)
            self._held_bytes += total
            return
        with storage_errors("keeping bytes in a temporary file failed", self.file):
            if self._spill is None:
                # Closed, and so removed, by `_drop`.
                self._spill = tempfile.TemporaryFile(prefix="orbax-safetensors-")  # noqa: SIM115
            write_fully(self._spill.fileno(), offset, [source.data for source in sources])
        self._held[offset] = total

    def _take(self, offset: int) -> np.ndarray:
        held = self._held.pop(offset)
        if isinstance(held, np.ndarray):
            self._held_bytes -= held.nbytes
            return held
        assert self._spill is not None
        data = np.empty(held, np.uint8)
        with storage_errors("reading back a temporary file failed", self.file):
            if transfer(os.preadv, self._spill.fileno(), offset, [data.data]) < held:
                raise OSError(errno.EIO, "the file is too short")
        return data

    def _append(self, source: np.ndarray) -> None:
        while source.nbytes:
            if self._filled == self._part.nbytes:
                self._send_part()
                self._part = np.empty(min(self._part_bytes, self._size - self._position), np.uint8)
            count = min(source.nbytes, self._part.nbytes - self._filled)
            self._part[self._filled : self._filled + count] = source[:count]
            self._filled += count
            self._position += count
            source = source[count:]

    def _send_part(self) -> None:
        """Hands over the full part; the first one starts the uploading thread."""
        if not self._filled:
            return
        if self._thread is None:
            # Not waited for at the end of a program that never finished or aborted the file.
            self._thread = threading.Thread(
                target=self._upload, name="safetensors-upload", daemon=True
            )
            self._thread.start()
        part, self._part, self._filled = self._part[: self._filled], self._part[:0], 0
        with self._changed:
            self._changed.wait_for(lambda: self._ready is None or self._error is not None)
            self._ready = part
            self._changed.notify_all()
        self._check()

    def _upload(self) -> None:
        try:
            self._put(self._parts())
        except BaseException as error:
            if self._error is None:
                self._fail(self._explained(error))
            elif error is not self._error:
                logging.warning("%s: dropping the upload failed: %s", self.file, describe(error))

    def _parts(self) -> Iterator[np.ndarray]:
        """Yields the parts as they are handed over; raises the error if they are given up."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ready is not None or self._is_last or self._error is not None
                )
                if self._error is not None:
                    raise self._error
                part, self._ready = self._ready, None
                self._changed.notify_all()
            if part is None:
                return
            yield part

    def _fail(self, error: StorageError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _explained(self, error: BaseException) -> StorageError:
        failure = classify(error) if isinstance(error, Exception) else None
        if failure is None:
            explained = StorageError("the upload was given up", file=self.file)
        else:
            explained = StorageError("writing failed", file=self.file, found=failure.cause)
        explained.__cause__ = failure or error
        return explained

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _drop(self) -> None:
        self._held.clear()
        self._part, self._ready = np.empty(0, np.uint8), None
        if self._spill is not None:
            self._spill.close()
