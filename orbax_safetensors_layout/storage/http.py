"""HTTP/1.1 with kept connections; bodies are received straight into the caller's memory.

On the standard library's client, by measurement: see docs/remote.md. Redirects are the caller's
business.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from orbax_safetensors_layout.storage.base import Buffer
from orbax_safetensors_layout.units import KIB

_CONNECT_SECONDS = 20.0
_SLOWEST_BYTES_PER_SECOND = 16 * KIB  # a longer body may take longer, but not come slower
_MOST_DISCARDED_BYTES = 64 * KIB
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


class Headers(Protocol):
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
            ValueError: It is no `http` or `https` URL.

        Example:
            >>> Origin.of("https://example.org/model.safetensors")
            Origin(scheme='https', host='example.org', port=443)
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an http or https URL")
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, parts.port or default)

    @property
    def is_loopback(self) -> bool:
        """Whether it is this machine itself."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


class Answer:
    """A response whose body is still to be read.

    Attributes:
        status: The HTTP status.
        headers: Its headers; names in any case.
        received: Bytes of the body that `read_into` has put in place, also when it fails.
    """

    def __init__(self, response: http.client.HTTPResponse, seconds: float) -> None:
        self.status = response.status
        self.headers = response.headers
        self.received = 0
        self._response = response
        self._seconds = seconds

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
        response, begun, done = self._response, time.monotonic(), 0
        while done < len(view):
            if response.chunked:
                got = response.readinto(view[done : done + 64 * KIB])
            else:  # its own `readinto` waits until all is there: the time could not be bound
                got = response.fp.readinto1(view[done:])
                if response.length is not None:
                    response.length -= got
            if not got:
                raise http.client.IncompleteRead(b"", len(view) - done)
            done += got
            self.received += got
            if time.monotonic() - begun > self._seconds + done / _SLOWEST_BYTES_PER_SECOND:
                raise TimeoutError("the body comes too slowly")

    def discard(self) -> bool:
        """Reads what is left of the body if that is little; whether nothing is left."""
        response = self._response
        if response.isclosed() or response.length == 0:
            return True
        if response.length is not None and response.length > _MOST_DISCARDED_BYTES:
            return False
        return len(response.read(_MOST_DISCARDED_BYTES)) < _MOST_DISCARDED_BYTES


class Connections:
    """Connections to any number of servers, kept open between requests.

    Safe to use from many threads: each request has a connection for itself. Proxies are those of
    the environment (`https_proxy`, `no_proxy`), certificates those of the system or of
    `SSL_CERT_FILE`.

    Args:
        seconds: How long a server may keep silent.
    """

    def __init__(self, seconds: float) -> None:
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
        connection, response = self._send(origin, url, headers)
        kept = False
        try:
            answer = Answer(response, self._seconds)
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
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urllib.parse.urlsplit(url)
        target = parts._replace(scheme="", netloc="", fragment="", path=parts.path or "/")
        while True:
            connection, was_kept = self._take(origin)
            proxy = self._proxies[origin]
            try:
                if connection.sock is None:
                    connection.connect()
                    if connection.sock is not None:
                        connection.sock.settimeout(self._seconds)
                    if self._stopped:  # `interrupt` did not see this socket
                        raise ConnectionAbortedError("the request was cancelled")
                if proxy is not None and origin.scheme == "http":
                    whole = target._replace(scheme="http", netloc=_netloc(origin)).geturl()
                    connection.request("GET", whole, headers={**headers, **_login(proxy)})
                else:
                    connection.request("GET", target.geturl(), headers=dict(headers))
                return connection, connection.getresponse()
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
        if origin.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=seconds)
        self._tls = self._tls or ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)
        if proxy is not None:
            connection.set_tunnel(origin.host, origin.port, _login(proxy))
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
