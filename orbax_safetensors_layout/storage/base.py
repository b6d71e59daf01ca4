"""The storage protocol: sizes, listings and exact ranged reads of immutable files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

Buffer: TypeAlias = memoryview
"""A writable, contiguous memoryview of bytes."""

Source: TypeAlias = "memoryview | npt.NDArray[np.uint8]"
"""Contiguous bytes to be written: what has the buffer protocol and `nbytes`."""


class FileWriter(Protocol):
    """A new file of known size that appears under its name only when it is complete."""

    def write_at(self, offset: int, buffers: Sequence[Source]) -> None:
        """Writes `buffers`, one after the other, from byte `offset` on.

        Ranges written by several calls, also from several threads, do not overlap and together
        are the whole file.

        Raises:
            StorageError: The write failed; names file and range, with the cause chained.
        """
        ...

    def finish(self) -> None:
        """Makes the file durable, if it was asked to be, and visible under its name."""
        ...

    def abort(self) -> None:
        """Drops the file, as far as that is possible. Never raises; does nothing when finished."""
        ...


class RangeReader(Protocol):
    """Exact ranged reads of files by name, from many threads.

    Attributes:
        kind: The storage class, a key of `options.PROFILES`.
    """

    kind: str

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        """Fills `buffers`, one after the other, from the bytes that begin at `offset`.

        Args:
            file: The file's path, as `list` and `join` give it.
            offset: First byte to read.
            buffers: Where the bytes go; together they are one contiguous range of the file.
            shared: Other processes of this host may read the same range, so let caches keep it.

        Raises:
            TruncatedFileError: The file ends before the range does.
            StorageError: The read failed; names file and range, with the cause chained.
        """
        ...

    def check_unchanged(self, file: str) -> None:
        """Checks that a file still is what it was when it was first opened.

        Raises:
            TruncatedFileError: It is shorter.
            StorageError: It was replaced or written to.
        """
        ...


class Storage(RangeReader, Protocol):
    """Ranged access to files by name. Implementations are safe to use from many threads.

    A storage pins what it has seen: a file that is replaced, or changes its size, between two
    reads through one storage object is an error, never a mixture of two versions.
    """

    def size(self, file: str) -> int:
        """Size of `file` in bytes.

        Raises:
            CheckpointNotFoundError: There is no such file.
            StorageError: It can not be opened.
        """
        ...

    def is_file(self, path: str) -> bool:
        """Whether a file stands at `path`."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`, sorted; empty if there is no such folder."""
        ...

    def modified_seconds(self, file: str) -> float:
        """When `file` was last written, in seconds since the epoch."""
        ...

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        """Begins a new file of `size` bytes in a folder that exists.

        Args:
            file: Its path; a file that stands there is replaced when the new one is finished.
            size: Its size in bytes.
            durable: Whether it must survive a crash of the machine once it is finished.

        Raises:
            StorageError: There is no room for it, or it can not be created.
        """
        ...

    def make_folder(self, folder: str) -> None:
        """Makes a folder and those above it, where they are missing."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that is in it; does nothing if it is not there."""
        ...

    def close(self) -> None:
        """Releases what is open; the object may not be used afterwards."""
        ...

    def __enter__(self) -> Self:
        """For a `with` block that closes the storage."""
        ...

    def __exit__(self, *_: object) -> None:
        """Closes the storage."""
        ...


def join(folder: str, name: str) -> str:
    """`folder/name` for any kind of storage."""
    return f"{folder.rstrip('/')}/{name}" if folder != "/" else f"/{name}"
