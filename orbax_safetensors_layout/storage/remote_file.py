"""One file of a server: where it is now, what it was when it was first seen, its ranges."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.options import KIB, MIB

from .base import FIRST_READ_BYTES, Buffer
from .buffers import changed, scatter, skip
from .http import Answer, Connections, HttpHeaders, Origin
from .retry import Failure, http_date, is_transient_status, retry_after_seconds

_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}
_REDIRECTS = {301, 302, 303, 307, 308}
_MOST_REDIRECTS = 6
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19})\s*", re.A)
_EMPTY_RANGE = re.compile(r"\s*bytes\s+\*/0\s*")
_PROGRESS_BYTES = 1 * MIB  # a body that breaks after so much is not a failed attempt
_SMALL_BUFFER_BYTES = 64 * KIB
_MOST_TOLD = 200  # characters of what a server says


class RequestError(Exception):
    """One attempt failed."""

    def __init__(
        self, cause: str, *, transient: bool = True, after_seconds: float | None = None
    ) -> None:
        self.failure = Failure(cause, transient, after_seconds)
        super().__init__(cause)


class AccessDenied(StorageError):
    """A server answers 401 or 403."""


def classify(error: Exception) -> Failure | None:
    """Returns the meaning of an error of one attempt."""
    if isinstance(error, RequestError):
        return error.failure
    if isinstance(error, http.client.IncompleteRead):
        lacking = "" if error.expected is None else f"{error.expected} bytes "
        return Failure(f"the body ended {lacking}too soon", transient=True)
    if isinstance(error, http.client.BadStatusLine | http.client.UnknownProtocol) and (
        not isinstance(error, ConnectionError)
    ):
        return Failure("the answer is not HTTP", transient=True)  # what it is, is the server's text
    if isinstance(error, OSError | http.client.HTTPException):
        lasting = isinstance(error, ssl.SSLCertVerificationError | http.client.InvalidURL) or (
            isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
        )
        return Failure(f"{type(error).__name__}: {error}".rstrip(": "), transient=not lasting)
    return None


class Place(NamedTuple):
    """Where a file is asked for, and what is known of it before.

    Attributes:
        url: Its URL; redirects are followed from there, and again when they expire.
        headers: Sent to this URL's host alone: credentials.
        size: Its bytes, if they are known.
        digest: The expected `X-Linked-Etag` of a redirect, if it has one.
        hint: From the headers of a 401 or 403 to advice for the user.
    """

    url: str
    headers: Mapping[str, str]
    size: int | None = None
    digest: str | None = None
    hint: Callable[[HttpHeaders], str | None] = lambda headers: None


class _Target(NamedTuple):
    """What is asked now: perhaps a signed URL that expires, with headers that may go there.

    `is_verified` if a redirect has told that it is the right content.
    """

    url: str
    headers: Mapping[str, str]
    is_verified: bool = False

    @property
    def host(self) -> str:
        return Origin.of(self.url).host

    @property
    def version_of(self) -> str:
        """Within it ETags are compared: servers may have different ones of the same content."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.netloc}{parts.path}" if self.is_verified else ""


