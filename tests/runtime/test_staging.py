"""Memory that is used again."""

import collections
import os
import signal
import sys
import threading

import numpy as np
import pytest

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


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of JAX
def test_a_forked_child_maps_memory_while_a_thread_of_the_parent_does():
    with memory._pages._lock:  # as by another thread of the parent
        child = os.fork()
        if not child:
            signal.alarm(20)
            memory.allocate(4 << 20)[:] = 1
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
