"""Worker threads: work on a pool, what follows from it on the calling thread, one first failure."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

_CHECK_SECONDS = 1.0

Then = Callable[[], None]
"""What follows from a piece of work, on the calling thread."""


class _Failure(NamedTuple):
    """What a worker thread puts into the queue in place of a finished piece of work."""

    error: BaseException


class Workers:
    """A pool whose results are taken, in the order in which they come, by the calling thread.

    After the first failure nothing more is started. Leaving the `with` block waits for what is in
    flight and drops what nobody took.

    Args:
        concurrency: Threads.
        name: Prefix of their names.
        interrupt: Called after a failure, perhaps repeatedly: shortens what is in flight.
        check: Called by `take`, while it waits about once a second: what it raises is a failure.
    """

    def __init__(
        self,
        concurrency: int,
        name: str,
        interrupt: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix=name)
        self._cancelled = threading.Event()
        self._interrupt = interrupt
        self._check = check
        self._events: queue.SimpleQueue[Then | _Failure] = queue.SimpleQueue()
        self._most_in_flight = 3 * concurrency
        self._in_flight = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cancelled.set()
        if error is not None:
            self._interrupt()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._events = queue.SimpleQueue()  # what is left in it holds buffers

    def submit(self, work: Callable[[], Then], explain: Callable[[BaseException], None]) -> None:
        """Runs `work` on the pool, and what it returns on the calling thread.

        Args:
            work: The work.
            explain: Adds to an error of `work` what it was about.
        """
        self._in_flight += 1
        self._pool.submit(self._run, work, explain)

    def take(self) -> bool:
        """Waits for one piece of work, and does what follows; False if none is in flight.

        Raises:
            BaseException: The work failed.
        """
        if not self._in_flight:
            return False
        event = self._next()
        if isinstance(event, _Failure):
            try:
                raise event.error
            finally:
                del event  # the error's traceback holds this frame
        self._in_flight -= 1
        event()
        return True

    def _next(self) -> Then | _Failure:
        while True:
            self._check()
            try:
                return self._events.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                continue

    def take_finished(self) -> None:
        """Does what follows from all work that is finished."""
        while not self._events.empty():
            self.take()

    def take_all(self) -> None:
        """Waits for all work, and does what follows."""
        while self.take():
            pass

    def make_room(self) -> None:
        """Waits until few enough pieces of work are in flight to keep all threads busy."""
        while self._in_flight >= self._most_in_flight:
            self.take()

    def _run(self, work: Callable[[], Then], explain: Callable[[BaseException], None]) -> None:
        if self._cancelled.is_set():
            return
        try:
            then = work()
        except BaseException as error:
            self._cancelled.set()
            self._interrupt()
            explain(error)
            self._events.put(_Failure(error))
        else:
            self._events.put(then)
