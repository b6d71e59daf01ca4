"""Checksums of files while they are read, compared with those that were recorded."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self

from absl import logging

from orbax_safetensors_layout.errors import (
    FormatError,
    InvalidManifestError,
    SafetensorsLayoutError,
    listed,
    redact_urls,
)
from orbax_safetensors_layout.format import (
    DIGESTS,
    SUFFIX,
    ByteRange,
    RangeChecksums,
    join_crc32,
    parse_digests,
    ranges_by_file,
)
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.storage import Buffer, RangeReader, Storage, join, read_file

_BLOCK_BYTES = 8 * MIB


class VerifyingReader:
    """Reads as a storage does, and computes the CRC-32 of the bytes on the same threads."""

    def __init__(self, storage: Storage, folder: str, digests: Mapping[str, int]) -> None:
        self.kind = storage.kind
        self.checksums = RangeChecksums()  # of files by their names in the folder
        self._storage = storage
        self._folder = folder
        self._digests = digests

    @classmethod
    def open(cls, storage: Storage, path: str) -> Self | None:
        """Return the reader of a checkpoint, or of one of its files; None without checksums."""
        folder = path.rpartition("/")[0] if storage.is_file(path) else path.rstrip("/")
        digests = read_digests(storage, folder)
        return None if digests is None else cls(storage, folder, digests)

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        self._storage.read_into(file, offset, buffers, shared=shared)
        self.checksums.add(self._name(file), offset, buffers)

    def check_unchanged(self, file: str) -> None:
        self._storage.check_unchanged(file)

    def interrupt(self) -> None:
        self._storage.interrupt()

    def check(
        self,
        ranges: Iterable[ByteRange] = (),
        *,
        files: Iterable[str] = (),
        share: slice = slice(None),
        strict: bool = False,
    ) -> None:
        """Holds files against their checksums: `files`, those that were read, and the small ones.

        Bytes of them that were not read, here or in `ranges`, are read. Each of several processes
        takes a `share` of the files. `strict` refuses files without a checksum.
        """
        read = ranges_by_file([*ranges, *self.checksums.take()])
        small = (name for name in self._digests if not name.endswith(SUFFIX))
        names = sorted({*read, *small, *map(self._name, files)})[share]
        unknown = [name for name in names if name not in self._digests]
        if unknown and strict:
            raise SafetensorsLayoutError(
                f"files have no checksum: {listed(unknown)}",
                file=join(self._folder, DIGESTS),
                hint="They were added after the save; load without verify=True.",
            )
        damaged, cached = [], False
        for name in (name for name in names if name in self._digests):
            file = join(self._folder, name)
            value = file_crc32(self._storage, file, read.get(name, ()))
            if value != self._digests[name]:
                cached |= self._storage.forget(file)
                damaged.append(f"{name} (CRC-32 {value:08x}, saved with {self._digests[name]:08x})")
        if damaged:
            hint = "Take another checkpoint; `osl.verify` lists all that is wrong with this one."
            if cached:
                hint = "What the cache held of them is removed: load once more."
            problem = f"files are not what was saved: {listed(damaged)}"
            raise FormatError(problem, file=self._folder, hint=hint)

    def _name(self, file: str) -> str:
        return file.removeprefix(f"{self._folder}/")


def read_digests(storage: Storage, folder: str) -> dict[str, int] | None:
    """The checksums that a save has left in a folder, if it has."""
    if not storage.existing(folder, [DIGESTS]):
        return None
    file = join(folder, DIGESTS)
    data = read_file(storage, file, "the list of checksums", error=InvalidManifestError)
    if not storage.lists and not data.lstrip().startswith(b"{"):
        logging.warning("%s does not list checksums; left out", redact_urls(file))
        return None
    return parse_digests(data, file=file)


def file_crc32(
    storage: Storage,
    file: str,
    ranges: Iterable[tuple[int, int, int]] = (),
    *,
    report: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Return the CRC-32 of a file from (first byte, bytes, CRC-32) of parts; reads the rest.

    `report` is called with the bytes of each block that was read.
    """
    size = storage.size(file)
    tiles: list[tuple[int, int, int]] = []
    at = 0
    for start, length, value in [*sorted(ranges), (size, 0, 0)]:
        if start < at:
            continue  # read twice
        for begin, block in file_blocks(storage, file, at, start):
            tiles.append((begin, len(block), zlib.crc32(block)))
            report(len(block))
        tiles.append((start, length, value))
        at = start + length
    return join_crc32(tiles, size)


def file_blocks(
    reader: RangeReader, file: str, start: int, stop: int
) -> Iterator[tuple[int, Buffer]]:
    """Reads a part of a file in blocks; yields the first byte of each, and its bytes."""
    memory = memoryview(bytearray(min(stop - start, _BLOCK_BYTES)))
    for at in range(start, stop, _BLOCK_BYTES):
        block = memory[: min(_BLOCK_BYTES, stop - at)]
        reader.read_into(file, at, [block])
        yield at, block
