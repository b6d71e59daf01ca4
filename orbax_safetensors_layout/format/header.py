"""The header of a `.safetensors` file, parsed into types; all validation of it.

A file is an 8-byte little-endian length N, N bytes of JSON, and the tensors' bytes. Headers are
accepted that the `safetensors` Rust library 0.8.0 accepts (`test_format_differential.py` compares
the two), except that no key may be repeated, that the JSON must begin with `{` at once, as the
format's specification asks, and that a value other than a string may not be of any length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple, NoReturn, TypeAlias

from orbax_safetensors_layout.errors import FormatError, InvalidHeaderError, TruncatedFileError

from . import strict_json
from .dtypes import DType, dtype_from_code
from .schema import Schema, short_repr

OnError: TypeAlias = Callable[[FormatError], object]
"""Called for each error; returning continues the scan."""

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_METADATA_KEY = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_FIELD_SET = set(_FIELDS)
_LONGEST_ENTRY = 8192  # characters; that of a shape of 64 dimensions has about 1,400
_USIZE_MAX = (1 << 64) - 1
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
        self._look_closely = False
        self._is_complete = True
        self._tensors: list[TensorEntry] = []
        self._metadata: dict[str, str] | None = None
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for equal shapes

    def parse(self, file_size: int) -> Header:
        if not self._header_bytes.startswith(b"{"):
            found = repr(self._header_bytes[:16])
            self._schema.raise_error("the header does not begin with an object", "'{'", found)
        self._parse_members(self._header_bytes.decode())
        tensors = self._tensors
        tensors.sort(key=attrgetter("start", "stop"))
        by_name = {entry.name: entry for entry in tensors}
        if len(by_name) != len(tensors):
            counts = Counter(entry.name for entry in tensors)
            for repeated in (name for name, count in counts.items() if count > 1):
                self._on_error(self._repeated(repeated))
        for misplaced in self._misplaced(file_size):
            self._on_error(misplaced)
        return Header(by_name, self._metadata or {})

    def _parse_members(self, text: str) -> None:
        self._look_closely = strict_json.has_surrogate_escape(text)
        name: str | None = None
        try:
            for outer, name, value in strict_json.members(
                text, (_METADATA_KEY,), _LONGEST_ENTRY, may_repeat=True
            ):
                if self._look_closely:
                    strict_json.refuse_lone_surrogate(name)
                try:
                    if outer is None and name != _METADATA_KEY:
                        self._tensors.append(self._entry(name, value))
                    else:
                        self._add_metadata(outer, name, value)
                except FormatError as problem:
                    self._on_error(problem)
                    self._is_complete = False
        except strict_json.JsonError as error:
            if name is None:
                raise
            raise strict_json.JsonError(f"{error}, in or after {name!r}") from error

    def _add_metadata(self, outer: str | None, key: str, value: object) -> None:
        """Begins with the whole object, null or empty, which its members follow."""
        if outer is None and self._metadata is not None:
            raise self._repeated(_METADATA_KEY)
        if self._metadata is None:
            self._metadata = {}
        if outer is not None and isinstance(value, str):
            strict_json.refuse_lone_surrogate(value)
            self._metadata[key] = value
        elif outer is not None or not (value is None or type(value) is tuple):
            found = short_repr(value if outer is None else {key: value})
            self._schema.raise_error(f"malformed {_METADATA_KEY}", "an object of strings", found)

    def _repeated(self, name: str) -> FormatError:
        return self._schema.error("a name is repeated", "each name once", "it twice", name)

    def _entry(self, name: str, value: object) -> TensorEntry:
        schema, data_start = self._schema, self._data_start
        code, raw_shape, raw_offsets = self._fields(name, value)
        dtype = dtype_from_code(code, file=schema.file, tensor=name)
        shape = self._sizes(name, "shape", raw_shape)
        offsets = self._sizes(name, "data_offsets", raw_offsets)
        if len(offsets) != 2:
            expected = "two integers, begin and end"
            schema.raise_error("malformed data_offsets", expected, short_repr(offsets), name)
        begin, end = offsets
        needed = self._needed_bytes(name, dtype, shape)
        if end - begin != needed:
            schema.raise_error(
                "data_offsets do not fit the shape and dtype",
                f"{needed} bytes for {dtype.code}{short_repr(shape)}",
                f"{end - begin} bytes, data_offsets {offsets}",
                name,
            )
        key = tuple(shape)
        shared = self._shapes.setdefault(key, key)
        return TensorEntry(name, dtype, shared, schema.file, data_start + begin, data_start + end)

    def _fields(self, name: str, value: object) -> tuple[str, object, object]:
        """Return the code, shape and offsets of a tensor; the last two are not checked."""
        # No writer adds a key, and most keep this order; then no dict is made.
        if type(value) is tuple and len(value) == len(_FIELDS) and not self._look_closely:
            (key_0, code), (key_1, shape), (key_2, offsets) = value
            if (key_0, key_1, key_2) == _FIELDS and type(code) is str:
                return code, shape, offsets
            if {key_0, key_1, key_2} == _FIELD_SET and type(dict(value)["dtype"]) is str:
                code, shape, offsets = map(dict(value).__getitem__, _FIELDS)
                return code, shape, offsets
        # Additional keys, a list of the three values, a dtype `{"F32": null}`: as serde reads them.
        value = strict_json.plain(value)
        if isinstance(value, list) and len(value) == len(_FIELDS):
            code, shape, offsets = value
        elif isinstance(value, dict) and all(field in value for field in _FIELDS):
            code, shape, offsets = (value[field] for field in _FIELDS)
        else:
            keys = f"the keys {short_repr([*value])}" if isinstance(value, dict) else None
            found = keys or short_repr(value)
            expected = f"an object with the keys {', '.join(_FIELDS)}"
            self._schema.raise_error("malformed tensor entry", expected, found, name)
        if isinstance(code, dict) and [*code.values()] == [None]:
            (code,) = code
        if not isinstance(code, str):
            self._schema.raise_error("malformed dtype", "a string", short_repr(code), name)
        return code, shape, offsets

    def _sizes(self, name: str, field: str, items: object) -> list[int]:
        """Return `items` if it is a list of integers in the range of Rust's usize."""
        if type(items) is list:
            for item in items:
                if type(item) is not int or not 0 <= item <= _USIZE_MAX:
                    break
            else:
                return items
        expected = "a list of integers from 0 to 2**64 - 1"
        self._schema.raise_error(f"malformed {field}", expected, short_repr(items), name)

    def _needed_bytes(self, name: str, dtype: DType, shape: list[int]) -> int:
        """Return the bytes of a tensor, unless Rust's 64-bit arithmetic would overflow."""
        size = 1
        for dimension in shape:
            size *= dimension
            if size > _USIZE_MAX:  # also where a later dimension is zero
                break
        bits = size * dtype.bits
        if bits > _USIZE_MAX:
            problem, expected = "the tensor's size overflows", "fewer than 2**64 bits"
        elif bits % 8:
            problem, expected = "the tensor does not fill whole bytes", "a multiple of 8 bits"
        else:
            return bits // 8
        found = f"{bits} bits, shape {short_repr(shape)} of {dtype.code}"
        self._schema.raise_error(problem, expected, found, name)

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
            position = max(position, entry.stop)
        if position > file_size:
            cut = next(entry.name for entry in self._tensors if entry.stop > file_size)
            schema = Schema(self._schema.file, TruncatedFileError)
            problem = "the file is truncated: it ends before its tensors do"
            yield schema.error(problem, f"{position} bytes", f"{file_size} bytes", cut)
        if position < file_size and self._is_complete:
            problem = "the file goes on after its last tensor"
            yield self._schema.error(problem, f"{position} bytes", f"{file_size} bytes")