class RemoteFile:
    """A file that is read by ranges. Safe to use from many threads.

    What is first seen of it is pinned: the size, and the ETag or else the date. An answer that
    has others is an error.

    Attributes:
        size: Its bytes; None until they are known.
        head: Its first bytes, when `open` has fetched them.
        modified_seconds: When it was last written, if the server has told.
        lock: For whoever opens it.
    """

    def __init__(self, name: str, place: Place, connections: Connections) -> None:
        self.name = name
        self.size = place.size
        self.head = memoryview(b"")
        self.modified_seconds: float | None = None
        self.lock = threading.Lock()
        self._place = place
        self._connections = connections
        self._start = self._target = _Target(place.url, place.headers)
        self._pin_lock = threading.Lock()
        self._versions: dict[str, str] = {}

    def open(self) -> None:
        """Makes one attempt to fetch `head`, from which the size is known; see `classify`."""
        head = memoryview(bytearray(FIRST_READ_BYTES))
        self.head = head[: self._ask(0, [head])]

    def fetch(self, start: int, buffers: Sequence[Buffer]) -> int:
        """Makes one attempt to fill `buffers` from the bytes that begin at `start`.

        Returns how many bytes are there; not all, where the body broke after a good part.
        """
        total = sum(map(len, buffers))
        got = self._ask(start, buffers)
        if got < min(total, _PROGRESS_BYTES):
            raise RequestError(f"{got} bytes came where {total} were asked for")
        return got

    def _ask(self, start: int, buffers: Sequence[Buffer]) -> int:
        """Follows redirects to the bytes; where the last ones have expired, from the beginning."""
        stop = start + sum(map(len, buffers))
        target = self._target
        may_expire = target is not self._start
        for _ in range(_MOST_REDIRECTS):
            headers = {**_HEADERS, **target.headers, "Range": f"bytes={start}-{stop - 1}"}
            with self._connections.get(target.url, headers) as answer:
                if answer.status in _REDIRECTS:
                    target = self._redirected(target, answer)
                elif may_expire and 400 <= answer.status < 500 and answer.status not in (408, 429):
                    target, may_expire = self._start, False
                else:
                    length = self._check(target, answer, start, stop)
                    self._target = target
                    return _receive(answer, buffers, length)
        raise RequestError(f"{_MOST_REDIRECTS} redirects led to no file", transient=False)

    def _redirected(self, target: _Target, answer: Answer) -> _Target:
        location = (answer.headers.get("Location") or "").encode("latin-1").decode(errors="replace")
        try:
            url = urllib.parse.urljoin(target.url, location)
            origin, before = Origin.of(url), Origin.of(target.url)
        except ValueError:
            raise RequestError("a redirect to no place", transient=False) from None
        if (before.scheme, origin.scheme) == ("https", "http"):
            cause = f"a redirect from https to unencrypted http at {self._told(origin.host)}"
            raise RequestError(cause, transient=False)
        told, known = answer.headers.get("X-Linked-Etag"), self._place.digest
        if told is not None and known is not None and told.removeprefix("W/").strip('"') != known:
            raise changed(self.name, f"content {known}", f"content {self._told(told)}")
        is_verified = target.is_verified or None not in (told, known)
        return _Target(url, target.headers if origin == before else {}, is_verified)

    def _check(self, target: _Target, answer: Answer, start: int, stop: int) -> int:
        """Checks that an answer is the asked one, of the same file; returns the body's bytes."""
        headers, status = answer.headers, answer.status
        is_plain = headers.get("Content-Encoding", "identity") == "identity"
        if status == 206 and is_plain:
            text = headers.get("Content-Range", "")
            match = _CONTENT_RANGE.fullmatch(text)
            first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
            length = last + 1 - first
            in_range = first == start and start <= last < min(stop, total)
            if not in_range or answer.length not in (None, length):
                size = "unknown length" if answer.length is None else f"{answer.length} bytes"
                cause = f"Content-Range {self._told(text)!r} and a body of {size}"
                host = self._told(target.host)
                raise RequestError(f"{cause} from {host} for bytes [{start}, {stop})")
        elif status == 200 and is_plain and start == 0 and answer.length in range(stop + 1):
            length = total = answer.length or 0  # a server without ranges; all of a small file
        elif status == 416 and _EMPTY_RANGE.fullmatch(headers.get("Content-Range", "")):
            length = total = 0
        else:
            raise self._refusal(target, answer, start, stop)
        self._pin(target, headers, total)
        return length

    def _pin(self, target: _Target, headers: HttpHeaders, total: int) -> None:
        version = headers.get("ETag") or headers.get("Last-Modified") or "of unknown date"
        with self._pin_lock:
            expected = self._versions.setdefault(target.version_of, version)
            if self.size is None:
                self.size = total
            if self.modified_seconds is None:
                modified = http_date(headers.get("Last-Modified"))
                self.modified_seconds = None if modified is None else modified.timestamp()
        if (version, total) != (expected, self.size):
            raise changed(
                self.name,
                f"{self.size} bytes, version {self._told(expected)}",
                f"{total} bytes, version {self._told(version)}",
            )

    def _told(self, text: str) -> str:
        """Returns a server's words as errors may show them: short, without what was sent to it."""
        text = self._connections.sent.redact(text)
        return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."

    def _refusal(self, target: _Target, answer: Answer, start: int, stop: int) -> Exception:
        status = answer.status
        cause = f"status {status} from {self._told(target.host)}"
        if told := answer.headers.get("X-Error-Message"):
            cause += f": {self._told(told)}"
        if status in (401, 403):
            hint = self._place.hint(answer.headers)
            return AccessDenied("access denied", file=self.name, found=cause, hint=hint)
        if status in (404, 410) and not self._versions:
            return CheckpointNotFoundError("no such file", file=self.name, found=cause)
        if status in (404, 410, 416) and self._versions:
            return changed(self.name, f"{self.size} bytes, as before", cause)
        if status in (200, 206):
            return StorageError(
                f"the server does not serve bytes [{start}, {stop}) alone, as they are",
                file=self.name,
                expected="status 206 to a Range request, without Content-Encoding",
                found=cause,
                hint="Download the checkpoint, or serve it by a server that knows ranges.",
            )
        after = retry_after_seconds(answer.headers.get("Retry-After"))
        return RequestError(cause, transient=is_transient_status(status), after_seconds=after)


def _receive(answer: Answer, buffers: Sequence[Buffer], length: int) -> int:
    """Fills `buffers` with the `length` bytes of a body, or as many as come before it breaks."""
    staged = length < len(buffers) * _SMALL_BUFFER_BYTES  # many small ones: through a large one
    staging = np.empty(min(length, _PROGRESS_BYTES) if staged else 0, np.uint8).data
    done = 0
    try:
        while done < length:
            rest = skip(buffers, done)
            chunk = (staging if staged else rest[0])[: length - done]
            answer.read_into(chunk)
            if staged:
                scatter(chunk, rest)
            done += len(chunk)
    except (OSError, http.client.HTTPException):
        if not staged:
            done = answer.received
        if done < _PROGRESS_BYTES:
            raise
        return done
    if done:
        answer.check_ended()
    return done
