"""HTTP/1.1 through urllib3, with bodies received straight into the caller's memory.

urllib3 keeps the connections, and knows TLS and proxies; redirects are the caller's business. It
limits the time of each read, not of an answer, so every byte of one, its status line, interim
answers, headers, body and trailers, is received by a reader whose deadline only the body extends.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import ipaddress
import logging
import os
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from urllib3 import HTTPConnectionPool, PoolManager, ProxyManager, Timeout
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from orbax_safetensors_layout.options import KIB

from .base import Buffer

_CONNECT_SECONDS = 20.0
_SLOWEST_BYTES_PER_SECOND = 16 * KIB  # a longer body may take longer, but not come slower
_MOST_DISCARDED_BYTES = 64 * KIB
_LONGEST_DISCARD_SECONDS = 1.0
_MOST_IDLE = 1_000  # connections to one origin; urllib3 warns of each one more
_AS_IT_COMES: dict[str, Any] = dict.fromkeys(
    ("redirect", "assert_same_host", "preload_content"), False
)
_STALE = (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError)
"""Errors of a kept connection that the server has closed meanwhile."""


ALLOW_HTTP = "ORBAX_SAFETENSORS_ALLOW_HTTP"


class Origin(NamedTuple):
    """A server, its `host` in ASCII without brackets; credentials go to no other one."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of a URL; `ValueError` if it is not an http or https URL."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not an http or https URL")
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname.encode("idna").decode(), parts.port or default)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):  # a name
            return ipaddress.ip_address(self.host).is_loopback
        return False

    @property
    def is_allowed(self) -> bool:
        """Whether a path may lead there: encrypted, on this machine, or by the variable."""
        is_safe = self.scheme == "https" or self.is_loopback
        return is_safe or os.environ.get(ALLOW_HTTP) == "1"


class _DeadlineReader(io.RawIOBase):
    """Receives from a socket until a deadline, however slowly or often the bytes come."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw = raw
        self._sock = sock
        self._seconds = sock.gettimeout() or 0.0  # of the answer without its body
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


class Answer(http.client.HTTPResponse):
    """A response that is received by a deadline, and whose body is still to be read."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._reader = _DeadlineReader(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._reader)
        self.received = 0  # bytes that `read_into` has put in place, also when it fails

    def read_into(self, view: Buffer) -> None:
        """Fills `view` from the body; raises `OSError` or `http.client.IncompleteRead`."""
        done = 0
        while done < len(view):
            if self.chunked:
                got = self.readinto(view[done : done + 64 * KIB])
            else:  # `readinto` waits until all is there, so that what comes could not be counted
                got = self.fp.readinto1(view[done:])
                if self.length is not None:
                    self.length -= got
            if not got:
                raise http.client.IncompleteRead(b"", len(view) - done)
            done += got
            self.received += got
            self._reader.deadline += got / _SLOWEST_BYTES_PER_SECOND

    def check_ended(self) -> None:
        """Checks that a body of unknown length has no more bytes: its chunks were read rightly."""
        if self.length is None and self.read(1):
            raise http.client.HTTPException("the body is longer than it should be")

    def discard(self) -> bool:
        """Reads a short rest of the body if it comes soon; returns whether that was all."""
        if self.isclosed() or self.length == 0:
            return True
        if self.length is not None and self.length > _MOST_DISCARDED_BYTES:
            return False
        soon = time.monotonic() + _LONGEST_DISCARD_SECONDS
        self._reader.deadline = min(self._reader.deadline, soon)
        with contextlib.suppress(OSError, http.client.HTTPException):
            return len(self.read(_MOST_DISCARDED_BYTES)) < _MOST_DISCARDED_BYTES
        return False


class _HttpConnection(HTTPConnection):
    response_class = Answer

    def connect(self) -> None:
        _thread.has_connected = True
        _thread.connections.track(self)
        super().connect()
        _thread.connections.track(self)  # `interrupt` did not see this socket


class _HttpsConnection(_HttpConnection, HTTPSConnection):
    pass


_thread = threading.local()
"""The `connections` that ask in this thread; whether the request `has_connected`."""

for _name in ("urllib3.connection", "urllib3.connectionpool"):  # their records show whole URLs
    logging.getLogger(_name).addFilter(lambda _: getattr(_thread, "connections", None) is None)


