"""The storage protocol: sizes, listings and exact ranged reads of immutable files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.errors import FormatError
from orbax_safetensors_layout.options import KIB

Buffer: TypeAlias = memoryview
"""A writable, contiguous memoryview of bytes."""

ByteBuffer: TypeAlias = "memoryview | npt.NDArray[np.uint8]"
"""Contiguous bytes to be written: what has the buffer protocol and `nbytes`."""


FIRST_READ_BYTES = 256 * KIB
"""What a reader asks of a file first. It holds the header of about 2,000 tensors; at 100 MB/s it
costs less than one more request does. A storage that must ask for a file's size fetches as much
along with it."""

Rank: TypeAlias = "Callable[[str], int | None]"
"""When the file of a name appears, among those of a checkpoint; None for others."""


class FileWriter(Protocol):
    """A new file of known size that appears under its name only when it is complete."""

    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
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


class Publication(Protocol):
    """How the files of one save appear in a folder, together if the storage can do that.

    `begin`, `publish` and `end` are for one process; the others only write.

    Attributes:
        target: The folder, by the name that all processes know it by.
        folder: Where the files are written.
    """

    target: str
    folder: str

    def begin(self) -> None:
        """Claims the target, and puts back what a save that crashed left beside it.

        Raises:
            StorageError: Another save to it is running, or there is no access.
        """
        ...

    def prepare(self) -> None:
        """Makes `folder` ready to be written to.

        Raises:
            StorageError: The target cannot be replaced, or there is no access.
        """
        ...

    def publish(self) -> None:
        """Puts the complete files in their place.

        Raises:
            StorageError: A step failed.
        """
        ...

    def end(self) -> None:
        """Removes what was not published, as far as possible, and gives up the claim."""
        ...


class RangeReader(Protocol):
    """Exact ranged reads of files by name, from many threads.

    Attributes:
        kind: The storage class, a key of `profiles.PROFILES`.
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

    def interrupt(self) -> None:
        """Ends pauses between attempts: requests in flight may end, none is tried again.

        For a caller that has failed elsewhere and waits for what is in flight. May be called from
        any thread, also repeatedly.
        """
        ...


class Storage(RangeReader, Protocol):
    """Ranged access to files by name. Implementations are safe to use from many threads.

    A storage pins what it has seen: a file that is replaced, or changes its size, between two
    reads through one storage object is an error, never a mixture of two versions.

    Attributes:
        lists: Whether `list` gives all files of a folder; otherwise only such as are well known.
        appends: Whether a new file grows from its first byte to its last, so that bytes which come
            before their turn have to wait somewhere.
    """

    lists: bool
    appends: bool

    def size(self, file: str) -> int:
        """Size of `file` in bytes.

        Raises:
            CheckpointNotFoundError: There is no such file.
            StorageError: It cannot be opened.
        """
        ...

    def is_file(self, path: str) -> bool:
        """Whether a file is at `path`."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in `folder`, sorted; empty where they cannot be listed."""
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
            file: Its path; an existing file is replaced when the new one is finished.
            size: Its size in bytes.
            durable: Whether it must survive a crash of the machine once it is finished.

        Raises:
            StorageError: There is no room for it, or it cannot be created.
        """
        ...

    def make_folder(self, folder: str) -> None:
        """Makes a folder and those above it, where they are missing."""
        ...

    def flush_folder(self, folder: str) -> None:
        """Makes the names in a folder durable.

        Raises:
            StorageError: The folder cannot be flushed.
        """
        ...

    def check_written(self, folder: str) -> None:
        """Checks that the files below a folder still are what was written through this storage.

        Raises:
            StorageError: Another program has written there, too.
        """
        ...

    def publication(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> Publication:
        """How a save appears at a folder.

        Args:
            target: The folder.
            overwrite: Whether what is there is replaced.
            rank: Which names in it belong to a checkpoint, and when they appear.
            scratch: Folders in it that only a save uses.
        """
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


MAX_DOCUMENT_BYTES = 100_000_000
"""An index of 100,000 tensors has 10 MB, a manifest of 92,000 in pieces over 64 files 17 MB.
Parsing takes up to 30 times as much memory."""


def read_file(
    storage: Storage,
    file: str,
    subject: str,
    *,
    most_bytes: int = MAX_DOCUMENT_BYTES,
    error: type[FormatError] = FormatError,
) -> bytes:
    """Return the bytes of a small file, read at once.

    Args:
        storage: Where it is.
        file: Its path.
        subject: What the file is called in errors.
        most_bytes: Its largest size; a hostile file may be of any.
        error: The error of a larger one.

    Raises:
        FormatError: It is larger.
        CheckpointNotFoundError: There is no such file.
        StorageError: The read failed.
    """
    size = storage.size(file)
    error.check_size(subject, size, most_bytes, file=file)
    return read_range(storage, file, 0, size)


def read_range(storage: RangeReader, file: str, start: int, size: int) -> bytes:
    """Return `size` bytes of a file from byte `start` on.

    Raises:
        StorageError: The read failed.
    """
    data = bytearray(size)
    if size:
        storage.read_into(file, start, [memoryview(data)])
    return bytes(data)


def join(folder: str, name: str) -> str:
    """`folder/name` for any kind of storage."""
    return f"{folder.rstrip('/')}/{name}" if folder != "/" else f"/{name}"
