"""Headers fetched from their files."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from orbax_safetensors_layout.format.header import (
    PREFIX_BYTES,
    Header,
    header_length,
    parse_header,
)
from orbax_safetensors_layout.format.telling import Tell, refuse
from orbax_safetensors_layout.profiles import PROFILES
from orbax_safetensors_layout.storage.base import FIRST_READ_BYTES, Storage


class Headers:
    """Headers of files, each fetched when it is first asked for. Safe to use from many threads.

    Args:
        storage: Where the files are.
        concurrency: Headers fetched at once; None takes the storage class's default.
    """

    def __init__(self, storage: Storage, concurrency: int | None = None) -> None:
        self._storage = storage
        self._concurrency = concurrency or PROFILES[storage.kind].concurrency
        self._lock = threading.Lock()
        self._found: dict[str, Header] = {}

    def fetch(self, files: Sequence[str]) -> dict[str, Header]:
        """The headers of some files.

        Raises:
            FormatError: One is malformed.
            StorageError: A read failed.
        """
        # One lock for all: whoever comes second most likely wants the same headers.
        with self._lock:
            lacking = [file for file in files if file not in self._found]
            if len(lacking) == 1:
                self._found[lacking[0]] = read_header(self._storage, lacking[0])
            elif lacking:
                pool = ThreadPoolExecutor(min(self._concurrency, len(lacking)), "catalog")
                try:
                    jobs = [pool.submit(read_header, self._storage, file) for file in lacking]
                    for file, job in zip(lacking, jobs, strict=True):
                        self._found[file] = job.result()
                except BaseException:
                    self._storage.interrupt()  # no use in waiting for the others
                    raise
                finally:
                    pool.shutdown(cancel_futures=True)
            return {file: self._found[file] for file in files}


def read_header(storage: Storage, file: str, *, tell: Tell = refuse) -> Header:
    """Fetches and parses a file's header, in one request unless it is longer than 256 KiB.

    Args:
        storage: Where the file is.
        file: The file.
        tell: As for `parse_header`.

    Raises:
        FormatError: It is malformed, or the file is truncated.
        StorageError: A read failed.
    """
    file_size = storage.size(file)
    data = read_range(storage, file, 0, min(file_size, FIRST_READ_BYTES))
    length = header_length(data[:PREFIX_BYTES], file=file, file_size=file_size)
    header = data[PREFIX_BYTES : PREFIX_BYTES + length]
    if len(header) < length:
        header += read_range(storage, file, len(data), length - len(header))
    return parse_header(header, file=file, file_size=file_size, tell=tell)


def read_range(storage: Storage, file: str, start: int, size: int) -> bytes:
    """Bytes of a file.

    Raises:
        StorageError: The read failed.
    """
    data = bytearray(size)
    if size:
        storage.read_into(file, start, [memoryview(data)])
    return bytes(data)
