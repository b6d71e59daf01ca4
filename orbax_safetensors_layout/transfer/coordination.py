"""Processes that save together: each waits for all, and all fail with the first cause.

What they tell each other goes through the key-value store of `jax.distributed`, never through a
collective on devices: a save in the background can not get in the way of a running training step.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from typing import Any, Protocol

from orbax_safetensors_layout.errors import PeerError

_PREFIX = "orbax_safetensors_layout"
_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.25

_KEPT_GROUPS = 8  # no process is so many operations behind another

_counts: Counter[str] = Counter()
_finished: deque[str] = deque()
_counts_lock = threading.Lock()


class KeyValueStore(Protocol):
    """What is needed of `jax.distributed`'s key-value store."""

    def set(self, key: str, value: str) -> None:
        """Sets a new key."""
        ...

    def list(self, prefix: str) -> dict[str, str]:
        """The keys below a prefix that ends in a slash, and their values."""
        ...

    def get(self, key: str, timeout_seconds: float) -> str:
        """Waits for a key.

        Raises:
            TimeoutError: It is not set in time.
        """
        ...

    def delete(self, prefix: str) -> None:
        """Deletes a key and those below it."""
        ...


class Group:
    """The processes of one operation; all make it for the same `name` in the same order.

    Args:
        name: What the operation works on, for instance the checkpoint's path.
        process_index: This process.
        process_count: How many there are.
        store: What they share; not needed by a single process.
        timeout_seconds: How long a step waits for the others.
    """

    def __init__(
        self,
        name: str,
        process_index: int,
        process_count: int,
        store: KeyValueStore | None,
        timeout_seconds: float,
    ) -> None:
        self.process_index = process_index
        self.process_count = process_count
        self._name = name
        self._store = store
        self._timeout_seconds = timeout_seconds
        with _counts_lock:
            _counts[name] += 1
            number = _counts[name]
        self._key = f"{_PREFIX}/{number}/{name.strip('/').replace('/', '|')}"
        self._step = 0
        self._failed = False

    @property
    def is_leader(self) -> bool:
        """Whether this is the process that does what is to be done once."""
        return self.process_index == 0

    def meet(self, doing: str, error: BaseException | None = None) -> None:
        """Waits until all processes have come to this step.

        Args:
            doing: The step, for errors.
            error: What went wrong on this process, if anything did.

        Raises:
            PeerError: Something went wrong on another process; at once, with its error's text.
            BaseException: `error`.
        """
        if self._store is None or self.process_count == 1 or self._failed:
            if error is not None:
                raise error
            return
        step = f"{self._key}/{self._step}"
        self._step += 1
        said = {"process": self.process_index, "error": None if error is None else _text(error)}
        try:
            self._store.set(f"{step}/said/{self.process_index}", json.dumps(said))
            verdict = self._decide(step, doing) if self.is_leader else self._await(step, doing)
        except BaseException as problem:
            self._failed = True
            if error is not None:
                raise error from None
            raise problem
        if verdict is None and self.is_leader:
            self._clean()
        if error is not None or verdict is not None:
            self._failed = True
        if error is not None:
            raise error
        if verdict is not None:
            raise PeerError(
                f"process {verdict['process']} failed while {doing}: {verdict['error']}",
                file=self._name,
            )

    def _clean(self) -> None:
        """Drops keys that nobody waits for any more: all have come to the step after them."""
        assert self._store is not None
        if self._step > 1:
            self._store.delete(f"{self._key}/{self._step - 2}/")
            return
        with _counts_lock:
            _finished.append(self._key)
            oldest = _finished.popleft() if len(_finished) > _KEPT_GROUPS else None
        if oldest is not None:
            self._store.delete(f"{oldest}/")

    def _decide(self, step: str, doing: str) -> dict[str, Any] | None:
        """Waits for all processes, or the first error, and tells everyone."""
        assert self._store is not None
        verdict, problem = None, None
        try:
            verdict = self._collect(step, doing)
        except PeerError as error:
            problem = error
            verdict = {"process": 0, "error": str(error)}
        self._store.set(f"{step}/verdict", json.dumps(verdict))
        if problem is not None:
            raise problem
        return verdict

    def _collect(self, step: str, doing: str) -> dict[str, Any] | None:
        assert self._store is not None
        deadline = time.monotonic() + self._timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            said = [json.loads(text) for text in self._store.list(f"{step}/said/").values()]
            failed = [one for one in said if one["error"] is not None]
            if failed:
                first: dict[str, Any] = min(failed, key=lambda one: int(one["process"]))
                return first
            if len(said) == self.process_count:
                return None
            if time.monotonic() > deadline:
                missing = {*range(self.process_count)} - {one["process"] for one in said}
                raise PeerError(
                    f"processes {sorted(missing)} did not finish {doing}"
                    f" within {self._timeout_seconds:g} s",
                    file=self._name,
                    hint="See their logs; WriteOptions(timeout_seconds=...) sets the limit.",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _await(self, step: str, doing: str) -> dict[str, Any] | None:
        assert self._store is not None
        try:
            # The first process is given the time to find out who is missing.
            text = self._store.get(f"{step}/verdict", self._timeout_seconds + 30)
        except TimeoutError as error:
            raise PeerError(
                f"process 0 did not finish {doing} within {self._timeout_seconds:g} s",
                file=self._name,
            ) from error
        verdict: dict[str, Any] | None = json.loads(text)
        return verdict


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
