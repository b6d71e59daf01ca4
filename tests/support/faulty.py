"""A storage that fails as networks do, by a seed: what a load or a save makes of it is the test."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.storage import Buffer, ByteBuffer, FileWriter, LocalStorage
from orbax_safetensors_layout.storage.retry import Failure, Retrier

PASSING = ("delay", "reset", "timeout", "busy", "short")
LASTING = ("replaced", "forbidden")
QUICK = osl.RetryPolicy(attempts=4, base_seconds=0.0002, max_seconds=0.001)


class Busy(Exception):
    """A server's 503, or another status."""


def classify(error: Exception) -> Failure | None:
    if isinstance(error, PermissionError):
        return Failure("403 Forbidden", transient=False)
    if isinstance(error, OSError | Busy):
        return Failure(f"{type(error).__name__}: {error}", transient=True)
    return None


class FaultyStorage(LocalStorage):
    """Local files behind a bad network.

    Args:
        seed: Decides on every fault; from run to run only the order of threads differs.
        passing: The share of requests that fail in passing.
        lasting: The share of requests that fail for good.
    """

    def __init__(self, seed: int, *, passing: float, lasting: float) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._shares = (passing, lasting)
        self._retrier = Retrier(QUICK, classify)

    def draw(self) -> str | None:
        """The next fault; storms of the same kind come together."""
        with self._guard:
            passing, lasting = self._shares
            drawn = self._random.random()
            if drawn < lasting:
                return self._random.choice(LASTING)
            return self._random.choice(PASSING) if drawn < lasting + passing else None

    def barrier(self, fault: str | None, file: str) -> None:
        """Does what a fault does before any byte has come."""
        if fault == "delay":
            time.sleep(0.001)
        elif fault == "reset":
            raise ConnectionResetError("connection reset by peer")
        elif fault == "timeout":
            raise TimeoutError("timed out")
        elif fault == "busy":
            raise Busy("503 Slow Down")
        elif fault == "forbidden":
            raise PermissionError("403")
        elif fault == "replaced":
            raise osl.StorageError("the object was replaced", file=file)

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        read = super().read_into

        def attempt() -> None:
            fault = self.draw()
            self.barrier(fault, file)
            if fault == "short":
                for buffer in buffers[: len(buffers) // 2 + 1]:  # wrong bytes, to be read again
                    buffer[: len(buffer) // 2] = b"\xee" * (len(buffer) // 2)
                raise ConnectionError("the body ended too soon")
            read(file, offset, buffers, shared=shared)

        total = sum(len(buffer) for buffer in buffers)
        doing = f"reading bytes [{offset}, {offset + total})"
        self._retrier.run(attempt, doing, file)

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        return _FaultyWriter(self, file, super().create(file, size, durable=durable))

    def retried(self, call, doing: str, file: str) -> None:
        """Runs something that may fail, as often as the policy says."""

        def attempt() -> None:
            self.barrier(self.draw(), file)
            call()

        self._retrier.run(attempt, doing, file)

    def interrupt(self) -> None:
        self._retrier.interrupt()


class _FaultyWriter:
    def __init__(self, storage: FaultyStorage, file: str, writer: FileWriter) -> None:
        self._storage, self._file, self._writer = storage, file, writer

    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        self._storage.retried(
            lambda: self._writer.write_at(offset, buffers), f"writing from {offset}", self._file
        )

    def finish(self) -> None:
        self._storage.retried(self._writer.finish, "completing", self._file)

    def abort(self) -> None:
        self._writer.abort()
