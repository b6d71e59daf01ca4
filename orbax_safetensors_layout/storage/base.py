"""The storage protocol: sizes, listings and exact ranged reads of immutable files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

Buffer: TypeAlias = memoryview
"""A writable, contiguous memoryview of bytes."""


class Storage(Protocol):
    """Ranged access to files by name. Implementations are safe to use from many threads.

    A storage pins what it has seen: a file that is replaced, or changes its size, between two
    reads through one storage object is an error, never a mixture of two versions.

    Attributes:
        kind: The storage class, a key of `options.PROFILES`.
    """

    kind: str

    def size(self, file: str) -> int:
        """Size of `file` in bytes.

        Raises:
            CheckpointNotFoundError: There is no such file.
            StorageError: It can not be opened.
        """
        ...

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

    def is_file(self, path: str) -> bool:
        """Whether a file stands at `path`."""
        ...

    def list(self, folder: str) -> list[str]:
        """Names of the files directly in `folder`, sorted; empty if there is no such folder."""
        ...

    def modified_seconds(self, file: str) -> float:
        """When `file` was last written, in seconds since the epoch."""
        ...

    def check_unchanged(self, file: str) -> None:
        """Checks that a file still is what it was when it was first opened.

        Raises:
            TruncatedFileError: It is shorter.
            StorageError: It was replaced or written to.
        """
        ...

    def close(self) -> None:
        """Releases what is open; the object may not be used afterwards."""
        ...


def join(folder: str, name: str) -> str:
    """`folder/name` for any kind of storage."""
    return f"{folder.rstrip('/')}/{name}" if folder != "/" else f"/{name}"
