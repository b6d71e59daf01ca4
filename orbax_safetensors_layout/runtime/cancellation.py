"""Cancels work that runs in other threads: what it has begun is interrupted, from any thread."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Protocol, Self


class Interruptible(Protocol):
    """Work that fails soon after it is interrupted."""

    def interrupt(self) -> None: ...


class Cancellation:
    """Cancels the work that is begun inside its `with` block, or in a copy of its context."""

    def __init__(self) -> None:
        self.is_given_up: Callable[[], bool] = lambda: False  # whether nobody waits any more
        self._lock = threading.Lock()
        self._work: weakref.WeakSet[Interruptible] = weakref.WeakSet()
        self._is_cancelled = False

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def cancel(self) -> None:
        """Interrupts all work, and at once any that begins later."""
        with self._lock:
            self._is_cancelled = True
            begun = [*self._work]
        for work in begun:
            work.interrupt()

    def check(self) -> None:
        """Cancels work that nobody waits for any more."""
        if self.is_given_up():
            self.cancel()

    @property
    def is_cancelled(self) -> bool:
        self.check()
        return self._is_cancelled

    def add(self, work: Interruptible) -> None:
        with self._lock:
            self._work.add(work)
        if self._is_cancelled:
            work.interrupt()


_current: contextvars.ContextVar[Cancellation | None] = contextvars.ContextVar(
    "cancellation", default=None
)


def interrupt_when_cancelled(work: Interruptible) -> Cancellation:
    """Interrupts work when that of this context is cancelled; returns its `Cancellation`."""
    cancellation = _current.get() or Cancellation()
    cancellation.add(work)
    return cancellation


def is_cancellable() -> bool:
    """Whether somebody may cancel the work of this context."""
    return _current.get() is not None


def check_cancelled() -> None:
    """Raises `CancelledError` if the work of this context is cancelled."""
    cancellation = _current.get()
    if cancellation is not None and cancellation.is_cancelled:
        raise CancelledError("the work was cancelled")
