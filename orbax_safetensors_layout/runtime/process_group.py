"""Processes that save or load together: each waits for all, and all fail with the first cause.

They exchange messages through the key-value store of `jax.distributed`, never through collectives
on devices, so a save in the background cannot block a running training step.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.parse
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, Self

from orbax_safetensors_layout.errors import PeerError

from . import heartbeat

_PREFIX = "orbax_safetensors_layout"
_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.25
_CHECK_SECONDS = 1.0

_WAIT_SECONDS = 5.0  # a wait in the store cannot be interrupted
_KEPT_GROUPS = 64  # no process is so many operations behind another

_counts: Counter[tuple[str, str]] = Counter()  # by purpose and name
_finished: deque[str] = deque()
_counts_lock = threading.Lock()


class KeyValueStore(heartbeat.HeartbeatStore, Protocol):
    """The part of `jax.distributed`'s key-value store that a group uses."""

    def set(self, key: str, value: str) -> None:
        """Sets a new key."""
        ...

    def get(self, key: str, timeout_seconds: float) -> str:
        """Waits for a key.

        Raises:
            TimeoutError: It is not set in time.
        """
        ...

    def peek(self, key: str) -> str | None:
        """Return a key's value, None if it is not set."""
        ...

    def delete(self, prefix: str) -> None:
        """Deletes a key and those below it."""
        ...


class Fingerprint(NamedTuple):
    """A value that must be the same on all processes.

    Attributes:
        digest: Its digest.
        description: What this process has, for the error if others have another.
        demand: What all must do, for that error.
    """

    digest: str
    description: str
    demand: str


