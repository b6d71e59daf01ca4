"""Threads that write, and stop at the first failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait

_CHECK_SECONDS = 1.0


class WritePool:
    """Threads that write, a bounded number of jobs ahead.

    Attributes:
        threads: How many.

    Args:
        threads: How many.
        interrupt: Called after a failure, perhaps repeatedly: shortens what runs.
        check: Called by who waits for jobs, about once a second; what it raises is raised there.
    """

    def __init__(
        self,
        threads: int,
        interrupt: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "safetensors-write")
        self._running: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._first: BaseException | None = None  # of the failures
        self._stopped = False
        self._interrupt = interrupt
        self._check = check

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Runs `work` on a thread; raises what an earlier one raised."""
        while len(self._running) >= 3 * self.threads:
            self.progress()
        job = self._pool.submit(self._unless_failed, work)
        self._running.add(job)
        return job

    def join(self) -> None:
        """Waits for all; raises what the first to fail raised."""
        while self._running:
            self.progress()

    def progress(self) -> None:
        """Waits until one more is done; raises what the first to fail raised, if one has."""
        done: set[Future[None]] = set()
        while self._running and not done:
            self._check()
            done = wait(self._running, _CHECK_SECONDS, FIRST_COMPLETED).done
        self._running -= done
        if self._first is not None:
            raise self._first

    def stop(self) -> None:
        """Starts nothing more, and waits for what runs."""
        self._stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _unless_failed(self, work: Callable[[], None]) -> None:
        if self._first is not None:  # what is left out has failed, too: nobody may count on it
            raise self._first
        if self._stopped:
            raise CancelledError
        try:
            work()
        except BaseException as error:
            with self._lock:
                if self._first is None:
                    self._first = error
            self._interrupt()
            raise
