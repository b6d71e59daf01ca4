"""Files of a server that are read by ranges: what `hf://` and `https://` paths have in common.

No file is fetched whole. A subclass for each kind of server has `_address`, `is_file` and `list`.
"""

from __future__ import annotations

import abc
import functools
import http.client
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.options import KIB, MIB, RetryPolicy

from .base import FIRST_READ_BYTES, Buffer, Notes, Storage
from .buffers import changed, scatter, skip, truncated
from .http import Answer, Connections, Origin
from .retry import Failure, Retrier, http_date, is_transient_status, retry_after_seconds

_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}
_REDIRECTS = {301, 302, 303, 307, 308}
_MOST_REDIRECTS = 6
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19})\s*", re.A)
_EMPTY_RANGE = re.compile(r"\s*bytes\s+\*/0\s*")
_PROGRESS_BYTES = 1 * MIB  # a body that breaks after so much is not a failed attempt
_SMALL_BUFFER_BYTES = 64 * KIB


class AccessDenied(StorageError):
    """A server answers 401 or 403."""


class FileAddress(NamedTuple):
    """Address of a file, at first or after redirects, and what is known of it before a request."""

    url: str
    headers: Mapping[str, str]  # credentials, sent to this URL's origin alone
    hint: Callable[[str | None], str]  # from the `X-Error-Code` of a 401 or 403
    size: int | None = None  # bytes
    digest: str | None = None  # the expected `X-Linked-Etag` of redirects that have one
    is_verified: bool = False  # a redirect has confirmed that it is the right content
    identity: str = ""  # of the file, whoever asks: without credentials
    version: str | None = None  # of its content


class NotedVersion(NamedTuple):
    """A version that a server had of a file some time ago."""

    size: int
    tag: str  # strong ETag

    @classmethod
    def parse(cls, note: str | None) -> Self | None:
        size, _, tag = (note or "").partition(" ")
        return cls(int(size), tag) if tag else None


class RemoteStorage(Storage):
    """Ranged access to files of a server, for reading alone."""

    def __init__(self, retries: RetryPolicy | None) -> None:
        retries = retries or RetryPolicy()
        self._connections = Connections(retries.attempt_seconds)
        self._retrier = Retrier(retries, _classify)
        self._lock = threading.Lock()
        self._files: dict[str, RemoteFile] = {}
        self._notes: Notes | None = None
        self._closed = False

    @abc.abstractmethod
    def _address(self, file: str) -> FileAddress:
        """Returns where a file is asked for, or raises `CheckpointNotFoundError`."""

    def size(self, file: str) -> int:
        return self._size(self._file(file))

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        remote = self._file(file)
        total, size = sum(map(len, buffers)), self._size(remote)
        if offset + total > size:
            raise truncated(file, offset, total, size)
        done = 0
        if total and not offset:  # the first bytes came with the size, and are taken once
            with remote.lock:
                head, remote.head = remote.head[:total], memoryview(b"")
            scatter(head, buffers)
            done = len(head)
        while done < total:
            start, rest = offset + done, skip(buffers, done)
            doing = f"reading bytes [{start}, {offset + total})"
            done += self._retrier.run(functools.partial(remote.fetch, start, rest), doing, file)

    def modified_seconds(self, file: str) -> float:
        remote = self._file(file)
        if remote.modified_seconds is None:
            self.check_unchanged(file)
        return remote.modified_seconds or 0.0

    def check_unchanged(self, file: str) -> None:
        remote = self._file(file)
        if self._size(remote):
            first = memoryview(bytearray(1))
            self._retrier.run(lambda: remote.fetch(0, [first]), "looking at it again", file)

    def version(self, file: str) -> str | None:
        remote = self._file(file)
        size = self._size(remote)
        return remote.version or f"{remote.pinned} {size}"

    def content_key(self, file: str) -> str | None:
        remote = self._file(file)
        self._size(remote)
        return f"{remote.identity} {remote.version}" if remote.version else None

    def identity(self, file: str) -> str:
        return self.content_key(file) or f"{self.size(file):,} bytes, {self._file(file).stamp}"

    def remember(self, notes: Notes) -> None:
        self._notes = notes

    def interrupt(self) -> None:
        self._retrier.interrupt()
        self._connections.interrupt()

    def close(self) -> None:
        self._closed = True
        self.interrupt()
        self._connections.close()

    def _file(self, file: str) -> RemoteFile:
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed", file=file)
            remote = self._files.get(file)
            if remote is None:
                remote = RemoteFile(file, self._address(file), self._connections)
                self._files[file] = remote
            return remote

    def _size(self, file: RemoteFile) -> int:
        with file.lock:
            if file.size is None:
                if self._notes is not None:
                    file.noted = NotedVersion.parse(self._notes.get(file.identity))
                    file.note = functools.partial(self._notes.set, file.identity)
                self._retrier.run(file.open, "opening it", file.name)
            assert file.size is not None
            return file.size


