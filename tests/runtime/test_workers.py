"""Workers end with their first failure, whenever it comes."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from orbax_safetensors_layout.runtime import Workers


@pytest.mark.parametrize("wait", ["progress", "progress_finished", "join", "submit"])
def test_an_interrupt_in_what_follows_from_the_last_task_ends_all(wait):
    def work(workers):
        workers.submit(lambda: workers.interrupt).result()
        if wait == "submit":
            workers.progress()
            workers.submit(lambda: None).result()
        else:
            getattr(workers, wait)()
            workers.progress()

    with Workers(1, "test") as workers, pytest.raises(CancelledError):
        work(workers)


def test_an_interrupt_when_nothing_runs_ends_what_waits():
    with Workers(1, "test") as workers:
        workers.interrupt()
        with pytest.raises(CancelledError):
            workers.progress_finished()


def test_what_follows_is_done_on_the_calling_thread():
    done = []
    with Workers(2, "test") as workers:
        for _ in range(9):
            workers.submit(lambda: lambda: done.append(threading.current_thread()))
        workers.join()
    assert done == [threading.current_thread()] * 9
