"""A small HTTP server for tests: ranges, a log of what was asked, and faults on demand."""

from __future__ import annotations

import contextlib
import email.utils
import http.server
import os
import re
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

_WATCHDOG_SECONDS = 60


class Request(NamedTuple):
    """A request of a client; `path` is as it came, quoted; `range` is half-open."""

    method: str
    path: str
    query: dict[str, str]
    range: tuple[int, int] | None
    authorization: str | None
    if_none_match: str | None = None
    body: bytes = b""


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes = b""

    def changed(self, **headers: str) -> Reply:
        return self._replace(
            headers=self.headers | {name.replace("_", "-"): v for name, v in headers.items()}
        )


Answer = Callable[[Request], Reply]
Faults = Callable[[Request], str | None]
"""For each request a key of `FAULTS`, or None to answer as one should."""


def serve_range(request: Request, data: bytes | Path, headers: dict[str, str]) -> Reply:
    """A file, or the range of it that was asked for; nothing of a version that the client has."""
    if request.if_none_match is not None and request.if_none_match == headers.get("ETag"):
        return Reply(304, {"ETag": headers["ETag"]})
    size = data.stat().st_size if isinstance(data, Path) else len(data)
    if request.range is None:
        start, stop, status = 0, size, 200
    else:
        start, stop = request.range[0], min(request.range[1], size)
        if start >= size:
            return Reply(416, {"Content-Range": f"bytes */{size}"})
        headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        status = 206
    if isinstance(data, bytes):
        return Reply(status, headers, data[start:stop])
    with open(data, "rb") as file:
        return Reply(status, headers, os.pread(file.fileno(), stop - start, start))


def _status(status: int) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(status, {"Retry-After": "0"})


def _shift(reply: Reply) -> Reply:
    unit, numbers = reply.headers.get("Content-Range", "bytes 0-0/1").split(" ")
    first, last, total = map(int, re.split("[-/]", numbers))
    return reply.changed(Content_Range=f"{unit} {first + 1}-{last + 1}/{total + 1}")


def _shorter(reply: Reply) -> Reply:
    if "Content-Range" not in reply.headers or len(reply.body) < 2:
        return reply
    first, last, total = map(int, re.split("[-/]", reply.headers["Content-Range"][6:]))
    last = first + (last - first) // 2
    reply = reply.changed(Content_Range=f"bytes {first}-{last}/{total}")
    return reply._replace(body=reply.body[: last + 1 - first])


def _larger(reply: Reply) -> Reply:
    text = reply.headers.get("Content-Range", "")
    return reply.changed(Content_Range=f"{text}0") if text else reply


# What the reply becomes; those that are None break the connection.
FAULTS: dict[str, Callable[[Reply], Reply] | None] = {
    "delay": lambda reply: reply,
    "reset": None,
    "reset in body": None,
    "truncated": None,
    "garbage": None,
    "stall": None,
    "500": _status(500),
    "503": _status(503),
    "429": _status(429),
    "403": _status(403),
    "404": _status(404),
    "wrong range": _shift,
    "short range": _shorter,
    "other size": _larger,
    "other etag": lambda reply: reply.changed(ETag='"another"', Last_Modified=_date(9)),
    "ignored range": lambda reply: reply._replace(status=200) if reply.status == 206 else reply,
    "encoded": lambda reply: reply.changed(Content_Encoding="gzip"),
}


def _date(seconds: float) -> str:
    return email.utils.formatdate(seconds, usegmt=True)


class Server:
    """A threaded server on loopback.

    Args:
        answer: What to reply; called in the connection's thread.
        tls: For https.

    Attributes:
        url: Its origin.
        connections: How many clients made.
        hosts: The (host, port) of all requests, as `Host` has it.
        log: Every request with the status of its reply, in the order in which they came.
        faults: Decides what goes wrong.
    """

    def __init__(self, answer: Answer, *, tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self.log: list[tuple[Request, int]] = []
        self.faults: Faults = lambda request: None
        self.connections = 0
        self.hosts: set[tuple[str, int]] = set()
        self._connections: list[threading.Thread] = []
        self._server = http.server.HTTPServer(("127.0.0.1", 0), _Handler)
        self._server.process_request = self._accept  # type: ignore[method-assign]
        self._server.tests_server = self  # type: ignore[attr-defined]
        if tls is not None:
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.server_port}"
        self._acceptor = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._acceptor.start()

    def _accept(self, connection: Any, address: Any) -> None:
        def run() -> None:
            with contextlib.suppress(OSError), connection:  # clients hang up as they like
                self._server.finish_request(connection, address)

        thread = threading.Thread(target=run, name="test-server")
        self.connections += 1
        self._connections.append(thread)
        thread.start()

    def ranges(self) -> list[tuple[str, int, int]]:
        """(path, start, stop) of all bytes that went out."""
        return [(r.path, *r.range) for r, status in self.log if status == 206 and r.range]

    def close(self) -> None:
        """Stops, once all connections are closed by their clients."""
        self._server.shutdown()
        self._acceptor.join()
        self._server.server_close()
        deadline = time.monotonic() + _WATCHDOG_SECONDS
        for thread in self._connections:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"a client left a connection to {self.url} open"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        request = Request(
            self.command,
            url.path,
            dict(urllib.parse.parse_qsl(url.query)),
            (int(match[1]), int(match[2]) + 1) if match else None,
            self.headers.get("Authorization"),
            self.headers.get("If-None-Match"),
            self._body(),
        )
        server: Server = self.server.tests_server  # type: ignore[attr-defined]
        host, _, port = self.headers["Host"].partition(":")
        server.hosts.add((host, int(port or 80)))
        reply, fault = server.answer(request), server.faults(request)
        if fault is not None and (change := FAULTS[fault]) is not None:
            reply, fault = change(reply), "delay" if fault == "delay" else None
        server.log.append((request, reply.status if fault in (None, "delay") else 0))
        with contextlib.suppress(ConnectionError):
            self._send(reply, fault)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, reply: Reply, fault: str | None) -> None:
        if fault == "delay":
            time.sleep(0.02)
        if fault == "stall":
            self._give_up(self.connection.recv(1))  # until the client has had enough
            return
        if fault == "garbage":
            self.wfile.write(b"what is http?\r\n\r\n")
            self._give_up()
            return
        if fault == "reset":
            self._reset()
            return
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        body = b"" if self.command == "HEAD" else reply.body
        if fault in ("truncated", "reset in body"):
            self.wfile.write(body[: len(body) // 2])
            self._reset() if fault == "reset in body" else self._give_up()
            return
        self.wfile.write(body)

    def _give_up(self, *_: object) -> None:
        self.close_connection = True

    def _reset(self) -> None:
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)  # closing sends a reset
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True


def files_of(folder: Path) -> Answer:
    """The folder's files below `/files`, with ETags that tell their contents' versions."""

    def answer(request: Request) -> Reply:
        path = folder / urllib.parse.unquote(request.path).removeprefix("/files/")
        if not path.is_file():
            return Reply(404, {}, b"<html>not found</html>")
        stat = path.stat()
        headers = {"ETag": f'"{stat.st_mtime_ns:x}"', "Last-Modified": _date(stat.st_mtime)}
        return serve_range(request, path, headers)

    return answer


@contextlib.contextmanager
def file_server(folder: Path, *, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serves a folder's files."""
    with Server(files_of(folder), tls=tls) as server:
        yield server