class RemoteFile:
    """A file that is read by ranges. Safe to use from many threads.

    What is first seen of it is pinned: the size, and the ETag or else the date. An answer that
    has others is an error. Whoever opens it holds `lock`; `head` has its first bytes then, unless
    it still is of the `noted` version.
    """

    def __init__(self, name: str, address: FileAddress, connections: Connections) -> None:
        self.name = name
        self.size = address.size
        self.identity = address.identity
        self.noted: NotedVersion | None = None
        self.note: Callable[[str], None] = lambda text: None
        self.tag: str | None = None  # the pinned ETag, if it is a strong one
        self.head = memoryview(b"")
        self.modified_seconds: float | None = None
        self.lock = threading.Lock()
        self._address = address
        self._connections = connections
        self._target = address
        self._pin_lock = threading.Lock()
        self._versions: dict[str, str] = {}

    @property
    def version(self) -> str | None:
        """That of no other content of the file; None if it is weak."""
        version = self._address.version or self.tag
        return f"{version} {self.size}" if version else None

    @property
    def pinned(self) -> str:
        """The version that was first seen, also if it is weak."""
        return next(iter(self._versions.values()), "")

    @property
    def stamp(self) -> str:
        """Time of the last change, or else the version by the first server: a weak ETag, say."""
        if self.modified_seconds is not None:
            return f"modified {self.modified_seconds}"
        return self.pinned

    def open(self) -> None:
        """Makes one attempt to fetch `head`, from which the size is known."""
        head = memoryview(bytearray(FIRST_READ_BYTES))
        self.head = head[: self._ask(0, [head])]

    def fetch(self, start: int, buffers: Sequence[Buffer]) -> int:
        """Makes one attempt; returns the bytes that came, fewer if it broke after a good part."""
        total = sum(map(len, buffers))
        got = self._ask(start, buffers)
        if got < min(total, _PROGRESS_BYTES):
            raise Failure(f"{got} bytes received of {total}")
        return got

    def _ask(self, start: int, buffers: Sequence[Buffer]) -> int:
        """Follows redirects to the bytes; where the last ones have expired, from the beginning."""
        stop = start + sum(map(len, buffers))
        target = self._target
        may_expire = target is not self._address
        for _ in range(_MOST_REDIRECTS):
            headers = {**_HEADERS, **target.headers, "Range": f"bytes={start}-{stop - 1}"}
            if self.noted is not None and self.size is None:
                headers["If-None-Match"] = self.noted.tag
            with self._connections.get(target.url, headers) as answer:
                if answer.status in _REDIRECTS:
                    target = self._redirected(target, answer)
                elif may_expire and 400 <= answer.status < 500 and answer.status not in (408, 429):
                    target, may_expire = self._address, False
                else:
                    length = self._check(target, answer, start, stop)
                    self._target = target
                    return _receive(answer, buffers, length)
        raise Failure(f"{_MOST_REDIRECTS} redirects led to no file", transient=False)

    def _redirected(self, target: FileAddress, answer: Answer) -> FileAddress:
        location = (answer.headers.get("Location") or "").encode("latin-1").decode(errors="replace")
        try:
            url = urllib.parse.urljoin(target.url, location)
            origin, before = Origin.of(url), Origin.of(target.url)
        except ValueError:
            raise Failure("a redirect without a location", transient=False) from None
        if (before.scheme, origin.scheme) == ("https", "http"):
            cause = f"a redirect from https to unencrypted http at {origin.host}"
            raise Failure(cause, transient=False)
        if before.is_loopback and not origin.is_allowed:
            cause = f"a redirect to unencrypted http at {origin.host}"
            raise Failure(cause, transient=False)
        digest, known = answer.headers.get("X-Linked-Etag"), target.digest
        if (
            digest is not None
            and known is not None
            and digest.removeprefix("W/").strip('"') != known
        ):
            raise changed(self.name, f"content {known}", "another one, after a redirect")
        is_verified = target.is_verified or None not in (digest, known)
        headers = target.headers if origin == before else {}
        return target._replace(url=url, headers=headers, is_verified=is_verified)

    def _check(self, target: FileAddress, answer: Answer, start: int, stop: int) -> int:
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
                cause = f"another Content-Range, or a body of {size},"
                raise Failure(f"{cause} from {_host(target)} for bytes [{start}, {stop})")
        elif status == 200 and is_plain and start == 0 and answer.length in range(stop + 1):
            length = total = answer.length or 0  # a server without ranges; all of a small file
        elif status == 416 and _EMPTY_RANGE.fullmatch(headers.get("Content-Range", "")):
            length = total = 0
        elif status == 304 and self.noted is not None:
            noted, self.noted = self.noted, None  # asked once
            if headers.get("ETag") != noted.tag:  # as a weak one, which matches a strong one
                raise Failure("status 304 without the ETag that was asked for")
            length, total = 0, noted.size
        else:
            raise self._refusal(target, answer, start, stop)
        is_first = self.size is None
        self._pin(target, headers, total)
        if is_first and status == 206 and self.tag is not None:
            self.note(f"{total} {self.tag}")
        return length

    def _pin(self, target: FileAddress, headers: http.client.HTTPMessage, total: int) -> None:
        version = headers.get("ETag") or headers.get("Last-Modified") or "of unknown date"
        # Servers may have different ETags of the same, verified content.
        parts = urllib.parse.urlsplit(target.url)
        server = f"{parts.netloc}{parts.path}" if target.is_verified else ""
        with self._pin_lock:
            expected = self._versions.setdefault(server, version)
            if self.size is None:
                self.size = total
                self.tag = version if version.startswith('"') else None
            if self.modified_seconds is None:
                modified = http_date(headers.get("Last-Modified"))
                self.modified_seconds = None if modified is None else modified.timestamp()
        if (version, total) != (expected, self.size):
            self.note("")
            another = "the same version" if version == expected else "another version"
            raise changed(self.name, f"{self.size} bytes", f"{total} bytes, {another}")

    def _refusal(self, target: FileAddress, answer: Answer, start: int, stop: int) -> Exception:
        status = answer.status
        cause = f"status {status} from {_host(target)}"
        if status in (401, 403):
            hint = target.hint(answer.headers.get("X-Error-Code"))
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
        return Failure(cause, transient=is_transient_status(status), after_seconds=after)


def _host(target: FileAddress) -> str:
    return Origin.of(target.url).host


def _classify(error: Exception) -> Failure | None:
    if isinstance(error, http.client.IncompleteRead):
        lacking = "" if error.expected is None else f"{error.expected} bytes "
        return Failure(f"the body ended {lacking}too soon")
    if isinstance(error, http.client.BadStatusLine | http.client.UnknownProtocol) and (
        not isinstance(error, ConnectionError)
    ):
        return Failure("the answer is not HTTP")  # what it is, is the server's text
    if isinstance(error, OSError | http.client.HTTPException):
        lasting = isinstance(error, ssl.SSLCertVerificationError | http.client.InvalidURL) or (
            isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
        )
        return Failure(f"{type(error).__name__}: {error}".rstrip(": "), transient=not lasting)
    return None


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
