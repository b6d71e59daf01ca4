"""Memory that is used again."""

import collections
import gc
import signal
import sys
import threading

import numpy as np
import pytest
from accelerators import Driver

from orbax_safetensors_layout.runtime import Staging, memory


def test_memory_comes_back_on_any_thread_while_more_is_taken():
    """Threads switch as often as they can, and what is held keeps what was written to it."""
    staging, held, done = Staging(), collections.deque(), threading.Event()
    wrong = []

    def drop():
        while not done.is_set():
            for _ in range(100 if len(held) > 200 else 0):
                number, memory = held.popleft()
                wrong.extend([number] * bool(np.any(memory != number % 251)))
                del memory

    worker = threading.Thread(target=drop)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    worker.start()
    try:
        for number in range(5_000):
            memory = staging.take(64 << number % 8)
            memory[:] = number % 251
            held.append((number, memory))
    finally:
        done.set()
        worker.join()
        sys.setswitchinterval(interval)
    assert not wrong


LARGE = 16 << 20


def test_memory_is_registered_once_and_until_it_is_freed():
    driver = Driver()
    staging = Staging(driver.register)
    small = staging.take(1 << 20)
    staging.register(small)
    staging.register(np.zeros(LARGE, np.uint8))  # whose memory is not its own
    for offset in (640, 0, 640):
        memory = staging.take(LARGE, file_offset=offset)
        assert driver.log == ["register"] * bool(driver.registered)  # of an earlier turn
        for at in (0, LARGE // 2, LARGE - 64):  # values anywhere in it
            staging.register(memory[at : at + 64].view(np.float32))
        ((address, nbytes),) = driver.registered.items()
        assert address <= memory.ctypes.data
        assert memory.ctypes.data + LARGE <= address + nbytes
        del memory
    assert driver.log == ["register"]
    kept = staging.take(LARGE)
    del staging
    gc.collect()
    assert driver.log == ["register"]  # what is taken is nobody else's to free
    del kept
    assert driver.log == ["register", "end"]


def test_registration_ends_where_idle_memory_is_freed_for_other():
    driver = Driver()
    staging = Staging(driver.register)
    staging.register(staging.take(LARGE))
    other = staging.take(2 * LARGE)
    staging.register(other)
    assert driver.log == ["register", "end", "register"]


def test_memory_that_cannot_be_registered_is_used_as_it_is():
    driver = Driver(fails=True)
    staging = Staging(driver.register)
    for _ in range(2):
        staging.register(staging.take(LARGE))
        staging.register(staging.take(2 * LARGE))
    assert driver.log == ["refuse"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_memory_whose_registration_does_not_end_is_kept(monkeypatch, error):
    monkeypatch.setattr(memory, "_registered", kept := {})

    def end():
        raise error

    staging = Staging(lambda address, nbytes: end)
    staging.register(staging.take(LARGE))
    del staging
    assert [content.size for content in kept.values()] == [LARGE]


def test_memory_is_kept_where_its_registration_is_interrupted(monkeypatch):
    """By a signal: nobody knows then whether it has been registered."""
    monkeypatch.setattr(memory, "_registered", kept := {})

    def register(address, nbytes):
        signal.raise_signal(signal.SIGINT)

    staging = Staging(register)
    with pytest.raises(KeyboardInterrupt):
        staging.register(staging.take(LARGE))
    del staging
    gc.collect()
    assert [content.size for content in kept.values()] == [LARGE]


def test_nothing_is_kept_that_is_not_registered(monkeypatch):
    monkeypatch.setattr(memory, "_registered", kept := {})
    for driver in (Driver(), Driver(fails=True)):
        staging = Staging(driver.register)
        staging.register(staging.take(LARGE))
        assert len(kept) == len(driver.registered)
        del staging
        assert not kept
