"""Heartbeats: each process renews a key, so that the others notice when it was killed."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0  # longer than any thread of a live process is kept from running


class KeyValueStore(Protocol):
    """The part of `jax.distributed`'s key-value store that a group uses."""

    def set(self, key: str, value: str) -> None: ...  # of a new key
    def renew(self, key: str, value: str) -> None: ...
    def list(self, prefix: str) -> dict[str, str]: ...  # all below a prefix, which ends in a slash
    def get(self, key: str, timeout_seconds: float) -> str: ...  # or `TimeoutError`
    def peek(self, key: str) -> str | None: ...
    def delete(self, prefix: str) -> None: ...  # a key and those below it


class Heartbeat:
    """A thread that renews the key of this process, `prefix/process_index`, once a second."""

    def __init__(self, store: KeyValueStore, prefix: str, process_index: int) -> None:
        self._store = store
        self._prefix = prefix
        self._process_index = process_index
        self._stopped = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._next_look_seconds = 0.0
        self._beats = 0
        self._thread = threading.Thread(
            target=self._keep_beating, name="safetensors-heartbeat", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        self._stopped.set()

    def stop(self) -> None:
        self.end()
        self._thread.join(SILENCE_SECONDS)

    def dead_processes(self) -> set[int]:
        """Return the processes whose heartbeat has stopped for `SILENCE_SECONDS`."""
        now = time.monotonic()
        if now >= self._next_look_seconds:
            self._next_look_seconds = now + HEARTBEAT_SECONDS
            for key, value in self._store.list(f"{self._prefix}/").items():
                process = int(key.rpartition("/")[2])
                if self._seen.get(process, ("", 0.0))[0] != value:
                    self._seen[process] = value, time.monotonic()
        return {p for p, (_, seen) in self._seen.items() if now - seen > SILENCE_SECONDS}

    def _beat(self) -> None:
        # If the store is gone, so is the first process: who waits for it gets an error.
        with contextlib.suppress(Exception):
            self._store.renew(f"{self._prefix}/{self._process_index}", str(self._beats))
        self._beats += 1

    def _keep_beating(self) -> None:
        self._beat()  # at once: a process that is killed from now on is missed
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            self._beat()
