"""The storage protocol: sizes, listings and exact ranged reads of immutable files."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.errors import CheckpointNotFoundError, FormatError, StorageError
from orbax_safetensors_layout.format import LFS_HINT, LFS_POINTER
from orbax_safetensors_layout.options import KIB

Buffer: TypeAlias = memoryview  # of bytes, writable and contiguous
ByteBuffer: TypeAlias = "memoryview | npt.NDArray[np.uint8]"  # contiguous bytes to be written

FIRST_READ_BYTES = 256 * KIB
"""Read of a file first, or along with its size: the header of about 2,000 tensors, which at
100 MB/s costs less than one more request."""

Rank: TypeAlias = "Callable[[str], int | None]"
"""Rank in which a checkpoint's file of a name appears; None for other files.

Names of files in folders are paths. A folder's own name, which ends with "/", has a rank, any, if
such a file may be in it.
"""


class Notes(Protocol):
    """Short texts by name, which one process leaves for the next; any may be lost."""

    def get(self, name: str) -> str | None:
        """Return a text."""

    def set(self, name: str, text: str) -> None:
        """Leaves a text."""


class FileWriter(Protocol):
    """A new file of known size that appears under its name only when it is complete."""

    @abc.abstractmethod
    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        """Writes `buffers` from byte `offset` on; calls of all threads together tile the file."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Makes the file durable, if it was asked to be, and visible under its name."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Drops the file, as far as possible. Never raises; does nothing when finished."""


class NewFolder(Protocol):
    """Makes the files of a save, written to `folder`, appear at `target`: together if it can.

    The methods are for one process; the others only write, and `send` where the target's storage
    `uploads`.
    """

    target: str
    folder: str
    storage: Storage  # that has `folder`

    def begin(self) -> None:
        """Claims the target, and recovers a folder that a crashed save left beside it."""
        return

    def prepare(self) -> None:
        """Makes `folder` ready to be written to, if the target can be replaced."""

    def send(self, process_index: int, process_count: int) -> None:
        """Brings a process's share of the complete files near their place; all processes do."""
        return

    def commit(self) -> None:
        """Puts the complete files in their place."""

    def end(self) -> None:
        """Removes what was not committed, as far as possible, and gives up the claim."""


class RangeReader(Protocol):
    """Exact ranged reads of files by name, from many threads."""

    kind: str  # the storage class; its cost model is a row of `options.PROFILES`, or a local disk's

    @abc.abstractmethod
    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        """Fills `buffers`, one after the other, from the bytes of `file` that begin at `offset`.

        Other processes of this host may read the same range if it is `shared`, so let caches keep
        it. A file that ends too soon is a `TruncatedFileError`; a `StorageError` names the range.
        """

    @abc.abstractmethod
    def check_unchanged(self, file: str) -> None:
        """Raises an error if a file has changed since it was first opened."""

    def interrupt(self) -> None:
        """Ends pauses between attempts for good, from any thread; requests in flight may end."""
        return


