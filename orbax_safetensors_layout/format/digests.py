"""`orbax_safetensors_layout.digests.json`: a checksum of every file of a checkpoint."""

from __future__ import annotations

import functools
import json
import re
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .index import check_file_name
from .schema import Schema, short_repr
from .strict_json import parse_object

DIGESTS = "orbax_safetensors_layout.digests.json"

_VERSION_KEY, _VERSION = "orbax_safetensors_layout_digests", 1
_ALGORITHM = "crc32"  # that of ranges gives that of the file; it detects damage, not forgery
_POLYNOMIAL = 0xEDB88320
_UNIT = 1 << 31  # the polynomial 1: CRC-32 has its bits in reverse
_HEX = re.compile(r"[0-9a-f]{8}")


ByteRange: TypeAlias = tuple[str, int, int, int]
"""File, first byte, bytes and their CRC-32."""


class RangeChecksums:
    """Collects the CRC-32 of ranges of files that threads read or write, in any order."""

    def __init__(self) -> None:
        self._ranges: list[ByteRange] = []
        self._lock = threading.Lock()

    def add(
        self, file: str, offset: int, buffers: Sequence[memoryview | npt.NDArray[np.uint8]]
    ) -> None:
        """Takes the bytes of a range, which begins at byte `offset`."""
        value = length = 0
        for buffer in buffers:
            value = zlib.crc32(cast(memoryview, buffer), value)  # releases the GIL
            length += buffer.nbytes
        if length:
            with self._lock:
                self._ranges.append((file, offset, length, value))

    def take(self) -> list[ByteRange]:
        """Return the ranges since the last call."""
        with self._lock:
            ranges, self._ranges = self._ranges, []
        return ranges


def ranges_by_file(ranges: Iterable[ByteRange]) -> dict[str, list[tuple[int, int, int]]]:
    """Return (first byte, bytes, CRC-32) of the ranges of each file."""
    by_file: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for file, *part in ranges:
        by_file[file].append((part[0], part[1], part[2]))
    return by_file


def join_crc32(ranges: Iterable[tuple[int, int, int]], size: int) -> int:
    """Return the CRC-32 of a file of `size` bytes from (first byte, bytes, CRC-32) of ranges."""
    joined = at = 0
    for start, length, value in sorted(ranges):
        if start != at:
            raise ValueError(f"the ranges do not tile the file: one begins at {start}, not {at}")
        joined = _times(_shift(length), joined) ^ value
        at += length
    if at != size:
        raise ValueError(f"the ranges end at {at} of {size} bytes")
    return joined


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo CRC-32's, as zlib's `multmodp`."""
    product, bit = 0, _UNIT
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@functools.lru_cache(4096)  # nearly all ranges are of few sizes
def _shift(length: int) -> int:
    """Return the factor of a CRC-32 before `length` more bytes: x to the 8 * length."""
    power, square, bits = _UNIT, _UNIT >> 1, 8 * length
    while bits:
        if bits & 1:
            power = _times(square, power)
        square = _times(square, square)
        bits >>= 1
    return power


def dump_digests(files: Mapping[str, int]) -> bytes:
    """Return the file's bytes; the same for the same digests."""
    digests = {name: f"{files[name]:08x}" for name in sorted(files)}
    document = {_VERSION_KEY: _VERSION, "algorithm": _ALGORITHM, "files": digests}
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def parse_digests(data: bytes, *, file: str) -> dict[str, int]:
    """Return the CRC-32 of each file, from the bytes of `file`."""
    schema = Schema(file)
    with schema.parsing("the list of checksums"):
        document = parse_object(data.decode())
    version = (document.get(_VERSION_KEY), document.get("algorithm"))
    if version != (_VERSION, _ALGORITHM):
        schema.raise_error(
            "digests of another version", (_VERSION, _ALGORITHM), short_repr(version)
        )
    digests = schema.members(document.get("files"), "files")
    for name, digest in digests.items():
        check_file_name(name, schema, end="")
        if not isinstance(digest, str) or not _HEX.fullmatch(digest):
            schema.raise_error("malformed digest", "8 hexadecimal digits", short_repr(digest))
    return {name: int(str(digest), 16) for name, digest in digests.items()}
