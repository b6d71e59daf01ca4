"""Fetches headers, each once, many at a time."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from orbax_safetensors_layout.format import (
    PREFIX_BYTES,
    Header,
    OnError,
    header_length,
    parse_header,
    raise_error,
)
from orbax_safetensors_layout.options import MIB, storage_profile
from orbax_safetensors_layout.runtime import Workers
from orbax_safetensors_layout.storage import FIRST_READ_BYTES, Storage, read_range

_LARGE_BYTES = 8 * MIB


class HeaderCache:
    """Headers of files, each fetched when it is first asked for. Safe to use from many threads.

    One thread at a time holds a large header, and none after one that was refused: a header of
    100 MB takes 200 to 600 MB while it is parsed, and seconds under Python's lock.
    """

    def __init__(self, storage: Storage, concurrency: int | None = None) -> None:
        self._storage = storage
        self._concurrency = concurrency or storage_profile(storage.kind).concurrency
        self._headers: dict[str, Header] = {}
        self._lock = threading.Lock()
        self._large_lock = threading.Lock()
        self._refused: Exception | None = None

    def fetch(self, files: Sequence[str]) -> dict[str, Header]:
        """Return the headers of some files."""
        # One lock for all: a second caller most likely asks for the same headers.
        with self._lock:
            lacking = [file for file in files if file not in self._headers]
            self._refused = None
            if len(lacking) == 1:
                self._read(lacking[0])
            elif lacking:
                threads = min(self._concurrency, len(lacking))
                with Workers(threads, "catalog", self._storage.interrupt) as workers:
                    for file in lacking:
                        workers.submit(functools.partial(self._read, file))
                    workers.join()
            return {file: self._headers[file] for file in files}

    def _read(self, file: str) -> None:
        self._headers[file] = read_header(self._storage, file, large=self._large())

    @contextlib.contextmanager
    def _large(self) -> Iterator[None]:
        with self._large_lock:
            if self._refused is not None:
                raise self._refused
            try:
                yield
            except Exception as error:
                self._refused = error
                raise


def read_header(
    storage: Storage,
    file: str,
    *,
    on_error: OnError = raise_error,
    large: AbstractContextManager[object] | None = None,
) -> Header:
    """Fetches and parses a file's header, in one request unless it is longer than 256 KiB.

    `large` is entered while a large one is read; for `on_error` see `parse_header`.

    Raises:
        FormatError: It is malformed, or the file is truncated.
        StorageError: A read failed.
    """
    file_size = storage.size(file)
    data = read_range(storage, file, 0, min(file_size, FIRST_READ_BYTES))
    length = header_length(data[:PREFIX_BYTES], file=file, file_size=file_size)
    with large if large and length > _LARGE_BYTES else contextlib.nullcontext():
        header = data[PREFIX_BYTES : PREFIX_BYTES + length]
        if len(header) < length:
            header += read_range(storage, file, len(data), length - len(header))
        return parse_header(header, file=file, file_size=file_size, on_error=on_error)