class Storage(RangeReader, Protocol):
    """Ranged access to files by name, from many threads; bad access raises `StorageError`.

    A storage pins what it has seen: a file that is replaced, or changes its size, between two
    reads through one storage object is an error, never a mixture of two versions. A storage for
    reading alone leaves the methods that write as they are.
    """

    lists: bool  # or else `list` gives only well-known files of a folder
    uploads: bool = False  # new folders are local ones, and sent when they are complete
    appends: bool = False  # files grow from the first byte to the last; bytes wait for their turn
    save_hint: str = "Save to a local folder, and upload that."

    @abc.abstractmethod
    def size(self, file: str) -> int:
        """Return the size of `file` in bytes; `CheckpointNotFoundError` if it does not exist."""

    def is_file(self, path: str) -> bool:
        try:
            self.size(path)
        except CheckpointNotFoundError:
            return False
        return True

    @abc.abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the sorted names of folders directly in `folder`, if they can be listed."""

    @abc.abstractmethod
    def list(self, folder: str) -> list[str]:
        """Return the sorted names of files directly in `folder`, which need not exist."""

    def is_link(self, path: str) -> bool:
        """Whether a path is a symbolic link, where there are such."""
        return False

    def existing(self, folder: str, names: Collection[str]) -> set[str]:
        """Return those of some names that are files in `folder`, well-known or not.

        Names of files in folders there are paths.
        """
        folders = {name.rpartition("/")[0] for name in names}
        listed = {inner: self.list(join(folder, inner) if inner else folder) for inner in folders}
        parts = {name: name.rpartition("/") for name in names}
        return {name for name, (inner, _, last) in parts.items() if last in listed[inner]}

    @abc.abstractmethod
    def modified_seconds(self, file: str) -> float:
        """Return when `file` was last written, in seconds since the epoch."""

    def version(self, file: str) -> str | None:
        """Return what is known of the version of the pinned content, the same on every host.

        It may be weak, as a date is; None if nothing is known that hosts have in common.
        """
        return None

    def content_key(self, file: str) -> str | None:
        """Return a name of the content that is pinned, without credentials; None if it has none.

        No other content has it, of this file at another time or of any other file.
        """
        return None

    def identity(self, file: str) -> str:
        """Return what tells the content from others in its place, as far as that is known."""
        seen = self.content_key(file)
        return seen or f"{self.size(file):,} bytes of {self.modified_seconds(file)}"

    def remember(self, notes: Notes) -> None:
        """Takes notes of the versions of files, for a storage that can ask whether they changed."""
        return

    def create(self, file: str, size: int, *, durable: bool) -> FileWriter:
        """Begins a file that replaces another when finished, and survives a crash if `durable`."""
        self._raise_error(file)

    def make_folder(self, folder: str) -> None:
        """Makes a folder and its missing parents."""
        self._raise_error(folder)

    def flush_folder(self, folder: str) -> None:
        """Makes the names in a folder durable."""
        return

    def check_written(self, folder: str) -> None:
        """Raises if files below a folder are not those written through this storage."""
        return

    def new_folder(
        self, target: str, *, overwrite: bool, rank: Rank, scratch: Sequence[str]
    ) -> NewFolder:
        """Return how a save appears at the folder `target`, or with `overwrite` replaces it.

        `rank` says which names in it belong to a checkpoint; only a save uses those in `scratch`.
        """
        self._raise_error(target)

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that is in it, if it exists."""
        self._raise_error(path)

    def _raise_error(self, path: str) -> NoReturn:
        problem = f"{self.kind}:// paths cannot be written to"
        raise StorageError(problem, file=path, hint=self.save_hint)

    def forget(self, file: str) -> bool:
        """Drops what a cache holds of a file whose bytes turned out wrong; whether it held any."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Closes all files and connections; the object may not be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """Return a small file, called `subject` in the `error` of one that is large, or a pointer."""
    size = storage.size(file)
    error.check_size(subject, size, most_bytes, file=file)
    data = read_range(storage, file, 0, size)
    if data.startswith(LFS_POINTER):
        raise error(f"{subject} is not there itself", file=file, hint=LFS_HINT)
    return data


def read_range(storage: RangeReader, file: str, start: int, size: int) -> bytes:
    """Return `size` bytes of a file from byte `start` on."""
    data = bytearray(size)
    if size:
        storage.read_into(file, start, [memoryview(data)])
    return bytes(data)


@contextlib.contextmanager
def new_file(storage: Storage, file: str, size: int, *, durable: bool) -> Iterator[FileWriter]:
    """Yields a new file, which is finished by the end of the block, or dropped if that fails."""
    writer = storage.create(file, size, durable=durable)
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def write_file(storage: Storage, file: str, data: bytes, *, durable: bool) -> None:
    """Writes a small file, which appears complete."""
    with new_file(storage, file, len(data), durable=durable) as writer:
        writer.write_at(0, [memoryview(data)])


def join(folder: str, name: str) -> str:
    """Return `folder/name` for any kind of storage."""
    return f"{folder.rstrip('/')}/{name}"
