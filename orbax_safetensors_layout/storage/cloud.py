"""Objects in a bucket of Google Cloud Storage, Amazon S3 (or what speaks its API), or Azure.

Through `obstore`, the Python door of Rust's `object_store`. Reads, listings and deletions are
tried again here, so that a failure elsewhere ends their pauses; uploads in parts are by the client
itself. docs/storage.md has the figures behind the choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import obstore
from obstore import exceptions

from orbax_safetensors_layout.errors import CheckpointNotFoundError, StorageError
from orbax_safetensors_layout.options import RetryPolicy

from .base import Buffer, FileWriter, Publication, Rank, Storage, join, new_file
from .buffers import fill, truncated
from .cloud_client import NOT_FOUND, Client, classify, open_client
from .cloud_commit import LONGEST_REQUEST_SECONDS, Check, InPlace, StagedCopy, allow
from .cloud_object import Seen, call_for_all, not_alone, replaced
from .cloud_write import CloudFileWriter, part_bytes
from .retry import Retrier

T = TypeVar("T")

_LARGEST_COPY_BYTES = {"s3": 5 << 30}  # of one CopyObject
_LONGEST_COPY_SECONDS = 900.0  # S3 answers when it is done, at some 50 MB/s
_LARGEST_QUICK_COPY_BYTES = 256 << 20  # 5 s at that speed
_REQUESTS, _UPLOADS, _COPIES, _CLAIMED = "requests", "uploads", "copies", "claimed"  # of clients


class CloudStorage(Storage):
    """The objects of a bucket, for Azure a container.

    A folder is what keys have before a slash; it is never made.
    """

    lists = True
    appends = True

    def __init__(self, kind: str, bucket: str, *, retries: RetryPolicy | None = None) -> None:
        self.kind = kind
        self._root = f"{kind}://{bucket}/"
        self._bucket = bucket
        self._retrier = Retrier(retries or RetryPolicy())
        self._clients: dict[str, Client] = {}
        self._seen: dict[str, Seen] = {}
        self._written: dict[str, Seen] = {}
        self._lock = threading.Lock()
        self._closed = False

    def size(self, file: str) -> int:
        return self._look(file).size

    def modified_seconds(self, file: str) -> float:
        return self._look(file).modified.timestamp()

    def folders(self, folder: str) -> list[str]:
        key = self._key(folder)
        prefixes = self._entries(key, folder)["common_prefixes"]
        return sorted(path.removeprefix(f"{key}/").rstrip("/") for path in prefixes)

    def list(self, folder: str) -> list[str]:
        key = self._key(folder)
        prefix = f"{key}/" if key else ""
        names = []
        for meta in self._entries(key, folder)["objects"]:
            if meta["path"].startswith(prefix):  # else it is what some tools put for the folder
                names.append(meta["path"].removeprefix(prefix))
                self._remember(f"{self._root}{meta['path']}", Seen.of(meta))
        return sorted(names)

    def _entries(self, key: str, folder: str) -> Any:
        return self._run(
            lambda: obstore.list_with_delimiter(self._client(), key or None), "listing", folder
        )

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        total = sum(len(buffer) for buffer in buffers)
        seen = self._look(file)
        if offset + total > seen.size:
            raise truncated(file, offset, total, seen.size)
        if total:
            doing = f"reading bytes [{offset}, {offset + total})"
            self._run(lambda: self._fetch(file, seen, offset, total, buffers), doing, file)

    def _fetch(
        self, file: str, seen: Seen, offset: int, total: int, buffers: Sequence[Buffer]
    ) -> None:
        options: Any = {"range": (offset, offset + total)}
        if seen.tag and not seen.tag.startswith("W/"):  # a weak one never matches (RFC 9110, 13.1)
            options["if_match"] = seen.tag
        try:
            result = obstore.get(self._client(), self._key(file), options=options)
            if not seen.is_same(Seen.of(result.meta)):  # a server that knows no If-Match
                raise replaced(file, offset, total)
            got = fill(buffers, result.stream(min_chunk_size=0))
        except (exceptions.PreconditionError, *NOT_FOUND):
            raise replaced(file, offset, total) from None
        if got != total:
            raise ConnectionError(f"the body has {got} bytes in place of {total}")

    def check_unchanged(self, file: str) -> None:
        seen = self._look(file)
        try:
            is_same = seen.is_same(self._head(file))
        except CheckpointNotFoundError:
            is_same = False
        if not is_same:
            raise replaced(file, 0, seen.size)

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        self._forget(file)
        key = self._key(file)
        done = functools.partial(self._wrote, file)
        is_small = size <= part_bytes(size)
        client = self._client(_REQUESTS if is_small else _UPLOADS)

        def put_whole(data: Any) -> None:
            self._run(lambda: obstore.put(client, key, data, use_multipart=False), "writing", file)

        def put_parts(parts: Any, chunk: int, concurrency: int) -> None:
            options: Any = {"chunk_size": chunk, "max_concurrency": concurrency}
            obstore.put(client, key, parts, use_multipart=True, **options)

        if is_small:
            return CloudFileWriter(file, size, put_whole=put_whole, done=done)
        return CloudFileWriter(file, size, put_parts=put_parts, done=done)

    def copy(self, source: str, target: str, *, check: Check = allow) -> None:
        """Copies an object within the bucket; through this process if it is too large."""
        seen = self._look(source)
        self._forget(target)
        if seen.size <= _LARGEST_COPY_BYTES.get(self.kind, seen.size):
            keys = self._key(source), self._key(target)
            client = self._client(_COPIES if seen.size > _LARGEST_QUICK_COPY_BYTES else _CLAIMED)

            def copy() -> None:
                check()
                obstore.copy(client, *keys, overwrite=True)

            self._run(copy, "copying", source)
            self._wrote(target)
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

    def publication(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> Publication:
        if overwrite:
            return StagedCopy(target, self, rank)
        return InPlace(target, self, rank, scratch)

    def check_written(self, folder: str) -> None:
        inside = join(folder, "")
        with self._lock:
            written = {f: seen for f, seen in self._written.items() if f.startswith(inside)}

        def check(file: str) -> None:
            if not written[file].is_same(self._written_now(file)):
                raise not_alone(file)

        call_for_all(check, [*written])

    def make_folder(self, folder: str) -> None:
        pass  # it is there as soon as something is in it

    def flush_folder(self, folder: str) -> None:
        pass  # what is written is durable

    def look_again(self, file: str) -> None:
        """Pins an object as it is now, with the time that a head tells; listings' may differ."""
        self._forget(file)
        self._look(file)

    def remove_pinned(self, file: str, *, check: Check) -> None:
        """Removes an object if it is still the one that `look_again` saw.

        The client has no conditional deletion, so the object is looked at right before.
        """
        seen = self._look(file)

        def remove() -> None:
            with contextlib.suppress(CheckpointNotFoundError, *NOT_FOUND):
                if not seen.is_unwritten_since(self._head(file)):
                    raise not_alone(file, "the object that was there when the save was complete")
                check()
                obstore.delete(self._client(_CLAIMED), [self._key(file)])

        self._run(remove, "removing", file)
        self._forget(file)

    def remove(self, path: str, *, check: Check = allow) -> None:
        key = self._key(path)
        if not key:
            raise StorageError("a whole bucket is not removed", file=path)

        def remove() -> None:
            client = self._client()
            inside = ([meta["path"] for meta in part] for part in obstore.list(client, key))
            for keys in ([key], *inside):
                check()
                with contextlib.suppress(*NOT_FOUND):
                    obstore.delete(client, keys)

        self._run(remove, "removing", path)
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

    def _client(self, use: str = _REQUESTS) -> Client:
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed", file=self._root)
            if use not in self._clients:
                policy = self._retrier.policy
                seconds = {
                    _COPIES: max(policy.attempt_seconds, _LONGEST_COPY_SECONDS),
                    _CLAIMED: LONGEST_REQUEST_SECONDS,
                }.get(use, policy.attempt_seconds)
                policy = dataclasses.replace(policy, attempt_seconds=seconds)
                self._clients[use] = open_client(
                    self.kind, self._bucket, policy, retrying=use == _UPLOADS
                )
            return self._clients[use]

    def _run(self, call: Callable[[], T], doing: str, path: str) -> T:
        return self._retrier.run(call, classify, doing=doing, url=path)

    def _key(self, path: str) -> str:
        if not f"{path}/".startswith(self._root):
            raise StorageError("the path is in another bucket", file=path, expected=self._root)
        return path[len(self._root) :].rstrip("/")

    def _look(self, file: str) -> Seen:
        """Return an object as it was first seen."""
        with self._lock:
            seen = self._seen.get(file)
        return seen or self._remember(file, self._head(file))

    def _head(self, file: str) -> Seen:
        key = self._key(file)

        def head() -> Seen:
            try:
                return Seen.of(obstore.head(self._client(), key))
            except NOT_FOUND:
                raise CheckpointNotFoundError("no such object", file=file) from None

        if not key:
            raise CheckpointNotFoundError("a bucket is not a file", file=file)
        return self._run(head, "looking", file)

    def _remember(self, file: str, seen: Seen) -> Seen:
        with self._lock:
            return self._seen.setdefault(file, seen)

    def _forget(self, file: str) -> None:
        with self._lock:
            self._seen.pop(file, None)
            self._written.pop(file, None)

    def _wrote(self, file: str) -> None:
        """Records a new object. Not all stores say the same of it after an upload."""
        seen = self._written_now(file)
        with self._lock:
            self._seen[file] = self._written[file] = seen

    def _written_now(self, file: str) -> Seen:
        try:
            return self._head(file)
        except CheckpointNotFoundError:
            raise not_alone(file) from None
