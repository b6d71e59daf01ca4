"""Servers to read from, for the contract of storages, in a process of their own.

Both serve a folder. For the hub each folder in it is a repository, and each in that a commit, of
which the last is `main`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from http_server import Server, files_of
from hub_server import Hub, Repo


class ReadOnlyServer:
    """A running server.

    Attributes:
        kind: "hf" or "https".
        url: Its address.
        folder: What it serves.
    """

    def __init__(self, kind: str, url: str, folder: Path) -> None:
        self.kind, self.url, self.folder = kind, url, folder


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
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            with mock.patch.dict(os.environ, {"HF_ENDPOINT": url}):
                yield ReadOnlyServer(kind, url, folder)
        finally:
            process.kill()


def main() -> None:
    """Serves, in threads, until it is killed."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    server = _FolderHub(folder).hub if kind == "hf" else Server(files_of(folder))
    print(server.url, flush=True)


if __name__ == "__main__":
    main()
