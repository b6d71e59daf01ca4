"""Files of this machine that are written in place, by several processes, over several runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .base import ByteBuffer
from .local_write import allocate_file, storage_errors, write_fully

FULL = "Free space on the disk and repeat the call; what is written so far is kept."


class ResumableFile:
    """A file of known size under its final name; what is written stays, whatever happens.

    Args:
        file: Its path in a folder that exists. An existing file is continued.
        size: Its size in bytes.

    Raises:
        StorageError: It cannot be created, or the disk has no room for it.
    """

    def __init__(self, file: str, size: int) -> None:
        self.file = file
        with storage_errors(f"can not make room for {size} bytes", file, full=FULL):
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                allocate_file(self._fd, size)
            except BaseException:
                os.close(self._fd)
                raise

    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        """Writes `buffers`, one after the other, from byte `offset` on.

        Raises:
            StorageError: The write failed.
        """
        total = sum(buffer.nbytes for buffer in buffers)
        doing = f"writing bytes [{offset}, {offset + total}) failed"
        with storage_errors(doing, self.file, full=FULL):
            write_fully(self._fd, offset, buffers, total)

    def flush(self) -> None:
        """Waits until all is on the disk.

        Raises:
            StorageError: It cannot be brought there.
        """
        with storage_errors("flushing the file failed", self.file, full=FULL):
            os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
