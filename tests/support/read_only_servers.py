"""Servers to read from, for the contract of storages, in a process of their own.

Both serve a folder. For the hub each folder in it is a repository, and each in that a commit, of
which the last is `main`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from faults import Fault, Faults
from http_server import FAULTS, Reply, Request, Server, files_of
from hub_server import CACHE, Hub, Repo

_KINDS = {"reset": "reset", "truncate": "truncated", "range": "wrong range", "delay": "stall"}


class ReadOnlyServer:
    """A running server.

    Attributes:
        kind: "hf" or "https".
        url: Its address.
        folder: What it serves.
    """

    def __init__(self, kind: str, folder: Path, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.kind, self.folder = kind, folder
        self.url = process.stdout.readline().strip()
        self._process = process

    def fail(self, *faults: Fault) -> None:
        """Sets what goes wrong from now on with requests for ranges of files."""
        self._tell("faults", [dataclasses.asdict(fault) for fault in faults])

    def take_log(self) -> list[dict[str, Any]]:
        """The requests for ranges of files since the last call, as of `ObjectServer`."""
        log: list[dict[str, Any]] = self._tell("log", None)
        return log

    def _tell(self, what: str, value: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, value]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class _FolderHub(Hub):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def repo(self, name: str) -> Repo | None:
        folder = self._folder / name.rpartition("/")[2]
        if not folder.is_dir():
            return None
        paths = sorted(folder.iterdir(), key=lambda path: int(path.name))
        commits = {hashlib.sha1(str(path).encode()).hexdigest(): path for path in paths}
        return Repo(commits, {"main": list(commits)[-1]})


@contextlib.contextmanager
def read_only_server(kind: str, folder: Path) -> Iterator[ReadOnlyServer]:
    """Runs a server of a folder; `hf://` is its, inside the block."""
    command = [sys.executable, __file__, kind, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            server = ReadOnlyServer(kind, folder, process)
            with mock.patch.dict(os.environ, {"HF_ENDPOINT": server.url}):
                yield server
        finally:
            process.kill()


class Recorder:
    """Logs requests for ranges, and tells which of them fail and how."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.log: list[dict[str, Any]] = []

    def __call__(self, request: Request) -> str | None:
        if request.range is None:
            return None
        fault = self.faults.take(request.method, request.path)
        entry = {"method": request.method, "fault": fault and fault.kind}
        entry |= {"first": request.range[0], "last": request.range[1] - 1}
        self.log.append(entry)
        if fault is None:
            return None
        if fault.kind == "status":
            FAULTS[str(fault.status)] = lambda reply: Reply(fault.status, {})
        return {"status": str(fault.status), **_KINDS}[fault.kind]


def main() -> None:
    """Serves, in threads, until it is killed; does what it is told on stdin."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    recorder = Recorder()
    if kind == "hf":
        hub = _FolderHub(folder)
        server = hub.hub
        # Of a small file the request that is not redirected any more.
        server.faults = lambda request: recorder(request) if CACHE in request.path else None
    else:
        server = Server(files_of(folder))
        server.faults = recorder
    print(server.url, flush=True)
    for line in sys.stdin:
        what, value = json.loads(line)
        log: list[dict[str, Any]] = []
        if what == "faults":
            recorder.faults = Faults(value)
        else:
            log, recorder.log = recorder.log, []
        print(json.dumps(log), flush=True)


if __name__ == "__main__":
    main()
