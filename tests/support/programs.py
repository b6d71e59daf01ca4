"""Runs programs of `tests/programs` in child processes: arguments and results are JSON values."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_SUPPORT = Path(__file__).parent
REPOSITORY = _SUPPORT.parents[1]
_PROGRAMS = _SUPPORT.with_name("programs")


def _environment(devices: int) -> dict[str, str]:
    """Return that of a child with virtual devices, which finds the modules of `tests/support`."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_SUPPORT), str(REPOSITORY)]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def program_path(program: str) -> str:
    """Return the file of a program of `tests/programs`."""
    return str(_PROGRAMS / program)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ended(NamedTuple):
    """How a child ended.

    Attributes:
        status: Its exit status, or minus the signal that ended it.
        said: What it said after it had begun.
        errors: The end of its output.
        seconds: How long it ran after all had begun.
    """

    status: int
    said: list[Any]
    errors: str
    seconds: float


class ForkServer:
    """Runs `main(**arguments)` of a program in children.

    `main` calls `say` once when it begins, and then whenever it has something to tell; with
    `kill_at` it kills itself before a system call (both are in `fork_server`).

    Args:
        program: A file of `tests/programs`, which is loaded once, before children begin.
    """

    def __init__(self, program: str = "") -> None:
        path = program and program_path(program)
        code = f"import fork_server; fork_server.serve({path!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**_environment(2), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._line(300) == b"ready"

    def close(self) -> None:
        """Ends the server, and children that hang."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.kill()
        self._process.stdout.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout)
        assert readable, f"no answer within {timeout} seconds"
        line = self._process.stdout.readline()
        assert line, "the server is gone"
        return line.strip()

    def run(
        self,
        children: Sequence[Mapping[str, Any]],
        *,
        setups: Sequence[Mapping[str, Any]] | None = None,
        after_seconds: float | None = None,
        together: bool = False,
        timeout: float = 280,
    ) -> list[Ended]:
        """Runs children at once, and waits for all.

        Args:
            children: The arguments of each.
            setups: For each the program and its surroundings, where they are not the server's.
            after_seconds: When all are killed from outside, if at all.
            together: Whether all are killed when one has died by a signal.
            timeout: Seconds until all are given up.
        """
        assert self._process.stdin is not None
        request = {
            "children": children,
            "setups": setups,
            "after_seconds": after_seconds,
            "together": together,
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return [Ended(*ended) for ended in json.loads(self._line(timeout))]


@functools.cache
def _shared_server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


def run_programs(
    program: str,
    children: Sequence[Mapping[str, Any]],
    *,
    devices: int = 1,
    timeout: float = 240,
    clusters: Sequence[Any] | None = None,
    abrupt: bool = False,
) -> list[Ended]:
    """Run `main` of a program in children at once; the last thing that one said is its result.

    Args:
        program: A file of `tests/programs`.
        children: The arguments of each: JSON values.
        devices: Devices of each.
        timeout: Seconds.
        clusters: The arguments of `jax.distributed.initialize` of each, if any.
        abrupt: Whether children end without the farewells of Python and JAX.
    """
    setups = [
        {
            "program": program_path(program),
            "environment": _environment(devices),
            "cluster": clusters and clusters[index],
            "abrupt": abrupt,
        }
        for index in range(len(children))
    ]
    server = _shared_server()
    try:
        return server.run(children, setups=setups, timeout=timeout)
    except BaseException:
        _shared_server.cache_clear()
        server.kill()
        raise


def run_processes(
    program: str,
    *,
    processes: int,
    devices: int,
    timeout: float = 240,
    lost: int | None = None,
    **arguments: Any,
) -> list[Any]:
    """Return what `main(**arguments)` of a program returns in each process of a cluster.

    Args:
        program: A file of `tests/programs`.
        processes: How many there are; `jax.distributed` joins them on localhost.
        devices: Devices of each.
        timeout: Seconds.
        lost: A process that is killed; the others then end without JAX's farewell, which would wait
            for it.
        arguments: JSON values.
    """
    address = f"127.0.0.1:{free_port()}"
    ended = run_programs(
        program,
        [arguments] * processes,
        devices=devices,
        timeout=timeout,
        clusters=[[address, processes, index] for index in range(processes)],
        abrupt=lost is not None,
    )
    results = []
    for index, child in enumerate(ended):
        if index == lost:
            assert child.status == -signal.SIGKILL, child
        assert index == lost or child.said, f"exit {child.status}\n{child.errors}"
        results.append(None if index == lost else child.said[-1])
    return results


def run_alone(
    program: str,
    *arguments: object,
    mount: tuple[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> str:
    """Return what a program of `tests/programs` prints, perhaps with a file system of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
    command = [sys.executable, program_path(program), *map(str, arguments)]
    if mount is not None:
        size, folder = mount
        mounting = f"mount -t tmpfs -o size={size} tmpfs {folder}"
        if (
            not shutil.which("unshare")
            or subprocess.run(
                ["unshare", "-m", "sh", "-c", mounting], capture_output=True, check=False
            ).returncode
        ):
            pytest.skip("may not mount")
        command = ["unshare", "-m", "sh", "-c", f'{mounting} && exec "$@"', "sh", *command]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
