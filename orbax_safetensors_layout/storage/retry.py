"""Requests that may fail for a while: tried again with jittered pauses, in a bounded time."""

from __future__ import annotations

import datetime
import email.utils
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from absl import logging

from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError, redact
from orbax_safetensors_layout.options import RetryPolicy
from orbax_safetensors_layout.runtime import DaemonThread

T = TypeVar("T")


class Failure(Exception):
    """One attempt of a request failed, for a `cause` in a few words.

    `transient` if another attempt may do better, but not before `after_seconds`, if the server
    asked for them. A client's or a server's own text is at most chained, without secrets.
    """

    def __init__(
        self, cause: str, *, transient: bool = True, after_seconds: float | None = None
    ) -> None:
        self.cause = redact(cause)
        super().__init__(self.cause)
        self.transient = transient
        self.after_seconds = after_seconds


class Retrier:
    """Runs requests of one storage by one policy. Safe to use from many threads.

    `classify` says what an error means; None for one that has nothing to do with the request.
    The clock in seconds and pauses (which return whether `interrupt` ended them) are arguments for
    tests.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        classify: Callable[[Exception], Failure | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.policy = policy
        self._classify = classify
        self._interrupted = threading.Event()
        self._clock = clock
        self._wait = wait or self._interrupted.wait

    def interrupt(self) -> None:
        self._interrupted.set()

    def goes_on(self, _: object = None) -> bool:
        """Return whether it was not interrupted; for instance while parts of a body come."""
        return not self._interrupted.is_set()

    def run(self, call: Callable[[], T], doing: str, url: str) -> T:
        """Returns the result of `call`, tried until it succeeds or another attempt is useless.

        This package's own errors are passed on. The `StorageError` for others says what was being
        done (as "reading bytes [0, 8)"), the attempts and the last cause.
        """
        begun = self._clock()
        for attempt in itertools.count(1):
            try:
                return call()
            except SafetensorsLayoutError as error:
                error.__context__ = None  # a client's error, which may show what is signed
                raise
            except Exception as error:
                judged = error if isinstance(error, Failure) else self._classify(error)
                if judged is None:
                    raise
                failure = judged
                failure.__traceback__ = failure.__context__ = None  # whose frames hold buffers
            elapsed = self._clock() - begun
            pause = self._pause(attempt, failure, self.policy.total_seconds - elapsed)
            if pause is None:
                break
            logging.vlog(1, "%s: %s failed: %s", redact(url), doing, failure.cause)
            if self._wait(pause) or self._interrupted.is_set():
                break
        hint = None
        if failure.transient and not self._interrupted.is_set():
            hint = "A `retries=osl.RetryPolicy(...)` of the options sets how long it is tried."
        times = "1 attempt" if attempt == 1 else f"{attempt} attempts"
        raise StorageError(
            f"{doing} failed after {times} in {self._clock() - begun:.1f} s",
            file=redact(url),
            found=failure.cause,
            hint=hint,
        ) from failure

    def _pause(self, attempt: int, failure: Failure, left_seconds: float) -> float | None:
        """Returns seconds until the next attempt; None if there is to be none."""
        policy = self.policy
        given_up = self._interrupted.is_set() or attempt == policy.attempts
        if not failure.transient or given_up or left_seconds <= 0:
            return None
        longest = min(policy.max_seconds, policy.base_seconds * 2.0 ** min(attempt - 1, 60))
        pause = longest * (1 - policy.jitter * random.random())
        asked = failure.after_seconds or 0.0
        return None if asked > left_seconds else min(max(pause, asked), left_seconds)


def words_of(error: BaseException) -> str:
    """Return the words of the operating system below an error, or else its type: no server's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or (isinstance(cause, OSError) and cause.errno):
            return f"{type(cause).__name__}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns the result of `call`; after `seconds` it goes on in a thread that nobody waits for.

    For clients that bound the time of each read but not of a request.
    """
    thread = DaemonThread("safetensors-request")
    done = thread.submit(call)
    thread.end()
    if not wait([done], seconds).done:
        raise TimeoutError(f"no complete answer in {seconds:g} s")
    return done.result()


def is_transient_status(status: int) -> bool:
    """Whether an HTTP status may be another one later: 408, 425, 429 and most from 500 on."""
    return status in (408, 425, 429) or (status >= 500 and status not in (501, 505))


def retry_after_seconds(header: str | None) -> float | None:
    """Returns the seconds of a `Retry-After` header: a number, or a date (RFC 9110, 10.2.3)."""
    if header is not None and header.strip().isdecimal():
        return float(header)
    date = http_date(header)
    if date is None:
        return None
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())


def http_date(text: str | None) -> datetime.datetime | None:
    """Returns the moment that a header gives (RFC 9110, 5.6.7); None if it gives none."""
    try:
        date = email.utils.parsedate_to_datetime(text or "")
        # A date in the first or last possible year may be out of range in another zone.
        return date.replace(tzinfo=date.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    except (ValueError, TypeError, OverflowError):
        return None
