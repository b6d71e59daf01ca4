"""Objects in a bucket of Google Cloud Storage, Amazon S3 (or a store with its API), or Azure.

Through `obstore` (docs/storage.md has the figures behind the choice). Reads, listings and deletions
are tried again here, so that a failure elsewhere ends their pauses; uploads in parts by the client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import obstore
from obstore import exceptions

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.options import GIB, MIB, RetryPolicy

from .base import Buffer, FileWriter, NewFolder, Rank, Storage, join, new_file
from .buffers import changed, fill, truncated
from .cloud_client import NOT_FOUND, Client, classify, open_client, service_of
from .cloud_commit import (
    CLAIMS,
    LONGEST_REQUEST_SECONDS,
    Check,
    InPlace,
    StagedCopy,
    call_for_all,
    not_alone,
)
from .cloud_write import PARTS_AT_ONCE, CloudFileWriter, part_bytes
from .retry import Retrier

_LARGEST_COPY_BYTES = {"s3": 5 * GIB}  # of one CopyObject
_LONGEST_COPY_SECONDS = 900.0  # S3 answers when it is done, at some 50 MB/s
_LARGEST_QUICK_COPY_BYTES = 256 * MIB  # 5 s at that speed
_LATER_COPIES = {"az"}  # which may answer before a copy is done


class Seen(NamedTuple):
    """The version of an object when it was first opened, as the store reports it."""

    size: int
    tag: str | None  # ETag
    version: str | None  # or generation; not in listings
    modified: datetime.datetime

    @classmethod
    def of(cls, meta: Any) -> Self:
        tag = meta["e_tag"]
        if tag and not tag.startswith(('"', "W/")):  # Azure's listings leave the quotes out
            tag = f'"{tag}"'
        return cls(meta["size"], tag, meta["version"], meta["last_modified"])

    @property
    def strong(self) -> str | None:
        """A version that no other content of the object has."""
        return self.tag if self.tag and not self.tag.startswith("W/") else self.version

    def is_same(self, other: Seen | None) -> bool:
        """Whether two looks saw one object, by all that both report."""
        if other is None or self.size != other.size:
            return False
        if self.tag and other.tag and self.tag != other.tag:
            return False
        if self.version and other.version:
            return self.version == other.version
        return bool(self.tag and other.tag) or self.modified == other.modified


class CloudStorage(Storage):
    """The objects of a bucket, for Azure a container; a folder is what keys have before a slash."""

    lists = True
    appends = True

    def __init__(self, kind: str, bucket: str, *, retries: RetryPolicy | None = None) -> None:
        self.kind = kind
        self._root = f"{kind}://{bucket}/"
        self._bucket = bucket
        self._retrier = Retrier(retries or RetryPolicy(), classify)
        self._clients: dict[tuple[float, bool], Client] = {}
        self._seen: dict[str, Seen] = {}
        self._written: dict[str, Seen] = {}
        self._lock = threading.Lock()
        self._closed = False

    def size(self, file: str) -> int:
        return self._look(file).size

    def modified_seconds(self, file: str) -> float:
        return self._look(file).modified.timestamp()

    def folders(self, folder: str) -> list[str]:
        prefix, entries = self._entries(folder)
        return sorted(path.removeprefix(prefix).rstrip("/") for path in entries["common_prefixes"])

    def list(self, folder: str) -> list[str]:
        prefix, entries = self._entries(folder)
        names = []
        for meta in entries["objects"]:
            if meta["path"].startswith(prefix):  # else it is what some tools put for the folder
                names.append(meta["path"].removeprefix(prefix))
                self._remember(f"{self._root}{meta['path']}", Seen.of(meta))
        return sorted(names)

    def _entries(self, folder: str) -> tuple[str, Any]:
        """Return the prefix of the keys in a folder, and its listing."""
        key = self._key(folder)
        entries = self._retrier.run(
            lambda: obstore.list_with_delimiter(self._client(), key or None), "listing", folder
        )
        return f"{key}/" if key else "", entries

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        total = sum(len(buffer) for buffer in buffers)
        seen = self._look(file)
        if offset + total > seen.size:
            raise truncated(file, offset, total, seen.size)
        if total:
            doing = f"reading bytes [{offset}, {offset + total})"
            self._retrier.run(lambda: self._fetch(file, seen, offset, total, buffers), doing, file)

    def _fetch(
        self, file: str, seen: Seen, offset: int, total: int, buffers: Sequence[Buffer]
    ) -> None:
        options: Any = {"range": (offset, offset + total)}
        if seen.tag and not seen.tag.startswith("W/"):  # a weak one never matches (RFC 9110, 13.1)
            options["if_match"] = seen.tag
        try:
            result = obstore.get(self._client(), self._key(file), options=options)
            if not seen.is_same(Seen.of(result.meta)):  # a server that knows no If-Match
                raise _replaced(file, offset, total)
            stream = result.stream(min_chunk_size=0)
            got = fill(buffers, itertools.takewhile(self._retrier.goes_on, stream))
        except (exceptions.PreconditionError, *NOT_FOUND):
            raise _replaced(file, offset, total) from None
        if got != total:
            raise ConnectionError(f"the body has {got} bytes instead of {total}")

    def version(self, file: str) -> str | None:
        seen = self._look(file)
        date = seen.modified.replace(microsecond=0)  # listings have more digits than answers
        return f"{seen.tag or date} {seen.size}"

    def content_key(self, file: str) -> str | None:
        seen = self._look(file)
        return f"{self._service} {file} {seen.strong} {seen.size}" if seen.strong else None

    @functools.cached_property
    def _service(self) -> str:
        return service_of(self.kind)

    def check_unchanged(self, file: str) -> None:
        seen = self._look(file)
        if not seen.is_same(self._head(file)):
            raise _replaced(file, 0, seen.size)

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        self._forget(file)
        key, chunk = self._key(file), part_bytes(size)
        client = self._client(retrying=size > chunk)

        def put_whole(data: Any) -> None:
            put = functools.partial(obstore.put, client, key, data, use_multipart=False)
            self._retrier.run(put, "writing", file)

        def put_parts(parts: Any) -> None:
            options: Any = {"chunk_size": chunk, "max_concurrency": PARTS_AT_ONCE}
            obstore.put(client, key, parts, use_multipart=True, **options)

        done = functools.partial(self._wrote, file, size)
        return CloudFileWriter(file, size, put_whole if size <= chunk else put_parts, done)

    def copy(self, source: str, target: str, *, check: Check = lambda: None) -> None:
        """Copies an object within the bucket; through this process if it is too large."""
        seen = self._look(source)
        self._forget(target)
        if seen.size <= _LARGEST_COPY_BYTES.get(self.kind, seen.size):
            keys = self._key(source), self._key(target)
            longest = max(_LONGEST_COPY_SECONDS, self._retrier.policy.attempt_seconds)
            is_quick = seen.size <= _LARGEST_QUICK_COPY_BYTES
            client = self._client(LONGEST_REQUEST_SECONDS if is_quick else longest)

            def copy() -> None:
                check()
                obstore.copy(client, *keys, overwrite=True)

            self._retrier.run(copy, "copying", source)
            if self.kind in _LATER_COPIES:
                self._await_size(target, seen.size, longest, check)
            self._wrote(target, seen.size)
            return
        step = part_bytes(seen.size)
        buffer = memoryview(bytearray(step))
        with new_file(self, target, seen.size, durable=True) as writer:
            for start in range(0, seen.size, step):
                data = buffer[: seen.size - start]
                self.read_into(source, start, [data])
                check()
                writer.write_at(start, [data])
            check()

    def new_folder(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> NewFolder:
        if not self._key(target):  # what is beside a folder is here within it
            target = join(target, "")
        return StagedCopy(target, self, rank) if overwrite else InPlace(target, self, rank, scratch)

    def check_written(self, folder: str) -> None:
        inside, claims = join(folder, ""), join(folder, CLAIMS)
        with self._lock:
            written = {
                file: seen
                for file, seen in self._written.items()
                if file.startswith(inside) and not file.startswith(claims)  # which are renewed
            }

        def check(file: str) -> None:
            if not written[file].is_same(self._head(file)):
                raise not_alone(file)

        call_for_all(check, [*written])

    def make_folder(self, folder: str) -> None:
        pass  # it is there as soon as something is in it

    def look_again(self, file: str) -> None:
        """Pins an object as it is now, with the time of a head request; listings' may differ."""
        self._forget(file)
        self._look(file)

    def remove_pinned(self, file: str, *, check: Check) -> None:
        """Removes an object if it is still the one that `look_again` saw."""
        seen = self._look(file)

        def remove() -> None:  # the client has no conditional deletion
            now = self._head(file)
            if now is None:
                return
            if not seen.is_same(now) or seen.modified != now.modified:  # or an equal one
                raise not_alone(file, "the object that was there when the save was complete")
            check()
            with contextlib.suppress(*NOT_FOUND):
                obstore.delete(self._client(LONGEST_REQUEST_SECONDS), [self._key(file)])

        self._retrier.run(remove, "removing", file)
        self._forget(file)

    def remove(self, path: str, *, check: Check = lambda: None) -> None:
        key = self._key(path)
        if not key:
            raise StorageError("a whole bucket cannot be removed", file=path)

        def remove() -> None:
            client = self._client()
            inside = ([meta["path"] for meta in part] for part in obstore.list(client, key))
            for keys in ([key], *inside):
                check()
                with contextlib.suppress(*NOT_FOUND):
                    obstore.delete(client, keys)

        self._retrier.run(remove, "removing", path)
        with self._lock:
            for known in (self._seen, self._written):
                for file in [f for f in known if f == path or f.startswith(f"{path}/")]:
                    del known[file]

    def interrupt(self) -> None:
        self._retrier.interrupt()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._clients.clear()

    def _client(self, seconds: float = 0.0, *, retrying: bool = False) -> Client:
        """Return a client whose requests may take `seconds`, or as long as the policy says."""
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed", file=self._root)
            if (seconds, retrying) not in self._clients:
                policy = self._retrier.policy
                if seconds:
                    policy = dataclasses.replace(policy, attempt_seconds=seconds)
                client = open_client(self.kind, self._bucket, policy, retrying=retrying)
                self._clients[seconds, retrying] = client
            return self._clients[seconds, retrying]

    def _key(self, path: str) -> str:
        if not f"{path}/".startswith(self._root):
            raise StorageError("the path is in another bucket", file=path, expected=self._root)
        return path[len(self._root) :].rstrip("/")

    def _look(self, file: str) -> Seen:
        """Return an object as it was first seen."""
        seen = self._seen.get(file) or self._head(file)
        if seen is None:
            raise CheckpointNotFoundError("no such object", file=file)
        return self._remember(file, seen)

    def _remember(self, file: str, seen: Seen) -> Seen:
        with self._lock:
            return self._seen.setdefault(file, seen)

    def _head(self, file: str) -> Seen | None:
        key = self._key(file)

        def head() -> Seen | None:
            with contextlib.suppress(*NOT_FOUND):
                return Seen.of(obstore.head(self._client(), key))
            return None

        return self._retrier.run(head, "looking", file) if key else None

    def _forget(self, file: str) -> None:
        with self._lock:
            self._seen.pop(file, None)
            self._written.pop(file, None)

    def _await_size(self, file: str, size: int, seconds: float, check: Check) -> None:
        """Waits until an object that is being copied has all its bytes."""
        deadline = time.monotonic() + seconds
        while (now := self._head(file)) is None or now.size < size:
            check()
            if time.monotonic() > deadline or not self._retrier.goes_on():
                return
            time.sleep(1.0)

    def _wrote(self, file: str, size: int) -> None:
        """Records a new object. Not all stores say the same of it after an upload."""
        seen = self._head(file)
        if seen is None or seen.size != size:
            raise not_alone(file, f"the {size:,} bytes that this one has written")
        with self._lock:
            self._seen[file] = self._written[file] = seen


def _replaced(file: str, offset: int, total: int) -> StorageError:
    """Return the error for a read of `total` bytes of an object that is no longer the same."""
    during = f"bytes [{offset}, {offset + total}) were read"
    return changed(file, "the object as it was first seen", "another, or none", during)
