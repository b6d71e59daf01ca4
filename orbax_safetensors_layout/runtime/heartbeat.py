"""Heartbeats: each process renews a key, so that others notice when it was killed, or has left."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Protocol

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0  # longer than any thread of a live process is kept from running

_END = "end"  # in place of the number of a beat


class KeyValueStore(Protocol):
    """The part of `jax.distributed`'s key-value store that a group uses."""

    def set(self, key: str, value: str) -> None: ...  # of a new key
    def renew(self, key: str, value: str) -> None: ...
    def list(self, prefix: str) -> dict[str, str]: ...  # all below a prefix, which ends in a slash
    def get(self, key: str, timeout_seconds: float) -> str: ...  # or `TimeoutError`
    def peek(self, key: str) -> str | None: ...
    def delete(self, prefix: str) -> None: ...  # a key and those below it


class Heartbeat:
    """A thread that renews the key of this process, `prefix/process_index`, once a second.

    It looks at those of all processes, or of the one that is `watched`.
    """

    def __init__(
        self, store: KeyValueStore, prefix: str, process_index: int, watched: int | None
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._key = f"{prefix}/{process_index}"
        self._watched = watched
        self._stopped = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._next_look_seconds = 0.0
        self._thread = threading.Thread(
            target=self._keep_beating, name="safetensors-heartbeat", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        self._stopped.set()

    def stop(self) -> None:
        self.end()
        self._thread.join(SILENCE_SECONDS)

    def gone(self) -> dict[int, bool]:
        """Return the processes without a heartbeat: whether it stopped for `SILENCE_SECONDS`.

        Otherwise the process has ended it.
        """
        now = time.monotonic()
        if now >= self._next_look_seconds:
            self._next_look_seconds = now + HEARTBEAT_SECONDS
            for process, value in self._look().items():
                if self._seen.get(process, ("", 0.0))[0] != value:
                    self._seen[process] = value, time.monotonic()
        return {
            process: value != _END
            for process, (value, seen) in self._seen.items()
            if value == _END or now - seen > SILENCE_SECONDS
        }

    def _look(self) -> dict[int, str]:
        if self._watched is None:
            beats = self._store.list(f"{self._prefix}/").items()
            return {int(key.rpartition("/")[2]): value for key, value in beats}
        beat = self._store.peek(f"{self._prefix}/{self._watched}")
        return {} if beat is None else {self._watched: beat}

    def _beat(self, value: object) -> None:
        # If the store is gone, so is the first process: who waits for it gets an error.
        with contextlib.suppress(Exception):
            self._store.renew(self._key, str(value))

    def _keep_beating(self) -> None:
        for number in itertools.count():
            self._beat(number)  # at once: a process that is killed from now on is missed
            if self._stopped.wait(HEARTBEAT_SECONDS):
                break
        self._beat(_END)
