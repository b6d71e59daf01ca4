"""Checksums of files while they are read, held against those that were recorded."""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from orbax_safetensors_layout.errors import (
    FormatError,
    InvalidManifestError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.format import DIGESTS, SUFFIX, join_crc32, parse_digests
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.storage import Buffer, RangeReader, Storage, join, read_file

_BLOCK_BYTES = 8 * MIB


class VerifyingReader:
    """Reads as a storage does, and works out the CRC-32 of what it reads, on the same threads.

    Of the checkpoint whose folder, or one of whose files, is at `path`.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        folder = path.rpartition("/")[0] if storage.is_file(path) else path.rstrip("/")
        digests = read_digests(storage, folder)
        if digests is None:
            raise SafetensorsLayoutError(
                "the checkpoint has no checksums that what is read could be held against",
                file=folder,
                expected=DIGESTS,
                hint="Save with WriteOptions(digests=True), or load without verify=True.",
            )
        self.kind = storage.kind
        self._storage = storage
        self._folder = folder
        self._digests = digests  # CRC-32 of each file, by its name in the folder
        self._ranges: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._lock = threading.Lock()

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        self._storage.read_into(file, offset, buffers, shared=shared)
        value = length = 0
        for buffer in buffers:
            value = zlib.crc32(buffer, value)  # releases the GIL
            length += len(buffer)
        if length:
            with self._lock:
                self._ranges[file].append((offset, length, value))

    def check_unchanged(self, file: str) -> None:
        self._storage.check_unchanged(file)

    def interrupt(self) -> None:
        self._storage.interrupt()

    def check(self) -> None:
        """Holds every file that was read, and the small ones, against their checksums.

        What was not read of them is read.
        """
        small = [join(self._folder, n) for n in self._digests if not n.endswith(SUFFIX)]
        files = sorted({*self._ranges, *small})
        names = {file: file.removeprefix(f"{self._folder}/") for file in files}
        unknown = [name for name in names.values() if name not in self._digests]
        if unknown:
            raise SafetensorsLayoutError(
                f"files have no checksum: {', '.join(unknown[:10])}",
                file=join(self._folder, DIGESTS),
                hint="They were added after the save; load without verify=True.",
            )
        damaged = []
        for file, name in names.items():
            found, expected = self._crc32(file), self._digests[name]
            if found != expected:
                damaged.append(f"{name} (CRC-32 {found:08x}, saved with {expected:08x})")
        if damaged:
            raise FormatError(
                f"files are not what was saved: {', '.join(damaged[:10])}",
                file=self._folder,
                hint="Load another checkpoint; `osl.verify` lists all that is wrong with this one.",
            )

    def _crc32(self, file: str) -> int:
        """The CRC-32 of a file from what was read of it, and from reading the rest."""
        size = self._storage.size(file)
        ranges: list[tuple[int, int, int]] = []
        at = 0
        for start, length, value in [*sorted(self._ranges[file]), (size, 0, 0)]:
            if start < at:
                continue  # read twice
            ranges += file_ranges(self._storage, file, at, start)
            ranges.append((start, length, value))
            at = start + length
        return join_crc32(ranges, size)


def read_digests(storage: Storage, folder: str) -> dict[str, int] | None:
    """The checksums that a save has left in a folder, if it has."""
    if DIGESTS not in storage.list(folder):
        return None
    file = join(folder, DIGESTS)
    data = read_file(storage, file, "the list of checksums", error=InvalidManifestError)
    return parse_digests(data, file=file)


def file_ranges(
    reader: RangeReader, file: str, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Reads a part of a file in blocks; gives (first byte, bytes, CRC-32) of each."""
    memory = memoryview(bytearray(min(stop - start, _BLOCK_BYTES)))
    for at in range(start, stop, _BLOCK_BYTES):
        block = memory[: min(_BLOCK_BYTES, stop - at)]
        reader.read_into(file, at, [block])
        yield at, len(block), zlib.crc32(block)
