"""Processes that save or load together: each waits for all, and all fail with the first cause.

They exchange messages through the key-value store of `jax.distributed`, never through collectives
on devices, so a save in the background cannot block a running training step. Heartbeats reveal a
process that was killed: `jax.distributed` notices after 100 s
(`initialize(heartbeat_timeout_seconds=...)`), and then ends all processes.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import threading
import time
import urllib.parse
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from orbax_safetensors_layout.errors import PeerError

from . import heartbeat
from .cancellation import check_cancelled, is_cancellable
from .heartbeat import Heartbeat, KeyValueStore

_PREFIX = "orbax_safetensors_layout"
_LONGEST_PAUSE_SECONDS = 0.25
_PROMPT_SECONDS = 1.0  # of a step; the store keeps each wait that ended without its key
_CHECK_SECONDS = 1.0
_GRACE_SECONDS = 1.0  # for the first process to say who is missing
_WAIT_SECONDS = 5.0  # a wait in the store cannot be interrupted
_MOST_SHOWN = 300  # characters of a part
_KEPT_GROUPS = 64  # no process is so many operations behind another

# By the store, purpose, processes and name.
_counts: Counter[tuple[KeyValueStore | None, str, str, str]] = Counter()
_finished: deque[str] = deque()
_counts_lock = threading.Lock()
_constants: dict[tuple[KeyValueStore, str], dict[int, str]] = {}  # by process


class Fingerprint(NamedTuple):
    """A value that must be the same on all processes."""

    digest: str
    description: str  # of each process, for the error
    demand: str  # on all of them
    assumptions: Sequence[str] = ()  # that the value follows from; the error has those that differ
    parts: Callable[[], Sequence[str]] = tuple  # for the error, which has the first that differ
    content: str = ""  # of files that the value does not tell apart; must be the same, too
    place: str = ""  # of these; processes of different places go apart, which fails nothing


_CONTENT, _PLACE = 4, 5  # in what a statement agrees to


class _Statement(NamedTuple):
    """A process's word on a step, in JSON; a verdict on all of them is the failure, or null.

    The first failure of an operation is left where all look, whatever step they are at.
    """

    process: int
    error: str | None = None
    follows: bool = False  # whether the error follows from that of another process
    gone: bool = False  # whether the process takes no part in what follows
    doing: str = ""  # what the step is called
    agree: Sequence[Any] = ()  # its fingerprint
    apart: str = ""  # of a verdict: why each process goes on by itself
    differs: bool = False  # of a verdict: whether the process has something else than the first


class ProcessGroup:
    """The processes of one operation; a step waits `timeout_seconds` for all of them.

    `processes` are all numbers below a count, or some. Operations of one `name`, `purpose` (a verb)
    and `processes` have the same order on all of them; `number` counts these from 1. It leaves out
    those that a process gave up because others did not come, so that all are in the next one. A
    single process needs no `store`.
    """

    def __init__(
        self,
        name: str,
        process_index: int,
        processes: int | Sequence[int],
        store: KeyValueStore | None,
        timeout_seconds: float,
        *,
        purpose: str = "save",
        path: str | None = None,  # for errors, if not the name
    ) -> None:
        self.process_index = process_index
        self._processes = tuple(range(processes) if isinstance(processes, int) else processes)
        self.process_count = len(self._processes)
        self._path = name if path is None else path
        self.apart = ""  # why this process does not wait for the others any more, nor they for it
        self._store = store if self.process_count > 1 else None
        self._timeout_seconds = timeout_seconds
        self._purpose = purpose
        # Text without slashes, of any path.
        place = urllib.parse.quote(name, safe="", errors="surrogateescape")
        members = f"{zlib.crc32(repr(self._processes).encode()):08x}"
        operations = f"{_PREFIX}/{purpose}/{members}"
        self._late = f"{operations}/late/{place}/"  # by process the last number that it gave up
        with self._reaching_others(f"beginning to {purpose}"):
            late = {} if self._store is None else self._store.list(self._late)
        with _counts_lock:
            count = self._store, purpose, members, name
            self.number = 1 + max(_counts[count], *map(int, late.values()), 0)
            _counts[count] = self.number
        self._key = f"{operations}/{self.number}/{place}"
        self._step = 0
        self._is_over = self._has_arrived = self._has_given_up = False
        self._parts: Callable[[], Sequence[str]] = tuple
        self._announced = -1
        self._next_check_seconds = time.monotonic() + _CHECK_SECONDS
        self._heartbeat: Heartbeat | None = None
        if self._store is not None:
            watched = None if self.is_leader else self._processes[0]
            self._heartbeat = Heartbeat(
                self._store, f"{self._key}/heartbeat", process_index, watched
            )
            weakref.finalize(self, self._heartbeat.end)  # of an operation that is given up

    @classmethod
    def alone(cls) -> Self:
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
    def timeout_seconds(self) -> float:
        return self._timeout_seconds

    @property
    def is_leader(self) -> bool:
        return self.process_index == self._processes[0]

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A step of all processes, called `doing` in errors, with a `barrier` at its end."""
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
        broadcast: str = "",
    ) -> str:
        """Waits until all processes have reached the step `doing`.

        Returns what the first process has to `broadcast`; others pass any text, if it passes one.
        `agree` must be the same on all.

        Raises `error`, with which this process failed, or a `PeerError` at once with the text of
        another's; also where the processes do not agree. Where they go `apart`, no step waits.
        """
        if self._store is None or self._is_over:
            if error is not None:
                raise error
            return broadcast
        if error is not None and self._has_given_up:
            self.fail(error)
            raise error
        step, key = self._step, f"{self._key}/{self._step}"
        self._step += 1
        try:
            with self._reaching_others(doing):
                if broadcast and self.is_leader:
                    self._store.set(f"{key}/broadcast", broadcast)
                if not self._has_arrived or error is not None:
                    self._say(self._store, step, self._statement(doing, error, agree))
                self._has_arrived = False
                if self.is_leader:
                    verdict = self._collect(self._store, step, doing)
                    self._announce(self._store, step, verdict)
                else:
                    verdict = self._await_verdict(self._store, step, doing)
        except BaseException as problem:
            if self.is_leader:
                with contextlib.suppress(Exception):  # the first error is raised
                    self._announce(self._store, step, self._statement(doing, problem))
            self.fail(error or problem)  # for instance an interrupt, which others do not know of
            if error is not None and not isinstance(error, PeerError):
                raise error from None
            raise problem
        if verdict is None and self.is_leader and step:
            self._store.delete(f"{self._key}/{step - 1}/")  # no process waits for it any more
        self._is_over = error is not None or verdict is not None
        if verdict is not None and verdict.apart:
            self.apart = verdict.apart
        elif verdict is not None and (error is None or verdict.process != self.process_index):
            # An error of this process may be a consequence.
            raise self._peer_error(verdict, doing) from error
        if error is not None:
            raise error
        if not broadcast or self.is_leader:
            return broadcast
        return self._store.get(f"{key}/broadcast", self._timeout_seconds)

    def publish(self, doing: str, name: str, value: str) -> None:
        """Tells others the value of this process that they wait for in `constants`."""
        if self._store is None:
            return
        known = _constants.setdefault((self._store, name), {})
        if self.process_index not in known:
            with self._reaching_others(doing):
                self._store.renew(f"{_PREFIX}/constant/{name}/{self.process_index}", value)
            known[self.process_index] = value

    def constants(self, doing: str, name: str, value: str) -> list[str]:
        """Return the values of all processes by a name; they never change, and are read once."""
        if self._store is None:
            return [value]
        self.publish(doing, name, value)
        known = _constants[self._store, name]
        prefix = f"{_PREFIX}/constant/{name}/"
        deadline = time.monotonic() + self._timeout_seconds

        def missing(store: KeyValueStore) -> list[int]:
            if unknown := {*self._processes} - known.keys():
                values = store.list(prefix).items()
                known.update((int(key.rpartition("/")[2]), value) for key, value in values)
            return sorted(unknown - known.keys())

        with self._reaching_others(doing):
            for process in missing(self._store):
                while process not in known:
                    text = self._await(self._store, f"{prefix}{process}", deadline)
                    if text is not None:
                        known[process] = text
                        break
                    self.check(doing)
                    if time.monotonic() > deadline and (late := missing(self._store)):
                        raise self._missing_error(late, doing)
        return [known[process] for process in self._processes]

    def arrive(self, doing: str, agree: Fingerprint) -> None:
        """Announces this process's fingerprint, which all compare in the next `barrier`.

        That one waits for no process but those that have not arrived, nor the first one's end.
        """
        if self._store is not None and not self._is_over:
            with self._reaching_others(doing):
                self._say(self._store, self._step, self._statement(doing, None, agree))
            self._has_arrived = True

    def check(self, doing: str) -> None:
        """Raises a `PeerError`, for `barrier`, if another process failed; asks once a second.

        Raises at once if the work is cancelled.
        """
        check_cancelled()
        now = time.monotonic()
        if self._store is None or self._is_over or now < self._next_check_seconds:
            return
        self._next_check_seconds = now + _CHECK_SECONDS
        with self._reaching_others(doing):
            if self.is_leader:
                statements = self._statements(self._store, self._step)
                verdict = self._verdict(self._store, statements)
                if verdict is not None or len(statements) == self.process_count:
                    self._announce(self._store, self._step, verdict)
            else:
                verdict = self._read_verdict(self._store, self._step)
        if verdict is not None and verdict.apart:
            self._is_over, self.apart = True, verdict.apart
        elif verdict is not None:
            raise self._peer_error(verdict, doing)

    def abandon(self) -> None:
        """Tells the others that this process has stopped working, after a failure."""
        if self._store is not None:
            with contextlib.suppress(Exception):  # the first error is raised
                self._store.set(f"{self._key}/left/{self.process_index}", "")

    def await_others(self, timeout_seconds: float = 30) -> None:
        """Waits until all live processes have stopped, so that files can be removed."""
        deadline = time.monotonic() + timeout_seconds
        while self._store is not None and time.monotonic() <= deadline:
            with contextlib.suppress(Exception):
                keys = self._store.list(f"{self._key}/left/")
                left = {int(key.rpartition("/")[2]) for key in keys}
                if len(left.union(self._gone())) >= self.process_count:
                    return
            time.sleep(_LONGEST_PAUSE_SECONDS / 5)

    def close(self) -> None:
        """Ends this process's steps; its last keys are deleted some operations later."""
        if self._store is None or not self.is_leader:
            return
        with _counts_lock:
            _finished.append(self._key)
            oldest = _finished.popleft() if len(_finished) > _KEPT_GROUPS else None
        if oldest is not None:
            with contextlib.suppress(Exception):
                self._store.delete(f"{oldest}/")

    def fail(self, error: BaseException) -> None:
        """Tells the others of this process's error, and waits for none."""
        if self._store is None or self._is_over:
            return
        self._is_over = True
        statement = self._statement("", error)
        with contextlib.suppress(Exception):  # the first error is raised
            if self.is_leader:
                self._announce(self._store, self._step, statement)
            self._say(self._store, self._step, statement)
        self.abandon()

    @contextlib.contextmanager
    def _reaching_others(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise PeerError(
                f"process 0, which keeps the key-value store of jax.distributed, does not answer"
                f" while {doing}; it was probably killed",
                file=self._path,
            ) from error

    def _statement(
        self, doing: str, error: BaseException | None, agree: Fingerprint | None = None
    ) -> _Statement:
        if agree is not None:
            self._parts = agree.parts
        text = None if error is None else f"{type(error).__name__}: {error}"
        follows = isinstance(error, PeerError) and not self._has_given_up
        gone = error is not None and not isinstance(error, Exception)
        digest = () if agree is None else (*agree[:4], agree.content, agree.place)
        return _Statement(self.process_index, text, follows, gone, doing, digest)

    def _say(self, store: KeyValueStore, step: int, statement: _Statement) -> None:
        self._leave_failure(store, statement)
        store.renew(self._said(step, self.process_index), json.dumps(statement))

    def _leave_failure(self, store: KeyValueStore, statement: _Statement | None) -> None:
        if statement is None or statement.error is None or statement.follows:
            return
        if store.peek(f"{self._key}/failure") is None:
            store.renew(f"{self._key}/failure", json.dumps(statement))

    def _said(self, step: int, process: int) -> str:
        return f"{self._key}/{step}/said/{process}"

    def _statements(self, store: KeyValueStore, step: int) -> list[_Statement]:
        texts = store.list(f"{self._key}/{step}/said/")
        return [_Statement(*json.loads(text)) for text in texts.values()]

    def _verdict(self, store: KeyValueStore, statements: Sequence[_Statement]) -> _Statement | None:
        """Return the first failure, or a process that is gone and has not come to the step.

        Of all processes, also one that has something else than the first.
        """
        gone = {} if len(statements) == self.process_count else self._gone()
        if (text := store.peek(f"{self._key}/failure")) is not None:
            return _parse(text)
        if len(statements) == self.process_count:
            followed = min((s for s in statements if s.error is not None), default=None)
            return followed or _disagreement(statements, self._purpose) or _parting(statements)
        for statement in statements:
            gone.pop(statement.process, None)
        return min(gone.values(), default=None)

    def _read_verdict(self, store: KeyValueStore, step: int) -> _Statement | None:
        """Return the first failure or a step's verdict, or the first process if it is gone."""
        gone = self._gone()
        for key in ("failure", f"{step}/verdict"):
            if (text := store.peek(f"{self._key}/{key}")) is not None:
                return _parse(text)
        return gone.get(self._processes[0])

    def _gone(self) -> dict[int, _Statement]:
        """Return processes that were killed or have left: of all, or whether the first one has."""
        if self._heartbeat is None:
            return {}
        killed = f"no sign of life for {heartbeat.SILENCE_SECONDS:g} s; it was probably killed"
        left = f"its {self._purpose} ended before that"
        return {
            process: _Statement(process, killed if is_dead else left, gone=is_dead)
            for process, is_dead in self._heartbeat.gone().items()
        }

    def overdue(self, what: str) -> PeerError:
        """Return the error that `what` did not happen in time, which then fails all.

        Those that come later are in the next operation.
        """
        self._has_given_up = True
        if self._store is not None:
            self._store.renew(f"{self._late}{self.process_index}", str(self.number))
        return PeerError(
            f"{what} within {self._timeout_seconds:g} s",
            file=self._path,
            hint=f"See their logs. All processes of the program must {self._purpose}, with the same"
            " options (one with replicated='each' waits for none), so Orbax's `active_processes`"
            " must name all; `timeout_seconds` of the options sets the limit.",
        )

    def _missing_error(self, missing: Iterable[int], doing: str) -> PeerError:
        return self.overdue(f"processes {sorted(missing)} did not finish {doing}")

    def _peer_error(self, verdict: _Statement, doing: str) -> PeerError:
        text = f"process {verdict.process} failed while {doing}: {verdict.error}"
        if verdict.differs:
            with contextlib.suppress(Exception):  # the others may have ended
                text += self._difference(verdict.process)
        return PeerError(text, file=self._path)

    def _difference(self, other: int) -> str:
        """Say which parts of the first process and another one are the first that differ."""
        store, first = self._store, self._processes[0]
        assert store is not None
        parts, said = f"{self._key}/differs/{other}", f"{self._key}/differs/text"
        if self.process_index == other:
            packed = zlib.compress("\n".join(self._parts()).encode("utf-8", "surrogateescape"))
            store.renew(parts, base64.b64encode(packed).decode())
        if not self.is_leader:
            return store.get(said, 3 * _GRACE_SECONDS).rstrip()
        packed = base64.b64decode(store.get(parts, 2 * _GRACE_SECONDS))
        theirs = zlib.decompress(packed).decode("utf-8", "surrogateescape").splitlines()
        pairs = itertools.zip_longest(self._parts(), theirs, fillvalue="no more")
        pair = next((pair for pair in pairs if pair[0] != pair[1]), None)
        text = " "
        if pair is not None:
            own, its = (f"{part:.{_MOST_SHOWN}}" for part in pair)
            text = f" The first difference: process {first} has {own}; process {other} has {its}."
        store.renew(said, text)
        return text.rstrip()

    def _announce(self, store: KeyValueStore, step: int, verdict: _Statement | None) -> None:
        if step > self._announced:
            self._announced = step
            store.set(f"{self._key}/{step}/verdict", json.dumps(verdict))
        self._leave_failure(store, verdict)

    def _collect(self, store: KeyValueStore, step: int, doing: str) -> _Statement | None:
        """Waits for the statements of all processes, or the first error; returns the verdict."""
        began = time.monotonic()
        while True:
            check_cancelled()
            statements = self._statements(store, step)
            verdict = self._verdict(store, statements)
            if verdict is not None or len(statements) == self.process_count:
                return verdict
            missing = sorted({*self._processes} - {s.process for s in statements})
            if time.monotonic() > began + self._timeout_seconds:
                raise self._missing_error(missing, doing)
            if time.monotonic() > began + _PROMPT_SECONDS:
                time.sleep(_LONGEST_PAUSE_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):  # another one may have failed
                store.get(self._said(step, missing[0]), _LONGEST_PAUSE_SECONDS)

    def _await_verdict(self, store: KeyValueStore, step: int, doing: str) -> _Statement | None:
        deadline = time.monotonic() + self._timeout_seconds + _GRACE_SECONDS
        while (text := self._await(store, f"{self._key}/{step}/verdict", deadline)) is None:
            if (failure := self._read_verdict(store, step)) is not None:
                return failure
            if time.monotonic() > deadline:
                spoke = {statement.process for statement in self._statements(store, step)}
                raise self._missing_error({*self._processes} - spoke or {self._processes[0]}, doing)
        return _parse(text)

    def _await(self, store: KeyValueStore, key: str, deadline: float) -> str | None:
        """Waits for a value, some seconds at most, and not beyond a deadline."""
        until = min(time.monotonic() + _WAIT_SECONDS, deadline)
        # A wait in the store cannot be cancelled, and each that ended without its key is kept.
        most = _LONGEST_PAUSE_SECONDS if is_cancellable() else _WAIT_SECONDS
        check_cancelled()
        with contextlib.suppress(TimeoutError):
            return store.get(key, max(0.001, min(until - time.monotonic(), most)))
        while (text := store.peek(key)) is None and time.monotonic() < until:
            check_cancelled()
            time.sleep(_LONGEST_PAUSE_SECONDS)
        return text


def _parse(text: str) -> _Statement | None:
    parts = json.loads(text)
    return None if parts is None else _Statement(*parts)


def _possession(statement: _Statement, other: _Statement) -> str:
    """Say what a process agrees to, with the assumptions that are not another's."""
    _, description, _, assumptions, *_ = statement.agree
    own = [assumption for assumption in assumptions if assumption not in other.agree[3]]
    by = f" by {', '.join(own)}" if own else ""
    return f"process {statement.process} has {description}{by}"


def _disagreement(statements: Sequence[_Statement], purpose: str) -> _Statement | None:
    """Return the failure of a process whose step or fingerprint is not the first one's."""
    first, *others = sorted(statements)
    for other in others:
        if other.doing != first.doing:
            at = " and ".join(f"process {s.process} is {s.doing}" for s in (first, other))
            return _Statement(other.process, f"processes do not do the same: {at}")
        if other.agree[:1] != first.agree[:1]:
            has = f"{_possession(first, other)}; {_possession(other, first)}"
            text = f"it has something else to {purpose}: {has}. {first.agree[2]}"
            return _Statement(other.process, text, differs=True)
    if (changed := _different(statements, _CONTENT)) is not None:
        has = "; ".join(
            f"process {s.process} has {s.agree[_PLACE]} (content {s.agree[_CONTENT]})"
            for s in (first, changed)
        )
        return _Statement(changed.process, f"its files are others: {has}. {first.agree[2]}")
    return None


def _parting(statements: Sequence[_Statement]) -> _Statement | None:
    """Return the verdict that all go apart, if a place is not the first one's."""
    other = _different(statements, _PLACE)
    if other is None:
        return None
    both = min(statements), other
    text = ", ".join(f"process {s.process} has {s.agree[_PLACE]}" for s in both)
    return _Statement(other.process, apart=text)


def _different(statements: Sequence[_Statement], field: int) -> _Statement | None:
    """Return one of which a field of the fingerprint is not the first one's, if both have it."""
    known = sorted(s for s in statements if s.agree and s.agree[field])
    return next((s for s in known if s.agree[field] != known[0].agree[field]), None)
