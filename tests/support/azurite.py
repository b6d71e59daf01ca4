"""Azurite, Microsoft's emulator of Azure's storage, where `azurite-blob` is installed (by npm).

It is on no package index for Python, so it is not part of what the test suite installs.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from unittest import mock

import obstore

COMMAND = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
# Azurite's own, which its documentation tells: no secret.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "bucket"
_START_SECONDS = 60


class AzurePlace:
    """A prefix in the container."""

    server = None

    def __init__(self) -> None:
        self._prefix = uuid.uuid4().hex
        self._store = obstore.store.AzureStore(CONTAINER, client_options={"allow_http": True})
        self.url = f"az://{CONTAINER}/{self._prefix}"

    def put(self, name: str, data: bytes) -> None:
        obstore.put(self._store, f"{self._prefix}/{name}", data)

    def get(self, name: str) -> bytes:
        return bytes(obstore.get(self._store, f"{self._prefix}/{name}").bytes())

    def delete(self, name: str) -> None:
        obstore.delete(self._store, f"{self._prefix}/{name}")

    def names(self) -> list[str]:
        paths = (meta["path"] for part in obstore.list(self._store, self._prefix) for meta in part)
        return sorted(path.removeprefix(f"{self._prefix}/") for path in paths)


@contextlib.contextmanager
def azurite() -> Iterator[type[AzurePlace]]:
    """Runs it with one container; `az://` is its, inside the block. Gives what makes a place."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [COMMAND or "azurite-blob", "--inMemoryPersistence", "--skipApiVersionCheck"]
    command += ["--disableTelemetry", "--silent", "--blobPort", str(port)]
    environment = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            _make_container(port)
            with mock.patch.dict(os.environ, environment):
                yield AzurePlace
        finally:
            process.kill()


def _make_container(port: int) -> None:
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    path = f"/{ACCOUNT}/{CONTAINER}"
    text = "PUT" + "\n" * 12 + f"{signed}/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    deadline = time.monotonic() + _START_SECONDS
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request("PUT", f"{path}?restype=container", headers=headers)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "Azurite does not start"
                time.sleep(0.05)
                continue
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()
            return
