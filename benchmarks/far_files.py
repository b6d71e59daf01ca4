"""The files of `slow_server.py` for Orbax's own code, as `hf://` paths of `etils.epath`.

Orbax reads such paths through fsspec. In the place of the Hugging Face hub's file system stands one
that makes the requests that Orbax's layout asks for and no others: a connection for each file that
is opened, one ranged request for each read. Names and sizes cost it nothing.
"""

from __future__ import annotations

import http.client
import io
from pathlib import Path
from typing import Any

import fsspec


class FarFile(io.RawIOBase):
    """A file of the server, open for reading."""

    def __init__(self, port: int, path: str, size: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, count: int = -1) -> bytes:
        stop = self._size if count < 0 else min(self._at + count, self._size)
        if stop <= self._at:
            return b""
        headers = {"Range": f"bytes={self._at}-{stop - 1}"}
        self._connection.request("GET", f"/{self._path}", headers=headers)
        self._at = stop
        return self._connection.getresponse().read()

    def close(self) -> None:
        self._connection.close()
        super().close()


class FarFiles(fsspec.AbstractFileSystem):
    """The server's files; `folder` and `port` are set before it is made."""

    protocol = "hf"
    cachable = False
    folder = Path()
    port = 0

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        local = self.folder / self._strip_protocol(path)
        kind = "directory" if local.is_dir() else "file"
        return {"name": self._strip_protocol(path), "size": local.stat().st_size, "type": kind}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        name = self._strip_protocol(path)
        local = self.folder / name
        names = sorted(f"{name}/{p.name}" for p in local.iterdir()) if local.is_dir() else [name]
        return [self.info(name) for name in names] if detail else names

    def _open(self, path: str, mode: str = "rb", **_: Any) -> FarFile:
        name = self._strip_protocol(path)
        return FarFile(self.port, name, self.info(name)["size"])


def register(folder: Path, port: int) -> None:
    """Makes `hf://` paths those of the server."""
    FarFiles.folder, FarFiles.port = folder, port
    fsspec.register_implementation("hf", FarFiles, clobber=True)