class ProcessGroup:
    """The processes of one operation; all make it for the same `name` in the same order.

    Attributes:
        number: 1-based sequence number of operations with this name, the same on all processes.

    Args:
        name: What the operation works on, for instance the checkpoint's path.
        process_index: This process.
        process_count: Number of processes.
        store: Their shared store; None for a single process.
        timeout_seconds: How long a step waits for the others.
        purpose: A verb; operations of one purpose have the same order on all processes.
    """

    def __init__(
        self,
        name: str,
        process_index: int,
        process_count: int,
        store: KeyValueStore | None,
        timeout_seconds: float,
        *,
        purpose: str = "save",
    ) -> None:
        self.process_index = process_index
        self.process_count = process_count
        self._name = name
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._purpose = purpose
        with _counts_lock:
            _counts[purpose, name] += 1
            self.number = _counts[purpose, name]
        # Text without slashes, of any path.
        place = urllib.parse.quote(name, safe="", errors="surrogateescape")
        self._key = f"{_PREFIX}/{purpose}/{self.number}/{place}"
        self._step = 0
        self._failed = False
        self._announced = -1
        self._next_check_seconds = 0.0
        self._heartbeat: heartbeat.Heartbeat | None = None
        if store is not None and process_count > 1:
            self._heartbeat = heartbeat.Heartbeat(store, f"{self._key}/heartbeat", process_index)
            weakref.finalize(self, self._heartbeat.end)  # of an operation that is given up

    @classmethod
    def alone(cls) -> Self:
        """Return the group of a single process."""
        return cls("", 0, 1, None, 1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.fail(error)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self.close()

    @property
    def is_leader(self) -> bool:
        """Whether this process does what is done once."""
        return self.process_index == 0

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A step of all processes, called `doing` in errors, with a `barrier` at its end.

        Raises:
            PeerError: Another process failed.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as problem:
            error = problem
        self.barrier(doing, error)

    def barrier(
        self,
        doing: str,
        error: BaseException | None = None,
        *,
        agree: Fingerprint | None = None,
        tell: str = "",
    ) -> str:
        """Waits until all processes have reached this step.

        Args:
            doing: The step, for errors.
            error: The error of this process, if it failed.
            agree: What must be the same on all.
            tell: The message of the first process; others pass any, if it passes one.

        Returns:
            The first process's message.

        Raises:
            PeerError: Another process failed, raised at once with its error's text; or the
                processes do not agree.
            BaseException: `error`.
        """
        if self._store is None or self.process_count == 1 or self._failed:
            if error is not None:
                raise error
            return tell
        step = f"{self._key}/{self._step}"
        self._step += 1
        said = self._statement(error)
        if agree is not None:
            said["agree"] = list(agree)
        try:
            with self._reaching_others(doing):
                if tell and self.is_leader:
                    self._store.set(f"{step}/told", tell)
                self._store.set(f"{step}/said/{self.process_index}", json.dumps(said))
                verdict = self._decide(step, doing) if self.is_leader else self._await(step, doing)
        except BaseException as problem:
            self.fail(error or problem)  # for instance an interrupt, which others do not know of
            if error is not None and not isinstance(error, PeerError):
                raise error from None
            raise problem
        if verdict is None and self.is_leader:
            self._clean()
        if error is not None or verdict is not None:
            self._failed = True
        if verdict is not None and (error is None or verdict["process"] != self.process_index):
            # An error of this process may be a consequence.
            raise self._peer_error(verdict, doing) from error
        if error is not None:
            raise error
        if not tell or self.is_leader:
            return tell
        return self._store.get(f"{step}/told", self._timeout_seconds)

    def check(self, doing: str) -> None:
        """Checks, once a second, whether another process has failed before the next step.

        Raises:
            PeerError: One has; call `barrier` with it.
        """
        if self._store is None or self.process_count == 1 or self._failed:
            return
        if time.monotonic() < self._next_check_seconds:
            return
        self._next_check_seconds = time.monotonic() + _CHECK_SECONDS
        with self._reaching_others(doing):
            verdict = self._look(f"{self._key}/{self._step}")
        if verdict is not None:
            raise self._peer_error(verdict, doing)

    def _look(self, step: str) -> dict[str, Any] | None:
        assert self._store is not None
        if not self.is_leader:
            text = self._store.peek(f"{step}/verdict")
            found: dict[str, Any] | None = None if text is None else json.loads(text)
            return found
        said = self._said(step)
        verdict = _first_failure(said) or self._lost(said)
        if verdict is not None:
            self._announce(self._step, verdict)
        return verdict

    @contextlib.contextmanager
    def _reaching_others(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise PeerError(
                f"process 0, which keeps the key-value store of jax.distributed, does not answer"
                f" while {doing}; it was probably killed",
                file=self._name,
            ) from error

    def _statement(self, error: BaseException | None) -> dict[str, Any]:
        said: dict[str, Any] = {"process": self.process_index, "error": None}
        if error is not None:
            said["error"] = f"{type(error).__name__}: {error}"
            said["follows"] = isinstance(error, PeerError)
        return said

    def _lost(self, said: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the failure of a process that was killed: it is missing and sends no heartbeat."""
        dead = self._dead_processes() - {one["process"] for one in said}
        if not dead:
            return None
        text = f"no sign of life for {heartbeat.SILENCE_SECONDS:g} s; it was probably killed"
        return {"process": min(dead), "error": text}

    def _dead_processes(self) -> set[int]:
        return set() if self._heartbeat is None else self._heartbeat.dead_processes()

    def _peer_error(self, verdict: dict[str, Any], doing: str) -> PeerError:
        process, error = verdict["process"], verdict["error"]
        return PeerError(f"process {process} failed while {doing}: {error}", file=self._name)

    def abandon(self) -> None:
        """Tells the others that this process has stopped working, after a failure."""
        if self._store is not None and self.process_count > 1:
            with contextlib.suppress(Exception):  # the failure itself is what counts
                self._store.set(f"{self._key}/left/{self.process_index}", "")

    def await_others(self, timeout_seconds: float = 30) -> None:
        """Waits for a time until all live processes have stopped, so that files can be removed."""
        deadline = time.monotonic() + timeout_seconds
        while self._store is not None and self.process_count > 1:
            with contextlib.suppress(Exception):
                keys = self._store.list(f"{self._key}/left/")
                left = {int(key.rpartition("/")[2]) for key in keys}
                if len(left | self._dead_processes()) >= self.process_count:
                    return
            if time.monotonic() > deadline:
                return
            time.sleep(_LONGEST_PAUSE_SECONDS / 5)

    def _clean(self) -> None:
        """Deletes keys that no process waits for any more."""
        assert self._store is not None
        if self._step > 1:
            self._store.delete(f"{self._key}/{self._step - 2}/")

    def close(self) -> None:
        """Ends this process's steps; its last keys are deleted some operations later."""
        if self._store is None or self.process_count == 1 or not self.is_leader:
            return
        with _counts_lock:
            _finished.append(self._key)
            oldest = _finished.popleft() if len(_finished) > _KEPT_GROUPS else None
        if oldest is not None:
            with contextlib.suppress(Exception):
                self._store.delete(f"{oldest}/")

    def fail(self, error: BaseException) -> None:
        """Tells the others of this process's error, and waits for none."""
        if self._store is None or self.process_count == 1 or self._failed:
            return
        self._failed = True
        said = self._statement(error)
        with contextlib.suppress(Exception):  # the failure itself is what counts
            if self.is_leader:
                self._announce(self._step, said)
            step = f"{self._key}/{self._step}"
            self._store.set(f"{step}/said/{self.process_index}", json.dumps(said))
        self.abandon()

    def _decide(self, step: str, doing: str) -> dict[str, Any] | None:
        """Waits for all processes, or the first error, and announces the result."""
        assert self._store is not None
        try:
            verdict = self._collect(step, doing)
        except BaseException as error:
            with contextlib.suppress(Exception):  # the error itself is what counts
                self._announce(self._step - 1, self._statement(error))
            raise
        self._announce(self._step - 1, verdict)
        return verdict

    def _announce(self, step: int, verdict: dict[str, Any] | None) -> None:
        assert self._store is not None
        if step > self._announced:
            self._announced = step
            self._store.set(f"{self._key}/{step}/verdict", json.dumps(verdict))

    def _said(self, step: str) -> list[dict[str, Any]]:
        assert self._store is not None
        return [json.loads(text) for text in self._store.list(f"{step}/said/").values()]

    def _collect(self, step: str, doing: str) -> dict[str, Any] | None:
        assert self._store is not None
        deadline = time.monotonic() + self._timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            said = self._said(step)
            failure = _first_failure(said) or self._lost(said)
            if failure is None and len(said) == self.process_count:
                failure = _consequence(said) or _disagreement(said, self._purpose)
            if failure is not None or len(said) == self.process_count:
                return failure
            if time.monotonic() > deadline:
                missing = {*range(self.process_count)} - {one["process"] for one in said}
                raise PeerError(
                    f"processes {sorted(missing)} did not finish {doing}"
                    f" within {self._timeout_seconds:g} s",
                    file=self._name,
                    hint=f"See their logs. All processes of the program must {self._purpose}, so"
                    " Orbax's `active_processes` must name all; `timeout_seconds` of the options"
                    " sets the limit.",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _await(self, step: str, doing: str) -> dict[str, Any] | None:
        assert self._store is not None
        # Time for the first process to find out which one is missing.
        left_seconds = self._timeout_seconds + 30
        while True:
            try:
                text = self._store.get(f"{step}/verdict", min(left_seconds, _WAIT_SECONDS))
            except TimeoutError as error:
                left_seconds -= _WAIT_SECONDS
                if left_seconds > 0:
                    continue
                raise PeerError(
                    f"process 0 did not finish {doing} within {self._timeout_seconds:g} s",
                    file=self._name,
                ) from error
            verdict: dict[str, Any] | None = json.loads(text)
            return verdict


def _first_failure(said: list[dict[str, Any]]) -> dict[str, Any] | None:
    failed = [one for one in said if one["error"] is not None and not one["follows"]]
    return min(failed, key=lambda one: int(one["process"]), default=None)


def _consequence(said: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a failure that follows from another's, of which there is none."""
    failed = [one for one in said if one["error"] is not None]
    return min(failed, key=lambda one: int(one["process"]), default=None)


def _disagreement(said: list[dict[str, Any]], purpose: str) -> dict[str, Any] | None:
    """Return the failure of a process whose fingerprint is not the first one's."""
    in_order = sorted(said, key=lambda one: int(one["process"]))
    first = in_order[0]
    for other in in_order[1:]:
        if other.get("agree", [""])[0] != first.get("agree", [""])[0]:
            return {
                "process": other["process"],
                "error": f"it has not the same to {purpose}: process"
                f" {first['process']} has {first['agree'][1]}; process {other['process']} has"
                f" {other['agree'][1]}. {first['agree'][2]}",
            }
    return None
