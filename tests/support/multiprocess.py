"""Runs a Python function in several real processes that `jax.distributed` joins on localhost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

_PRELUDE = """
import json, os, sys
import jax
port, count, index = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", count, index, initialization_timeout=60)
arguments = json.loads(sys.argv[4])
"""
_EPILOGUE = """
print("RESULT " + json.dumps(main(**arguments)), flush=True)
if sys.argv[5] != "None":
    os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(
    source: str,
    *,
    processes: int,
    devices: int,
    timeout: float = 240,
    lost: int | None = None,
    **arguments: Any,
) -> list[Any]:
    """What `main(**arguments)`, defined by `source`, returns in each process.

    Args:
        source: Defines `main`.
        processes: How many there are.
        devices: Devices of each.
        timeout: Seconds.
        lost: A process that is killed; the others then end without JAX's farewell, which would wait
            for it.
        arguments: JSON values.
    """
    tests = Path(__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parents[1])]),
    }
    port = free_port()
    code = _PRELUDE + textwrap.dedent(source) + _EPILOGUE
    command = [sys.executable, "-c", code, str(port), str(processes)]
    running = [
        subprocess.Popen(
            [*command, str(index), json.dumps(arguments), str(lost)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in running]
    finally:
        for process in running:
            process.kill()
    results = []
    for index, (process, (out, err)) in enumerate(zip(running, outputs, strict=True)):
        if index == lost:
            assert process.returncode == -signal.SIGKILL, f"{process.returncode}\n{out}\n{err}"
            results.append(None)
            continue
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        assert lines, f"exit {process.returncode}\n{out}\n{err}"
        results.append(json.loads(lines[-1].removeprefix("RESULT ")))
    return results
