"""A server whose answers are mutated by a seed: the files are right, the words around them not.

The bytes of a body stay as they are, since nothing but a digest could tell; all else changes:
status line, headers, lengths, ranges, redirects, chunks, trailers, pace, and where it all ends.
"""

from __future__ import annotations

import base64
import contextlib
import random
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from http_server import Reply, Request, files_of

Head = list[bytes]
"""The status line and the header lines, without their ends."""

_DRIP_SECONDS = 0.02
_HUGE = (b"9" * 5_000, b"-1", b"", b"0x10", b"1e9", b"18446744073709551616", b"\xff\xfe", b"1, 2")
_DATES = (b"Mon, 99 Foo 99999999999999999999 99:99:99", b"Thu, 01 Jan 0001 00:00:00 +2359", b"0")
_HOSTS = (
    "a" * 70, "a..b", "[::1", "[::1]:x", "host:99999", "host:" + "9" * 5_000, "\u2028", "%00",
    "xn--a", "me:other@127.0.0.1:1", "127.0.0.1:1", "\xad", ".", "",
)  # fmt: skip
_SCHEMES = ("http://", "ftp://", "file://", "//", "http:", "javascript:", "")


class Lies:
    """Mutations of answers, drawn by a seed. Safe to use from many threads.

    Args:
        seed: Decides.
        rate: The share of answers that are mutated.

    Attributes:
        told: The name of each mutation that was sent.
    """

    def __init__(self, seed: int, rate: float) -> None:
        self.told: list[str] = []
        self._random = random.Random(seed)
        self._rate = rate
        self._lock = threading.Lock()

    def answer(self, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
        """The parts of an answer, each sent by itself."""
        with self._lock:
            rng = random.Random(self._random.random())
            if rng.random() > self._rate:
                return iter([b"\r\n".join([*head, b"", b""]) + body])
            kind = rng.choice(list(_KINDS))
            self.told.append(kind)
        return _KINDS[kind](rng, asked, head, body)


def _joined(head: Head, body: bytes) -> bytes:
    return b"\r\n".join([*head, b"", b""]) + body


def _bytes(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """Single bytes of a line are changed, lost or doubled; lines stay lines."""
    number = rng.randrange(len(head))
    line = bytearray(head[number])
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(line)) if line else 0
        new = bytes([rng.choice([rng.randrange(32, 256), 0, 9])])
        line[at : at + rng.choice([0, 1])] = rng.choice([new, new, b""])
    yield _joined([*head[:number], bytes(line), *head[number + 1 :]], body)


def _values(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """A header has another value: huge, absurd, or what the client has sent."""
    names = (b"Content-Length", b"Content-Range", b"ETag", b"Last-Modified", b"Retry-After",
             b"Content-Encoding", b"Connection", b"X-Error-Message",
             b"Transfer-Encoding")  # fmt: skip
    name = rng.choice(names)
    digits = rng.choice(_HUGE)
    value = rng.choice(
        [*_HUGE, *_DATES, _echo(rng, asked), b"bytes %b-%b/%b" % (digits, digits, digits),
         b"bytes 0-0/%b" % digits, b"identity", b"chunked", b"close"]
    )  # fmt: skip
    if name == b"Transfer-Encoding" and value == b"chunked":
        body = b"0\r\n\r\n"  # or else it could be chunks by chance
    kept = [line for line in head if not line.startswith(name)]
    status = rng.choice(
        [head[0], head[0], b"HTTP/1.1 %d No" % rng.choice([206, 403, 416, 503, 404])]
    )
    yield _joined([status, *kept[1:], name + b": " + value], body)


def _status(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """The status line is another, perhaps with all that the client has sent in it."""
    lines = (b"HTTP/1.1 403 %b", b"%b", b"HTTP/9.9 200 %b", b"HTTP/1.1 %b", b"HTTP/1.0 500 %b",
             b"HTTP/1.1 200 %b", b"HTTP/1.1 99999 %b", b"HTTP/1.1 204 %b",
             b"HTTP/1.1 401 %b")  # fmt: skip
    line = rng.choice(lines) % _echo(rng, asked)
    yield _joined([line, *head[1:], b"X-Error-Message: " + _echo(rng, asked)], body)


def _interim(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """Answers before the answer; some without end."""
    for _ in range(rng.choice([1, 3, 10**9])):
        yield b"HTTP/1.1 100 Continue\r\nX-Wait: " + b"x" * rng.choice([1, 60_000]) + b"\r\n\r\n"
    yield _joined(head, body)


def _many(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """Headers without number, or a line without end."""
    yield head[0] + b"\r\n"
    for number in range(rng.choice([99, 10**9])):
        yield b"X-%d: %b\r\n" % (number, b"y" * rng.choice([1, 1_000, 70_000]))
    yield b"\r\n".join([*head[1:], b"", b""]) + body


def _redirect(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """To places that are none, to itself, with a body that may have no end."""
    path = urllib.parse.quote(asked.split(b" ")[1].decode("latin-1"))
    echo = _echo(rng, asked).decode("latin-1")
    host = rng.choice([*_HOSTS, echo, re.sub("[^a-z0-9]", "", echo.lower())[:60]])
    target = rng.choice(
        [f"{rng.choice(_SCHEMES)}{host}{path}", path, f"/{echo}", "\x00", "?" * 9_000]
    )
    status = rng.choice([b"301 Moved", b"302 Found", b"307 Temporary", b"308 Permanent"])
    lines = [b"HTTP/1.1 " + status, b"Location: " + target.encode("utf-8", "replace")]
    length = rng.choice([0, 10, 60_000, 10**12])
    yield _joined([*lines, b"Content-Length: %d" % length], b"")
    for _ in range(length if rng.random() < 0.5 else 0):
        yield b"x"
        time.sleep(_DRIP_SECONDS)


def _chunks(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """A body in chunks, of which a size is absurd, or the end never comes."""
    kept = [line for line in head if not line.startswith(b"Content-Length")]
    yield _joined([*kept, b"Transfer-Encoding: chunked"], b"")
    size = max(1, len(body) // rng.randint(1, 5))
    wrong = rng.choice([None, None, b"f" * 5_000, b"-5", b"", b"zz", b"0", b"7fffffffffffffff"])
    for start in range(0, len(body), size):
        part = body[start : start + size]
        tells = b"%x" % len(part)
        if wrong is not None and rng.random() < 0.5:
            tells = wrong
        yield tells + rng.choice([b"", b";" + b"e" * 1_000, b";" + b"e" * 70_000]) + b"\r\n"
        yield part + b"\r\n"
    yield b"0\r\n"
    for number in range(rng.choice([0, 3, 10**9])):
        yield b"X-Trailer-%d: z\r\n" % number
        time.sleep(rng.choice([0, _DRIP_SECONDS]))
    yield b"\r\n"


def _drip(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """From somewhere on a byte at a time: in the status line, the headers, or the body."""
    whole = _joined(head, body)
    start = rng.choice(
        [0, len(head[0]) - 2, len(b"\r\n".join(head)), len(whole) - 9, len(whole) // 2]
    )
    yield whole[:start]
    for at in range(start, len(whole)):
        yield whole[at : at + 1]
        time.sleep(_DRIP_SECONDS)


def _ends(rng: random.Random, asked: bytes, head: Head, body: bytes) -> Iterator[bytes]:
    """It ends before it is complete."""
    whole = _joined(head, body)
    yield whole[: rng.randrange(len(whole))]
    raise ConnectionAbortedError


def _echo(rng: random.Random, asked: bytes) -> bytes:
    """Return what the client has sent, as it came or decoded, in one line."""
    sent = [line for line in asked.split(b"\r\n") if line]
    line = rng.choice(
        [line for line in sent if line.lower().startswith((b"get", b"authorization"))]
    )
    words = line.split()
    choices = [line, words[-1], words[1], urllib.parse.unquote_to_bytes(words[1])]
    with contextlib.suppress(ValueError):  # no credentials
        choices.append(base64.b64decode(words[-1], validate=True))
    return rng.choice(choices).replace(b"\n", b" ").replace(b"\r", b" ")


_KINDS: dict[str, Callable[[random.Random, bytes, Head, bytes], Iterator[bytes]]] = {
    "bytes": _bytes, "values": _values, "status": _status, "interim": _interim, "many": _many,
    "redirect": _redirect, "chunks": _chunks, "drip": _drip, "ends": _ends,
}  # fmt: skip


class LyingServer:
    """Serves a folder's files below `/files` on loopback, one thread a connection.

    Attributes:
        url: Its origin.
        lies: What is done to its answers; may be replaced.
    """

    def __init__(self, folder: Path) -> None:
        self.lies = Lies(0, 0.0)
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
