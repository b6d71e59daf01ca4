"""Requests that may fail for a while: tried again with jittered pauses, in a bounded time."""

from __future__ import annotations

import datetime
import email.utils
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from absl import logging

from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError, redact
from orbax_safetensors_layout.options import RetryPolicy

T = TypeVar("T")

_PASSING_STATUS = {408, 425, 429}
_LASTING_SERVER_STATUS = {501, 505}


class Failure(NamedTuple):
    """A classifier's verdict on an error of one attempt.

    Attributes:
        cause: A few words; secrets are taken out of them.
        transient: Whether another attempt may do better.
        after_seconds: How long the server asked to be left alone, if it did.
    """

    cause: str
    transient: bool
    after_seconds: float | None = None


Classify = Callable[[Exception], Failure | None]
"""Tells what an error means; None for one that has nothing to do with the request."""


class RequestFailed(Exception):
    """The last failure of a request, as text without secrets; what a `StorageError` chains."""


class Retrier:
    """Runs requests of one storage by one policy. Safe to use from many threads.

    Args:
        policy: How often and how long to try.
        clock: Seconds; for tests.
        wait: Waits for some seconds, or until `interrupt`; tells whether it was that. For tests.
        jitter: A number in [0, 1), drawn for each pause; for tests.
        redact: Takes the secrets out of what a failed attempt tells.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        jitter: Callable[[], float] = random.random,
        redact: Callable[[str], str] = redact,
    ) -> None:
        self.policy = policy
        self._interrupted = threading.Event()
        self._clock = clock
        self._wait = wait or self._interrupted.wait
        self._jitter = jitter
        self._redact = redact

    def interrupt(self) -> None:
        """Ends all pauses: from now on nothing is tried again."""
        self._interrupted.set()

    def run(self, call: Callable[[], T], classify: Classify, *, doing: str, url: str) -> T:
        """Returns the result of `call`, tried until it succeeds or another attempt is useless.

        This package's own errors are passed on; `classify` judges others. A permanent failure, or
        too many others, is a `StorageError` with what was being done (as "reading bytes [0, 8)"),
        the URL without query string and user info, the attempts and the last cause.
        """
        begun = self._clock()
        for attempt in itertools.count(1):
            try:
                return call()
            except SafetensorsLayoutError as error:
                error.__context__ = None  # a client's error, which may show what is signed
                raise
            except Exception as error:
                verdict = classify(error)
                if verdict is None:
                    raise
            failure = verdict._replace(cause=self._redact(verdict.cause))
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
        ) from RequestFailed(failure.cause)

    def _pause(self, attempt: int, failure: Failure, left_seconds: float) -> float | None:
        """Returns seconds until the next attempt; None if there is to be none."""
        policy = self.policy
        given_up = self._interrupted.is_set() or attempt == policy.attempts
        if not failure.transient or given_up or left_seconds <= 0:
            return None
        longest = min(policy.max_seconds, policy.base_seconds * 2.0 ** min(attempt - 1, 60))
        pause = longest * (1 - policy.jitter * self._jitter())
        asked = failure.after_seconds or 0.0
        return None if asked > left_seconds else min(max(pause, asked), left_seconds)


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns the result of `call`; after `seconds` it goes on in a thread that nobody waits for.

    For clients that bound the time of each read but not of a request.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    # Not of a pool: those are waited for at the end of a program.
    threading.Thread(target=run, name="safetensors-request", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():  # by a time-out of its own
            raise
    raise TimeoutError(f"no complete answer in {seconds:g} s")


def is_transient_status(status: int) -> bool:
    """Whether an HTTP status may be another one later: 408, 425, 429 and most from 500 on."""
    return status in _PASSING_STATUS or (status >= 500 and status not in _LASTING_SERVER_STATUS)


def retry_after_seconds(header: str | None) -> float | None:
    """Returns the seconds of a `Retry-After` header: a number, or a date (RFC 9110, 10.2.3)."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    date = http_date(header)
    if date is None:
        return None
    return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())


def http_date(text: str | None) -> datetime.datetime | None:
    """Returns the moment that a header tells (RFC 9110, 5.6.7); None if it tells none."""
    try:
        date = email.utils.parsedate_to_datetime(text or "")
        # Of a year at either end of what a date can be, another zone's may be none.
        return date.replace(tzinfo=date.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    except (ValueError, TypeError, OverflowError):
        return None
