"""Versions of a model, published as differences: what an index says of one, and encoded tensors.

The format is that of slime and SGLang (THUDM/slime at 06236d02: `update_weight_from_disk_delta.py`,
`disk_delta.py`; sgl-project/sglang#30366): docs/publishing.md describes it.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import (
    FormatError,
    InvalidIndexError,
    SafetensorsLayoutError,
)

from .header import TensorEntry
from .schema import Schema, short_repr

HISTORY = "history"  # in the metadata of a whole version's index: like no other's
_BASE_HISTORY = "base_history"  # in that of differences: the identity of the version before
ENCODING = "delta_encoding"  # the member of an index's metadata that marks differences
CHECKSUM = "xxh3-128"  # what is written; all of `_LIBRARIES` are read
_LEVEL = 1
_LIBRARIES = {"xxh3-128": "xxhash", "blake3": "blake3", "adler32": "zlib"}  # of checksums
_ENCODINGS = ("xor", "overwrite")
_FOLDER = re.compile(r"weight_v([0-9]{6,18})", re.A)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.A)
_NUMBER = re.compile(r"[0-9]{1,18}", re.A)


def version_text(number: int) -> str:
    """Return the number of a version as indexes have it."""
    return f"{number:06d}"


def version_folder(number: int) -> str:
    """Return the name of a version's folder."""
    return f"weight_v{version_text(number)}"


def folder_version(name: str) -> int | None:
    """Return the number of the version whose folder has a name; None for other folders."""
    match = _FOLDER.fullmatch(name)
    number = int(match[1]) if match else 0
    return number if number and version_folder(number) == name else None


class DifferenceFormat(NamedTuple):
    """A version that holds differences, as its index describes it."""

    base: int  # the version before it, to which it is different; 0 is the model as it was published
    encoding: str
    checksum: str  # kind of the checksums
    base_history: str | None = (
        None  # identity of the version before; None in other programs' versions
    )

    @classmethod
    def parse(
        cls, metadata: Mapping[str, object], *, number: int, file: str
    ) -> DifferenceFormat | None:
        """Return the format of version `number`, by its index's metadata; None of a whole one."""
        schema = Schema(file, InvalidIndexError)
        given = metadata.get("version", version_text(number))
        if parse_version(given) != number:
            problem = "the index is that of another version"
            schema.raise_error(problem, f"version {version_text(number)}", short_repr(given))
        if ENCODING not in metadata and "base_version" not in metadata:
            return None
        base = parse_version(metadata.get("base_version"))
        if base is None or base >= number:
            expected = f"a number below {number}"
            found = short_repr(metadata.get("base_version"))
            schema.raise_error("malformed base_version", expected, found)
        for name, known in (
            (ENCODING, _ENCODINGS),
            ("compression_format", ("zstd",)),
            ("checksum_format", tuple(_LIBRARIES)),
        ):
            if metadata.get(name) not in known:
                found = short_repr(metadata.get(name))
                schema.raise_error(f"unknown {name}", f"one of {', '.join(known)}", found)
        history = metadata.get(_BASE_HISTORY)
        if history is not None and not (isinstance(history, str) and _DIGEST.fullmatch(history)):
            schema.raise_error(f"malformed {_BASE_HISTORY}", "64 digits", short_repr(history))
        return cls(base, str(metadata[ENCODING]), str(metadata["checksum_format"]), history)

    def metadata(self, number: int) -> dict[str, str]:
        """Return the metadata of the index of version `number`."""
        history = {} if self.base_history is None else {_BASE_HISTORY: self.base_history}
        return {
            "version": version_text(number),
            "base_version": version_text(self.base),
            **history,
            ENCODING: self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum,
        }


def parse_version(value: object) -> int | None:
    """Return the number of a version as an index has it; None of anything else."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    return value if type(value) is int and value >= 0 else None


def encoded_difference(old: np.ndarray, new: np.ndarray) -> bytes | None:
    """Return the XOR of two arrays of as many bytes, compressed; None if they are equal."""
    if np.array_equal(old, new):
        return None
    compressor = _library("zstandard").ZstdCompressor(level=_LEVEL)
    return bytes(compressor.compress(np.bitwise_xor(old, new)))


def apply_difference(values: np.ndarray, data: bytes, encoding: str, entry: TensorEntry) -> None:
    """Changes a tensor's bytes in place, by an encoded difference, which `entry` stores."""
    zstandard = _library("zstandard")
    is_xor = encoding == "xor"
    most = values.size if is_xor else 4 + 5 * values.size
    try:
        if (size := zstandard.frame_content_size(data)) > most:
            raise _malformed(entry, f"at most {most} bytes", f"{size}")
        decompressor = zstandard.ZstdDecompressor()
        raw = decompressor.decompress(data, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _malformed(entry, "one zstd frame", str(error)) from error
    difference = np.frombuffer(raw, np.uint8)
    if is_xor:
        if difference.size != values.size:
            raise _malformed(entry, f"{values.size} bytes", f"{difference.size}")
        np.bitwise_xor(values, difference, out=values)
        return
    count = int(difference[:4].view("<u4")[0]) if difference.size >= 4 else -1
    if difference.size != 4 + 5 * count:
        raise _malformed(entry, "a count, positions and values", f"{difference.size} bytes")
    positions = difference[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= values.size:
        raise _malformed(entry, f"positions below {values.size}", str(positions.max()))
    values[positions] = difference[4 + 4 * count :]


def checksum(kind: str, values: np.ndarray) -> str:
    """Return the checksum of an array of bytes, in hexadecimal digits."""
    if kind == "adler32":
        return f"{zlib.adler32(values.data):08x}"
    library = _library(_LIBRARIES[kind])
    if kind == "blake3":
        return str(library.blake3(values.data).hexdigest())
    return str(library.xxh3_128_hexdigest(values.data))


def _malformed(entry: TensorEntry, expected: str, found: str) -> FormatError:
    return FormatError(
        "malformed difference",
        file=entry.file,
        tensor=entry.name,
        expected=expected,
        found=found,
        hint="Publish this version again, or take another one.",
    )


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SafetensorsLayoutError(
            f"published versions need the package {name}", hint=f"pip install {name}"
        ) from error
