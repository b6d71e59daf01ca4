"""The storages that pass one contract: each a place where a test puts files behind its back.

To register a backend, add a class like those here and its name to `BACKENDS`; everything in
tests/storage/test_storage_contract.py, and what else is parametrised by them, then runs on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import azurite
from object_server import BUCKET, ObjectServer, configured, object_server
from read_only_servers import ReadOnlyServer, read_only_server

REMOTE = ("s3", "gs")
READ_ONLY = ("hf", "https")
AZURE = ("az",) if azurite.COMMAND else ()  # without faults and a log
BACKENDS = ("local", *REMOTE, *AZURE, *READ_ONLY)
WRITABLE = tuple(kind for kind in BACKENDS if kind not in READ_ONLY)
LISTING = tuple(kind for kind in BACKENDS if kind != "https")


Running = ObjectServer | ReadOnlyServer | Callable[[], azurite.AzurePlace] | None
"""The server of a backend for a test session, if it has one."""


class Place(Protocol):
    """A folder of a storage, seen from behind.

    Attributes:
        url: What `open_storage` is given.
        server: The server that it is on, if any.
    """

    url: str
    server: ObjectServer | ReadOnlyServer | None

    def put(self, name: str, data: bytes) -> None:
        """Stores a file, in place of one that is there: another one, not the same written to."""
        ...

    def get(self, name: str) -> bytes:
        """Return the bytes of a file."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a file."""
        ...

    def names(self) -> list[str]:
        """The files in the folder and below it, sorted."""
        ...


class LocalPlace:
    """A local folder."""

    server: ReadOnlyServer | None = None

    def __init__(self, folder: Path) -> None:
        self.url = str(folder)
        self._folder = folder

    def put(self, name: str, data: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.fresh")
        fresh.write_bytes(data)
        os.replace(fresh, path)

    def get(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def delete(self, name: str) -> None:
        (self._folder / name).unlink()

    def names(self) -> list[str]:
        files = (path for path in self._folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self._folder).as_posix() for path in files)


class WebPlace(LocalPlace):
    """A folder of a web server."""

    def __init__(self, server: ReadOnlyServer) -> None:
        name = uuid.uuid4().hex
        super().__init__(server.folder / name)
        self.server = server
        (server.folder / name).mkdir()
        self.url = f"{server.url}/files/{name}"


class HubPlace(LocalPlace):
    """A repository of the hub; every change is a commit."""

    def __init__(self, server: ReadOnlyServer) -> None:
        name = uuid.uuid4().hex
        super().__init__(server.folder / name / "0")
        self.server = server
        self._folder.mkdir(parents=True)
        self.url = f"hf://org/{name}"

    def put(self, name: str, data: bytes) -> None:
        self._commit()
        super().put(name, data)

    def delete(self, name: str) -> None:
        self._commit()
        super().delete(name)

    def _commit(self) -> None:
        before = self._folder
        self._folder = before.with_name(str(int(before.name) + 1))
        shutil.copytree(before, self._folder, copy_function=os.link)


class BucketPlace:
    """A prefix in the bucket of a server."""

    def __init__(self, server: ObjectServer) -> None:
        self.server: ObjectServer | ReadOnlyServer | None = server
        self._server = server
        self._prefix = uuid.uuid4().hex
        self.url = f"{server.kind}://{BUCKET}/{self._prefix}"

    def put(self, name: str, data: bytes) -> None:
        self._server.put(f"{self._prefix}/{name}", data)

    def get(self, name: str) -> bytes:
        return self._server.get(f"{self._prefix}/{name}")

    def delete(self, name: str) -> None:
        self._server.delete(f"{self._prefix}/{name}")

    def names(self) -> list[str]:
        prefix = f"{self._prefix}/"
        return sorted(key.removeprefix(prefix) for key in self._server.keys(prefix))


@contextlib.contextmanager
def running(kind: str) -> Iterator[Running]:
    """Runs the server of a backend, if it has one; one for all places."""
    if kind == "local":
        yield None
        return
    if kind in READ_ONLY:
        with (
            tempfile.TemporaryDirectory() as folder,
            read_only_server(kind, Path(folder)) as server,
        ):
            yield server
        return
    if kind in AZURE:
        with azurite.azurite() as make_place:
            yield make_place
        return
    with object_server(kind) as server, configured(server):
        yield server


@contextlib.contextmanager
def place(server: Running, folder: Path) -> Iterator[Place]:
    """A fresh place.

    Args:
        server: As `running` gave it.
        folder: Where a local folder may be made.
    """
    if server is None:
        folder.mkdir()
        yield LocalPlace(folder)
        shutil.rmtree(folder)
        return
    if not isinstance(server, ObjectServer | ReadOnlyServer):
        yield server()
        return
    server.fail()
    server.take_log()
    if isinstance(server, ObjectServer):
        yield BucketPlace(server)
    else:
        yield HubPlace(server) if server.kind == "hf" else WebPlace(server)
    server.fail()
