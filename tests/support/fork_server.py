"""A process that has imported everything, and forks a child for each program that is to run.

A child runs `main(**arguments)` of a program. It begins in milliseconds, and can be killed before
any system call.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings

import jax

CALLS = ("open", "pwritev", "pwrite", "fsync", "replace", "rename", "link", "mkdir", "unlink")
_report = -1


def say(what):
    """Tell the test something: any JSON value."""
    os.write(_report, (json.dumps(what) + "\n").encode())


def kill_at(number, more=()):
    """Let this process kill itself before a system call.

    Args:
        number: 0-based number of the call, counted from here; -1 is never.
        more: Pairs of an object and a method of it that count as system calls, too.

    Returns:
        A list with the number of calls so far.
    """
    count, lock = [0], threading.Lock()

    def wrap(real):
        def call(*arguments, **keywords):
            with lock:
                if count[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count[0] += 1
            return real(*arguments, **keywords)

        return call

    for owner, name in [*((os, name) for name in (*CALLS, "rmdir")), *more]:
        setattr(owner, name, wrap(getattr(owner, name)))
    return count


def load(program):
    """Return `main` of a program, the path of a file."""
    return runpy.run_path(program)["main"]


def _run(main, arguments, setup, others):
    if setup is None:
        main(**arguments)
        return
    os.environ.clear()
    os.environ.update(setup["environment"])
    say("begin")
    if setup["cluster"]:
        jax.distributed.initialize(*setup["cluster"], initialization_timeout=60)
    say(load(setup["program"])(**arguments))
    if not setup["abrupt"]:
        threading._shutdown()
        atexit._run_exitfuncs()  # with JAX's farewell, in which processes wait for each other
    elif others is not None:
        os.read(others, 1)  # JAX ends processes that lose its coordinator, said or not


def _fork(main, arguments, setup, first, pipe):
    global _report
    said, _report = os.pipe()
    errors = os.memfd_create("stderr")
    pid = os.fork()
    if not pid:
        status = 1
        os.close(said)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        if first:
            os.close(pipe[1])  # the others have it until they end
        try:
            _run(main, arguments, setup, pipe[0] if first else None)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(_report)
    return pid, open(said), errors


def _serve(main, children, setups, after_seconds, together):
    results = [None] * len(children)
    running = {}
    pipe = os.pipe()
    for number, arguments in enumerate(children):
        running[number] = _fork(main, arguments, setups and setups[number], not number, pipe)
    for end in pipe:
        os.close(end)
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
        lines = [line for line in said.read().splitlines(keepends=True) if line.endswith("\n")]
        said.close()
        os.lseek(errors, 0, os.SEEK_SET)
        text = os.read(errors, 1 << 24)[-4000:].decode(errors="replace")
        os.close(errors)
        seconds = time.monotonic() - started
        results[number] = [status, [json.loads(line) for line in lines], text, seconds]
    return results


def serve(program):
    """Answer each line of standard input, a JSON request, by a line with how its children ended."""
    warnings.simplefilter("ignore")
    main = load(program) if program else _import_everything()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_serve(main, **json.loads(line))), flush=True)


def _import_everything():
    import safetensors.numpy  # noqa: F401

    import orbax_safetensors_layout

    for name in orbax_safetensors_layout.__all__:
        getattr(orbax_safetensors_layout, name)
