"""Fetches headers, each once, many at a time."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence

from orbax_safetensors_layout.format import (
    PREFIX_BYTES,
    Header,
    OnError,
    header_length,
    parse_header,
    raise_error,
)
from orbax_safetensors_layout.options import MIB, PROFILES
from orbax_safetensors_layout.runtime import Workers
from orbax_safetensors_layout.storage import FIRST_READ_BYTES, Storage, read_range

_LARGE_BYTES = 8 * MIB


class HeaderCache:
    """Headers of files, each fetched when it is first asked for. Safe to use from many threads.

    Args:
        storage: The storage of the files.
        concurrency: Headers fetched at once; None takes the storage class's default.
    """

    def __init__(self, storage: Storage, concurrency: int | None = None) -> None:
        self._storage = storage
        self._concurrency = concurrency or PROFILES[storage.kind].concurrency
        self._lock = threading.Lock()
        self._found: dict[str, Header] = {}

    def fetch(self, files: Sequence[str]) -> dict[str, Header]:
        """Return the headers of some files.

        Raises:
            FormatError: One is malformed.
            StorageError: A read failed.
        """
        # One lock for all: a second caller most likely asks for the same headers.
        with self._lock:
            lacking = [file for file in files if file not in self._found]
            if len(lacking) == 1:
                self._found[lacking[0]] = read_header(self._storage, lacking[0])
            elif lacking:
                turns = _Turns()
                threads = min(self._concurrency, len(lacking))
                with Workers(threads, "catalog", self._storage.interrupt) as workers:
                    for file in lacking:
                        workers.submit(functools.partial(self._read, file, turns))
                    workers.join()
            return {file: self._found[file] for file in files}

    def _read(self, file: str, turns: _Turns) -> None:
        self._found[file] = read_header(self._storage, file, turns=turns)


class _Turns:
    """Lets one thread at a time hold a large header, and none after one that was refused.

    A header of 100 MB takes 200 to 600 MB while it is parsed, and seconds under Python's lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Waits until no other thread has its turn; raises the error of an earlier one."""
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                yield
            except Exception as error:
                self._error = error
                raise


def read_header(
    storage: Storage, file: str, *, on_error: OnError = raise_error, turns: _Turns | None = None
) -> Header:
    """Fetches and parses a file's header, in one request unless it is longer than 256 KiB.

    Args:
        storage: The storage of the file.
        file: The file.
        on_error: As for `parse_header`.
        turns: The turns that several threads take with large headers.

    Raises:
        FormatError: It is malformed, or the file is truncated.
        StorageError: A read failed.
    """
    file_size = storage.size(file)
    data = read_range(storage, file, 0, min(file_size, FIRST_READ_BYTES))
    length = header_length(data[:PREFIX_BYTES], file=file, file_size=file_size)
    with turns.take() if turns and length > _LARGE_BYTES else contextlib.nullcontext():
        header = data[PREFIX_BYTES : PREFIX_BYTES + length]
        if len(header) < length:
            header += read_range(storage, file, len(data), length - len(header))
        return parse_header(header, file=file, file_size=file_size, on_error=on_error)
