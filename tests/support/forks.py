"""Processes that begin in milliseconds and can be killed before any system call.

One server imports everything, and forks a child for each thing that is to be done.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SERVER = """
import json, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")
CALLS = "open pwritev pwrite fsync replace rename link mkdir unlink rmdir".split()


def say(what):
    os.write(SAID, (json.dumps(what) + "\\n").encode())


def kill_at(number, more=()):
    # Before the how manieth system call; `more` are pairs of an object and a method of it.
    count, lock = [0], threading.Lock()

    def wrap(real):
        def call(*arguments, **keywords):
            with lock:
                if count[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count[0] += 1
            return real(*arguments, **keywords)
        return call

    for owner, name in [*((os, name) for name in CALLS), *more]:
        setattr(owner, name, wrap(getattr(owner, name)))
    return count


def fork(arguments):
    global SAID
    said, SAID = os.pipe()
    errors = os.memfd_create("stderr")
    pid = os.fork()
    if not pid:
        status = 1
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        try:
            main(**arguments)
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(SAID)
    return pid, open(said), errors


def serve(children, after_seconds, together):
    running = {}
    results = [None] * len(children)
    for number, arguments in enumerate(children):
        running[number] = fork(arguments)
    for _, said, _ in running.values():
        said.readline()  # it has begun
    started = time.monotonic()
    if after_seconds is not None:
        time.sleep(after_seconds)
        for pid, _, _ in running.values():
            os.kill(pid, signal.SIGKILL)  # a zombie at most, which nobody has waited for
    numbers = {pid: number for number, (pid, _, _) in running.items()}
    while running:
        pid, status = os.wait()
        number = numbers[pid]
        _, said, errors = running.pop(number)
        status = os.waitstatus_to_exitcode(status)
        if status < 0 and together:
            for other, _, _ in running.values():
                os.kill(other, signal.SIGKILL)
        lines = [line for line in said.read().splitlines(keepends=True) if line.endswith("\\n")]
        said.close()
        os.lseek(errors, 0, os.SEEK_SET)
        text = os.read(errors, 1 << 24)[-4000:].decode(errors="replace")
        os.close(errors)
        seconds = time.monotonic() - started
        results[number] = [status, [json.loads(line) for line in lines], text, seconds]
    return results
"""
_LOOP = """
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(serve(**json.loads(line))), flush=True)
"""


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
        status: Its exit status, or minus the signal that ended it.
        said: What it said after it had begun.
        errors: The end of its standard error.
        seconds: How long it ran after all had begun.
    """

    status: int
    said: list[Any]
    errors: str
    seconds: float


class ForkServer:
    """Runs `main(**arguments)`, defined by `source`, in children.

    `main` calls `say` once when it begins, and then whenever it has something to tell; with
    `kill_at` it kills itself before a system call.
    """

    def __init__(self, source: str) -> None:
        tests = Path(__file__).parent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parents[1])]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER + textwrap.dedent(source) + _LOOP],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        assert self._line() == "ready"

    def close(self) -> None:
        """Ends the server, and children that hang."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server is gone"
        return line.strip()

    def run(
        self,
        children: Sequence[Mapping[str, Any]],
        *,
        after_seconds: float | None = None,
        together: bool = False,
    ) -> list[Ended]:
        """Runs children at once, and waits for all.

        Args:
            children: The arguments of each.
            after_seconds: When all are killed from outside, if at all.
            together: Whether all are killed when one has died by a signal.
        """
        assert self._process.stdin is not None
        request = {"children": children, "after_seconds": after_seconds, "together": together}
        self._process.stdin.write(json.dumps(request) + "\n")
        return [Ended(*ended) for ended in json.loads(self._line())]