class Connections:
    """Connections to any number of servers, kept open between requests, for many threads.

    Proxies are those of the environment (`https_proxy`, `no_proxy`), certificates those of the
    system or of `SSL_CERT_FILE`. An answer may take `seconds`; its body longer, at 16 KiB a second
    or more.
    """

    def __init__(self, seconds: float) -> None:
        self._timeout = Timeout(connect=min(seconds, _CONNECT_SECONDS), read=seconds)
        self._lock = threading.Lock()
        self._pools: dict[Origin, HTTPConnectionPool] = {}
        self._tracked: weakref.WeakSet[_HttpConnection] = weakref.WeakSet()
        self._stopped = False

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[Answer]:
        """Sends a GET request; the connection is kept if the block reads the whole body."""
        response = self._send(Origin.of(url), url, headers)
        answer: Answer = response._original_response
        is_kept = False
        try:
            yield answer
            is_kept = answer.discard() and not answer.will_close
        finally:
            answer.close()
            response.release_conn() if is_kept else response.close()

    def interrupt(self) -> None:
        """Breaks off all requests, and refuses others from now on."""
        with self._lock:
            self._stopped = True
            for connection in self._tracked:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # not connected any more
                        # A TLS socket's own `shutdown` is not for another thread.
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        for pool in self._pools.values():
            pool.close()

    def track(self, connection: _HttpConnection) -> None:
        with self._lock:
            if self._stopped:
                raise ConnectionAbortedError("the request was cancelled")
            self._tracked.add(connection)

    def _send(self, origin: Origin, url: str, headers: Mapping[str, str]) -> Any:
        """Returns urllib3's response; on a new connection where the server closed kept ones."""
        parts = urllib.parse.urlsplit(url)._replace(netloc=_netloc(origin), fragment="")
        _thread.connections = self
        try:
            while True:
                _thread.has_connected = False
                try:
                    pool = self._pool(origin)
                    whole = parse_url(parts.geturl())  # quotes what must be
                    is_forwarded = pool.proxy is not None and origin.scheme == "http"
                    target = whole.url if is_forwarded else whole.request_uri
                    return pool.urlopen("GET", target, headers=dict(headers), **_AS_IT_COMES)
                except HTTPError as error:
                    cause = _cause(error)
                    if _thread.has_connected or not isinstance(cause, _STALE):
                        raise cause from None
        finally:
            _thread.connections = None

    def _pool(self, origin: Origin) -> HTTPConnectionPool:
        with self._lock:
            if origin not in self._pools:
                proxy = _proxy(origin)
                options: dict[str, Any] = {"timeout": self._timeout, "retries": False}
                options["maxsize"] = _MOST_IDLE
                if origin.scheme == "https":
                    options["ssl_context"] = ssl.create_default_context()
                manager = PoolManager(**options)
                if proxy is not None:
                    login = basic_login("Proxy-Authorization", proxy)
                    address = proxy._replace(netloc=proxy.netloc.rpartition("@")[2]).geturl()
                    manager = ProxyManager(address, proxy_headers=login, **options)
                pool = manager.connection_from_host(origin.host, origin.port, origin.scheme)
                pool.ConnectionCls = _HttpsConnection if pool.scheme == "https" else _HttpConnection
                self._pools[origin] = pool
            return self._pools[origin]


def _cause(error: HTTPError) -> Exception:
    """Returns the standard library's error below one of urllib3, whose text repeats the answer."""
    cause: object = error
    while isinstance(cause, HTTPError):
        cause = cause.__cause__ or next(reversed(cause.args), None)
    if isinstance(cause, Exception):
        return cause
    return http.client.HTTPException(type(error).__name__)


def _proxy(origin: Origin) -> urllib.parse.SplitResult | None:
    proxy = urllib.request.getproxies().get(origin.scheme)
    if not proxy or origin.is_loopback or urllib.request.proxy_bypass(_netloc(origin)):
        return None
    try:
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    except ValueError:
        raise http.client.InvalidURL("the proxy of the environment is not a URL") from None
    if parts.scheme not in ("http", "https"):
        raise http.client.InvalidURL(
            f"the proxy of the environment is {parts.scheme}://, and only http:// and https:// work"
        )
    return parts


def basic_login(header: str, parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return a header with the user and password of a URL, if it has them."""
    if parts.username is None:
        return {}
    user, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
    return {header: "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _netloc(origin: Origin) -> str:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return f"{host}:{origin.port}"
