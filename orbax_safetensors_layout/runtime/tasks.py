"""Worker threads: work on a pool, what follows from it on the calling thread, one first failure.

Also a thread for calls that may never return.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Self, TypeAlias, TypeVar, TypeVarTuple

from .cancellation import interrupt_when_cancelled

_CHECK_SECONDS = 1.0

T = TypeVar("T")
Args = TypeVarTuple("Args")
Then: TypeAlias = Callable[[], None] | None  # what follows from a task, on the calling thread


class Workers:
    """Threads that run tasks, a bounded number ahead, for one calling thread.

    The first failure ends all: later tasks are not run, and whoever waits is given its error.
    Leaving the `with` block waits for what is running and drops what nobody took. `interrupt` is
    called after a failure, perhaps repeatedly, and shortens what is running; `check` about once a
    second while the calling thread waits, and raises to end that.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        interrupt: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._interrupt = interrupt
        self._check = check
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._is_stopped = False
        self._finished: queue.SimpleQueue[Then] = queue.SimpleQueue()
        self._in_flight = 0
        self._cancellation = interrupt_when_cancelled(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._is_stopped = True
            self._interrupt()
        self.stop()

    def submit(
        self, task: Callable[[*Args], Then], *args: *Args, wait: bool = True
    ) -> Future[None]:
        """Runs a task on a thread, and the function that it returns on the calling thread.

        `wait` first until just enough tasks are in flight to keep all threads busy. Raises the
        error of an earlier task.
        """
        while wait and self._in_flight >= 3 * self.threads:
            self.progress()
        self._in_flight += 1
        return self._pool.submit(self._run, task, *args)

    def progress(self) -> bool:
        """Waits for a task, and does what follows; False if none is in flight."""
        while True:
            if self._error is not None:
                raise self._error
            if not self._in_flight:
                return False
            self._cancellation.check()
            self._check()
            try:
                then = self._finished.get(timeout=_CHECK_SECONDS)
            except queue.Empty:
                continue
            if self._error is not None:
                raise self._error
            self._in_flight -= 1
            if then is not None:
                then()
            return True

    def progress_finished(self) -> None:
        while not self._finished.empty():
            self.progress()

    def join(self) -> None:
        while self.progress():
            pass

    def interrupt(self) -> None:
        """Fails with `CancelledError`; for any thread."""
        self._fail(CancelledError("the work was cancelled"))

    def stop(self) -> None:
        """Starts no more tasks, and waits for those that run."""
        self._is_stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._finished = queue.SimpleQueue()  # what is left in it holds buffers
        self._error = None  # its traceback holds this object

    def _run(self, task: Callable[..., Then], *args: object) -> None:
        if self._error is not None:  # what is left out has failed, too: nobody may count on it
            raise self._error
        if self._is_stopped:
            raise CancelledError
        try:
            then = task(*args)
        except BaseException as error:
            self._fail(error)
            raise
        self._finished.put(then)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self._interrupt()
        self._finished.put(None)


class DaemonThread:
    """A thread that makes calls in turn; unlike a pool's it is not waited for at a program's end.

    It begins with the first call.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        if self._thread.ident is None:
            self._thread.start()
        done: Future[T] = Future()
        self._calls.put(functools.partial(_complete, done, call))
        return done

    def end(self) -> None:
        """Ends the thread when it has made all calls; waits for none."""
        self._calls.put(None)

    def stop(self, seconds: float) -> bool:
        """Makes no more calls; returns whether the one that is being made returns in time."""
        self._is_stopped = True
        self.end()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._make_next_call():  # of which nothing is held while it waits
            pass

    def _make_next_call(self) -> bool:
        call = self._calls.get()
        if call is None or self._is_stopped:
            return False
        call()
        return True


def _complete(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)
        del done, call  # which the error's traceback holds
