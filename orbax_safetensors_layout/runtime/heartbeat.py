"""Heartbeats, by which processes that wait for each other learn that one of them was killed.

`jax.distributed` itself notices only when its own heartbeat has been missing for 100 s, the default
of `jax.distributed.initialize(heartbeat_timeout_seconds=...)`, and then ends all processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""Longer than any thread of a live process is kept from running."""


class HeartbeatStore(Protocol):
    """The part of a key-value store that heartbeats use."""

    def renew(self, key: str, value: str) -> None:
        """Sets a key, also one that exists."""

    def list(self, prefix: str) -> dict[str, str]:
        """Return the keys below a prefix, which ends in a slash, and their values."""


class Heartbeat:
    """A thread that renews the key of this process, `prefix/process_index`, once a second."""

    def __init__(self, store: HeartbeatStore, prefix: str, process_index: int) -> None:
        self._store = store
        self._prefix = prefix
        self._process_index = process_index
        self._stopped = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._next_look_seconds = 0.0
        self._beats = 0
        self._beat()  # at once: a process that is killed from now on is missed
        self._thread = threading.Thread(
            target=self._keep_beating, name="safetensors-heartbeat", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Ends the thread, without waiting for it."""
        self._stopped.set()

    def stop(self) -> None:
        """Ends the thread, and waits for it."""
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
        while not self._stopped.wait(HEARTBEAT_SECONDS):
            self._beat()
