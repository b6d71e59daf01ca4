"""HTTP/1.1 with kept connections; bodies are received straight into the caller's memory.

On the standard library's client, by measurement: see docs/remote.md. Redirects are the caller's
business. Every byte of an answer, its status line, interim answers, headers, body and trailers,
is received by one reader with a deadline, which only bytes of the body extend.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast

from orbax_safetensors_layout.errors import Sent
from orbax_safetensors_layout.options import KIB

from .base import Buffer

_CONNECT_SECONDS = 20.0
_SLOWEST_BYTES_PER_SECOND = 16 * KIB  # a longer body may take longer, but not come slower
_MOST_DISCARDED_BYTES = 64 * KIB
_LONGEST_DISCARD_SECONDS = 1.0
_UNQUOTED = "%/:@!$&'()*+,;=~"
_STALE = (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError)
"""How a kept connection fails that the server has closed meanwhile."""


def quoted(parts: urllib.parse.SplitResult) -> urllib.parse.SplitResult:
    """A URL with all quoted that may not stand in it; what is quoted already stays as it is.

    Example:
        >>> quoted(urllib.parse.urlsplit("https://host/a b%2F?sig=ü+")).geturl()
        'https://host/a%20b%2F?sig=%C3%BC+'
    """
    return parts._replace(
        path=urllib.parse.quote(parts.path, _UNQUOTED),
        query=urllib.parse.quote(parts.query, f"{_UNQUOTED}?"),
    )


class HttpHeaders(Protocol):
    """Headers of an answer; names in any case."""

    def get(self, name: str, /) -> str | None:
        """The value of a header."""
        ...


class Origin(NamedTuple):
    """Where connections go; credentials for one are never sent to another.

    Attributes:
        scheme: `http` or `https`.
        host: The host's name or address, without brackets.
        port: The port.
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """The origin of a URL.

        Raises:
            ValueError: It is no `http` or `https` URL, or no name that a host can have.

        Example:
            >>> Origin.of("https://example.org/model.safetensors")
            Origin(scheme='https', host='example.org', port=443)
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an http or https URL")
        parts.hostname.encode("idna")
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, parts.port or default)

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine itself."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


class _DeadlineReader(io.RawIOBase):
    """Receives from a socket until a deadline, however slowly or often the bytes come.

    Args:
        raw: The socket's own reader.
        sock: The socket; its time-out is how long the answer may take without its body.

    Attributes:
        deadline: Of `time.monotonic`.
    """

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw = raw
        self._sock = sock
        self._seconds = sock.gettimeout() or 0.0
        self.deadline = time.monotonic() + self._seconds

    def readable(self) -> bool:
        return True

    def readinto(self, view: Buffer, /) -> int | None:  # type: ignore[override]
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer comes too slowly")
        self._sock.settimeout(min(left, self._seconds))
        return self._raw.readinto(view)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is received by a deadline."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.reader = _DeadlineReader(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self.reader)


class Answer:
    """A response whose body is still to be read.

    Attributes:
        status: The HTTP status.
        headers: Its headers; names in any case.
        received: Bytes of the body that `read_into` has put in place, also when it fails.
    """

    def __init__(self, response: _Response) -> None:
        self.status = response.status
        self.headers = response.headers
        self.received = 0
        self._response = response

    @property
    def length(self) -> int | None:
        """Bytes of the whole body; None if the server did not tell."""
        length = self._response.length
        return None if length is None else length + self.received

    def read_into(self, view: Buffer) -> None:
        """Fills `view` from the body.

        Raises:
            OSError: The connection broke, or is too slow.
            http.client.IncompleteRead: The body ended before.
        """
        response, done = self._response, 0
        while done < len(view):
            if response.chunked:
                got = response.readinto(view[done : done + 64 * KIB])
            else:  # its own `readinto` waits until all is there: what comes could not be counted
                got = response.fp.readinto1(view[done:])
                if response.length is not None:
                    response.length -= got
            if not got:
                raise http.client.IncompleteRead(b"", len(view) - done)
            done += got
            self.received += got
            response.reader.deadline += got / _SLOWEST_BYTES_PER_SECOND

    def check_ended(self) -> None:
        """Checks that a body of unknown length has no more bytes: its chunks were read rightly.

        Raises:
            OSError: The connection broke, or is too slow.
            http.client.HTTPException: There are more, or the chunks are malformed.
        """
        if self._response.length is None and self._response.read(1):
            raise http.client.HTTPException("the body is longer than it should be")

    def discard(self) -> bool:
        """Reads what is left of the body if that is little and comes soon; whether it was all."""
        response = self._response
        if response.isclosed() or response.length == 0:
            return True
        if response.length is not None and response.length > _MOST_DISCARDED_BYTES:
            return False
        reader = response.reader
        reader.deadline = min(reader.deadline, time.monotonic() + _LONGEST_DISCARD_SECONDS)
        with contextlib.suppress(OSError, http.client.HTTPException):
            return len(response.read(_MOST_DISCARDED_BYTES)) < _MOST_DISCARDED_BYTES
        return False


class Connections:
    """Connections to any number of servers, kept open between requests.

    Safe to use from many threads: each request has a connection for itself. Proxies are those of
    the environment (`https_proxy`, `no_proxy`), certificates those of the system or of
    `SSL_CERT_FILE`.

    Args:
        seconds: How long an answer may take; its body longer, at 16 KiB a second or more.

    Attributes:
        sent: What no error may show.
    """

    def __init__(self, seconds: float) -> None:
        self.sent = Sent()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._proxies: dict[Origin, urllib.parse.SplitResult | None] = {}
        self._tls: ssl.SSLContext | None = None
        self._stopped = False

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[Answer]:
        """A GET request; the block reads the body. Leaving much of it costs the connection.

        Raises:
            OSError: The server can not be reached, or the connection broke.
            http.client.HTTPException: What came back is no HTTP.
        """
        origin = Origin.of(url)
        self.sent.add(url, headers)
        connection, response = self._send(origin, url, headers)
        kept = False
        try:
            answer = Answer(response)
            yield answer
            kept = answer.discard() and not response.will_close
        finally:
            response.close()
            self._give(origin, connection, kept)

    def interrupt(self) -> None:
        """Breaks off all requests, and refuses others from now on."""
        with self._lock:
            self._stopped = True
            for connection in self._busy:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # not connected any more
                        # A TLS socket's own `shutdown` is not for another thread.
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all connections."""
        self.interrupt()
        with self._lock:
            idle = [connection for found in self._idle.values() for connection in found]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _send(
        self, origin: Origin, url: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, _Response]:
        parts = urllib.parse.urlsplit(url)
        target = parts._replace(scheme="", netloc="", fragment="", path=parts.path or "/")
        while True:
            connection, was_kept = self._take(origin)
            proxy = self._proxies[origin]
            try:
                if connection.sock is None:
                    connection.connect()
                    if self._stopped:  # `interrupt` did not see this socket
                        raise ConnectionAbortedError("the request was cancelled")
                if connection.sock is not None:
                    connection.sock.settimeout(self._seconds)
                if proxy is not None and origin.scheme == "http":
                    whole = target._replace(scheme="http", netloc=_netloc(origin)).geturl()
                    connection.request("GET", whole, headers={**headers, **_login(proxy)})
                else:
                    connection.request("GET", target.geturl(), headers=dict(headers))
                return connection, cast(_Response, connection.getresponse())
            except BaseException as error:
                self._give(origin, connection, kept=False)
                if not was_kept or self._stopped or not isinstance(error, _STALE):
                    raise

    def _take(self, origin: Origin) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it has served before."""
        with self._lock:
            if self._stopped:
                raise ConnectionAbortedError("the request was cancelled")
            idle = self._idle.get(origin)
            connection = idle.pop() if idle else self._new(origin)
            self._busy.add(connection)
            return connection, connection.sock is not None

    def _give(self, origin: Origin, connection: http.client.HTTPConnection, kept: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if kept and not self._stopped:
                self._idle.setdefault(origin, []).append(connection)
                return
        connection.close()

    def _new(self, origin: Origin) -> http.client.HTTPConnection:
        if origin not in self._proxies:
            self._proxies[origin] = _proxy(origin)
        proxy = self._proxies[origin]
        seconds = min(self._seconds, _CONNECT_SECONDS)
        host, port = origin.host, origin.port
        if proxy is not None:
            host, port = proxy.hostname or "", proxy.port or 80
        if proxy is not None:
            self.sent.add(proxy.geturl(), _login(proxy))
        connection: http.client.HTTPConnection
        if origin.scheme == "http":
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        else:
            self._tls = self._tls or ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
            if proxy is not None:
                connection.set_tunnel(origin.host, origin.port, _login(proxy))
        connection.response_class = _Response
        return connection


def _proxy(origin: Origin) -> urllib.parse.SplitResult | None:
    """The proxy that the environment sets for an origin."""
    proxy = urllib.request.getproxies().get(origin.scheme)
    if not proxy or origin.is_loopback or urllib.request.proxy_bypass(_netloc(origin)):
        return None
    return urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def _login(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """The header that tells a proxy the user and the password of its URL."""
    login = basic_login(parts)
    return {} if login is None else {"Proxy-Authorization": login}


def basic_login(parts: urllib.parse.SplitResult) -> str | None:
    """The value of an `Authorization` header for the user and the password of a URL."""
    if parts.username is None:
        return None
    user, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _netloc(origin: Origin) -> str:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return f"{host}:{origin.port}"
