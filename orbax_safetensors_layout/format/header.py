"""The header of a `.safetensors` file, parsed into types; all validation of it.

A file is an 8-byte little-endian length N, N bytes of JSON, and the tensors' bytes, which the
tensors tile. What programs write is accepted where the `safetensors` library accepts it
(`test_format_differential.py` compares the two); in addition no key may be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple, NoReturn, TypeAlias

from orbax_safetensors_layout.errors import FormatError, InvalidHeaderError, TruncatedFileError

from .dtypes import DTYPES, DType, dtype_from_code
from .schema import Schema, short_repr
from .strict_json import parse_object

OnError: TypeAlias = Callable[[FormatError], object]
"""Called for each error; returning continues the scan."""

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_METADATA_KEY = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LFS_HINT = "It is a Git LFS pointer; run `git lfs pull`."
_OTHERS = {
    LFS_POINTER[:PREFIX_BYTES]: LFS_HINT,
    b"PK\x03\x04": "It begins as files of torch.save do: torch's DCP writes numbers and the like"
    " so. Save tensors alone.",
    b"<": "It looks like a web page, which a server gave in its place.",
}
"""Hints by the beginnings of files that are taken for safetensors."""


def raise_error(error: FormatError) -> NoReturn:
    """Raises an error: nothing more is scanned."""
    raise error


class TensorEntry(NamedTuple):
    """A tensor in a file: the place and the type of its bytes. There may be 100,000 of them."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # in logical elements, also where `dtype.packed`
    file: str
    start: int  # first byte, counted from the beginning of the file
    stop: int  # one past the last byte

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Header(NamedTuple):
    """A validated header: its tensors tile the file's data exactly."""

    tensors: dict[str, TensorEntry]  # in the order of the file's bytes
    metadata: dict[str, str]  # the `__metadata__` strings


def header_length(prefix: bytes, *, file: str, file_size: int) -> int:
    """Return the length of the header in bytes, from the first 8 bytes of a file."""
    schema = Schema(file, TruncatedFileError)
    if len(prefix) < PREFIX_BYTES or file_size < PREFIX_BYTES:
        problem = "the file is truncated: it ends within the length of its header"
        found = f"{min(len(prefix), file_size)} bytes"
        schema.raise_error(problem, f"at least {PREFIX_BYTES} bytes", found)
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidHeaderError(
            "the header's length is out of range, so this is not a safetensors file",
            file=file,
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=f"{length} bytes",
            hint=next((_OTHERS[begin] for begin in _OTHERS if prefix.startswith(begin)), None),
        )
    if PREFIX_BYTES + length > file_size:
        expected = f"at least {PREFIX_BYTES + length} bytes"
        problem = "the file is truncated: it ends within its header"
        schema.raise_error(problem, expected, f"{file_size} bytes")
    return length


def parse_header(
    header_bytes: bytes, *, file: str, file_size: int, on_error: OnError = raise_error
) -> Header:
    """Parses a header without its length; `on_error` is called for errors of single tensors."""
    schema = Schema(file, InvalidHeaderError)
    with schema.parsing("the header"):
        return _HeaderParser(schema, header_bytes, on_error).parse(file_size)


class _HeaderParser:
    def __init__(self, schema: Schema, header_bytes: bytes, on_error: OnError) -> None:
        self._schema = schema
        self._header_bytes = header_bytes
        self._on_error = on_error
        self._data_start = PREFIX_BYTES + len(header_bytes)
        self._is_complete = True
        self._tensors: list[TensorEntry] = []
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for equal shapes

    def parse(self, file_size: int) -> Header:
        if not self._header_bytes.startswith(b"{"):
            found = repr(self._header_bytes[:16])
            self._schema.raise_error("the header does not begin with an object", "'{'", found)
        document = parse_object(self._header_bytes.decode())
        metadata = self._metadata(document.pop(_METADATA_KEY, None))
        for name, value in document.items():
            try:
                self._tensors.append(self._entry(name, value))
            except FormatError as problem:
                self._on_error(problem)
                self._is_complete = False
        self._tensors.sort(key=attrgetter("start", "stop"))
        for misplaced in self._misplaced(file_size):
            self._on_error(misplaced)
        return Header({entry.name: entry for entry in self._tensors}, metadata)

    def _metadata(self, value: object) -> dict[str, str]:
        if value is None:
            return {}
        if type(value) is dict and all(type(text) is str for text in value.values()):
            return value
        problem = f"malformed {_METADATA_KEY}"
        self._on_error(self._schema.error(problem, "an object of strings", short_repr(value)))
        return {}

    def _entry(self, name: str, value: object) -> TensorEntry:
        schema, data_start = self._schema, self._data_start
        if type(value) is not dict or not value.keys() >= _FIELDS:
            keys = f"the keys {short_repr([*value])}" if isinstance(value, dict) else None
            expected = "an object with the keys dtype, shape, data_offsets"
            schema.raise_error("malformed tensor entry", expected, keys or short_repr(value), name)
        code = value["dtype"]
        if type(code) is not str:
            schema.raise_error("malformed dtype", "a string", short_repr(code), name)
        dtype = DTYPES.get(code) or dtype_from_code(code, file=schema.file, tensor=name)
        shape = self._shape(name, value["shape"])
        offsets = value["data_offsets"]
        if type(offsets) is not list or [*map(type, offsets)] != [int, int] or offsets[0] < 0:
            expected = "two integers, begin and end"
            schema.raise_error("malformed data_offsets", expected, short_repr(offsets), name)
        begin, end = offsets
        bits = math.prod(shape) * dtype.bits
        if bits % 8:
            found = f"{bits} bits, shape {short_repr(shape)} of {code}"
            problem = "the tensor does not fill whole bytes"
            schema.raise_error(problem, "a multiple of 8 bits", found, name)
        if 8 * (end - begin) != bits:
            schema.raise_error(
                "data_offsets do not fit the shape and dtype",
                f"{bits // 8} bytes for {code}{short_repr(shape)}",
                f"{end - begin} bytes, data_offsets {offsets}",
                name,
            )
        key = tuple(shape)
        shared = self._shapes.setdefault(key, key)
        return TensorEntry(name, dtype, shared, schema.file, data_start + begin, data_start + end)

    def _shape(self, name: str, items: object) -> list[int]:
        """Return `items` if it is a list of integers that are not negative."""
        if type(items) is list:
            for item in items:
                if type(item) is not int or item < 0:
                    break
            else:
                return items
        expected = "a list of integers that are not negative"
        self._schema.raise_error("malformed shape", expected, short_repr(items), name)

    def _misplaced(self, file_size: int) -> Iterator[FormatError]:
        """Yields errors where the tensors do not cover the data; gaps only if none was left out."""
        position = self._data_start
        for entry in self._tensors:
            if entry.start < position or (self._is_complete and entry.start > position):
                doing = "leaves a gap after" if entry.start > position else "overlaps"
                yield self._schema.error(
                    f"the tensor {doing} the one before it",
                    f"data_offsets that begin at {position - self._data_start}",
                    f"{entry.start - self._data_start}",
                    entry.name,
                )
            if entry.stop > position:
                position = entry.stop
        if position > file_size:
            cut = next(entry.name for entry in self._tensors if entry.stop > file_size)
            schema = Schema(self._schema.file, TruncatedFileError)
            problem = "the file is truncated: it ends before its tensors do"
            yield schema.error(problem, f"{position} bytes", f"{file_size} bytes", cut)
        if position < file_size and self._is_complete:
            problem = "the file goes on after its last tensor"
            yield self._schema.error(problem, f"{position} bytes", f"{file_size} bytes")
