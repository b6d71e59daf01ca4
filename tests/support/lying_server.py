"""A server of files whose answers a test may send as it likes, part by part."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from http_server import Reply, Request, files_of

Head = list[bytes]
"""The status line and the header lines, without their ends."""


class Truth:
    """Answers as they should be."""

    def answer(self, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
        """Yields the parts of an answer, each sent by itself."""
        yield b"\r\n".join([*head, b"", b""]) + body


class LyingServer:
    """Serves a folder's files below `/files` on loopback, one thread a connection.

    Attributes:
        url: Its origin.
        lies: What is done to its answers; may be replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.lies = Truth()
        self._answer = files_of(folder)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="test-server-accept")
        self._acceptor.start()

    def close(self) -> None:
        """Stops; what is being sent is broken off."""
        self._stopped = True
        self._socket.shutdown(socket.SHUT_RDWR)
        for thread in (self._acceptor, *self._threads):
            thread.join(60)
            assert not thread.is_alive()
        self._socket.close()

    def __enter__(self) -> LyingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="test-server"
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        linger = struct.pack("ii", 1, 0)
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as incoming:
            connection.settimeout(5)
            while True:
                asked = b""
                while not asked.endswith(b"\r\n\r\n"):
                    line = incoming.readline()
                    if not line:
                        return
                    asked += line
                try:
                    for part in self.lies.answer(asked, *_said(self._answer, asked)):
                        if self._stopped:
                            return
                        connection.sendall(part)
                except ConnectionAbortedError:
                    if len(asked) % 2:  # at times with a reset
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    return


def _said(answer: Callable[[Request], Reply], asked: bytes) -> tuple[Head, bytes]:
    """The right answer to a request."""
    method, target, _ = asked.split(b"\r\n")[0].decode("latin-1").split(" ")
    match = re.search(rb"range: bytes=(\d+)-(\d+)", asked, re.I)
    url = urllib.parse.urlsplit(target)
    span = (int(match[1]), int(match[2]) + 1) if match else None
    reply = answer(Request(method, url.path, dict(urllib.parse.parse_qsl(url.query)), span, None))
    headers = {"Content-Length": str(len(reply.body)), **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} Said", *(f"{name}: {v}" for name, v in headers.items())]
    return [line.encode("latin-1") for line in lines], reply.body
