"""The header of a `.safetensors` file, parsed into types; all validation of it.

A file is an 8-byte little-endian length N, N bytes of JSON, and the tensors' bytes. Headers are
accepted that the `safetensors` Rust library 0.8.0 accepts (`test_format_differential.py` compares
the two), except that no key may be repeated, that the JSON must begin with `{` at once, as the
format's specification asks, and that a value other than a string, so a tensor's entry, may have at
most 8,192 characters: that of a shape of 64 dimensions has about 1,400.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, NoReturn, TypeAlias

from orbax_safetensors_layout.errors import FormatError, InvalidHeaderError, TruncatedFileError

from . import strict_json
from .dtypes import DType, dtype_from_code
from .schema import short_repr

OnError: TypeAlias = Callable[[FormatError], object]
"""Called for each error; returning continues the scan."""

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_METADATA_KEY = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_FIELD_SET = set(_FIELDS)
_LONGEST_ENTRY = 8192  # characters
_USIZE_MAX = (1 << 64) - 1
_GIT_LFS_PREFIX = b"version "


def raise_error(error: FormatError) -> NoReturn:
    """Raises an error: nothing more is scanned."""
    raise error


class TensorEntry(NamedTuple):
    """A tensor in a file: the place and the type of its bytes. There may be 100,000 of them.

    Attributes:
        name: The tensor's name.
        dtype: Its dtype.
        shape: Its shape, in logical elements also where `dtype.packed`.
        file: The file that holds it.
        start: First byte, counted from the beginning of the file.
        stop: One past the last byte.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """A validated header: its tensors tile the file's data without gap or overlap.

    Attributes:
        file: The file.
        tensors: Name to entry, in the order of the file's bytes.
        metadata: The `__metadata__` strings.
        data_start: The file offset, in bytes, where the first tensor begins.
        file_size: Size of the file in bytes.
    """

    file: str
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def header_length(prefix: bytes, *, file: str, file_size: int) -> int:
    """Return the length of the header in bytes, from the first 8 bytes of a file.

    Args:
        prefix: The first 8 bytes, or the whole file if it is shorter.
        file: The file's path, for errors.
        file_size: Size of the file in bytes.

    Raises:
        TruncatedFileError: The file ends before its header does.
        InvalidHeaderError: The length is beyond what the format allows.
    """
    if len(prefix) < PREFIX_BYTES or file_size < PREFIX_BYTES:
        raise TruncatedFileError(
            "the file is truncated: it ends within the length of its header",
            file=file,
            expected=f"at least {PREFIX_BYTES} bytes",
            found=f"{min(len(prefix), file_size)} bytes",
        )
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        is_pointer = prefix.startswith(_GIT_LFS_PREFIX)
        raise InvalidHeaderError(
            "the header's length is out of range, so this is no safetensors file",
            file=file,
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=f"{length} bytes",
            hint="It looks like a Git LFS pointer; run `git lfs pull`." if is_pointer else None,
        )
    if PREFIX_BYTES + length > file_size:
        raise TruncatedFileError(
            "the file is truncated: it ends within its header",
            file=file,
            expected=f"at least {PREFIX_BYTES + length} bytes",
            found=f"{file_size} bytes",
        )
    return length


def parse_header(
    header_bytes: bytes, *, file: str, file_size: int, on_error: OnError = raise_error
) -> Header:
    """Parses and validates a header.

    Args:
        header_bytes: The header without the 8 bytes of its length.
        file: The file's path; kept in each entry.
        file_size: Size of the file in bytes.
        on_error: Called for errors of single tensors; returning leaves them out.

    Raises:
        InvalidHeaderError: The Rust library would not accept it, or it repeats a key, or does not
            begin with `{`.
        UnsupportedDtypeError: A tensor has a dtype that the format does not define.
        TruncatedFileError: The file ends before its last tensor does.

    >>> text = b'{"bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> header = parse_header(text, file="model.safetensors", file_size=8 + len(text) + 8)
    >>> header.tensors["bias"].shape
    (2,)
    """
    try:
        return _parse(header_bytes, file, file_size, on_error)
    except RecursionError as error:  # the caller's own stack was nearly full
        raise InvalidHeaderError("the header is nested too deeply", file=file) from error
    except MemoryError as error:
        raise InvalidHeaderError(
            "the header does not fit into memory", file=file, found=f"{len(header_bytes)} bytes"
        ) from error


def _parse(header_bytes: bytes, file: str, file_size: int, on_error: OnError) -> Header:
    if not header_bytes.startswith(b"{"):
        raise InvalidHeaderError(
            "the header does not begin with an object",
            file=file,
            expected="'{'",
            found=repr(header_bytes[:16]),
        )
    try:
        text = header_bytes.decode()
    except UnicodeDecodeError as error:
        raise InvalidHeaderError(
            "the header is not UTF-8",
            file=file,
            expected="UTF-8 text",
            found=f"{error.reason} at byte {error.start} of the header",
        ) from error
    data_start = PREFIX_BYTES + len(header_bytes)
    metadata: dict[str, str] | None = None
    tensors: list[TensorEntry] = []
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for equal shapes
    look_closely = strict_json.has_surrogate_escape(text)
    name: str | None = None
    is_complete = True
    try:
        for outer, name, value in strict_json.bounded_members(
            text, (_METADATA_KEY,), _LONGEST_ENTRY
        ):
            if look_closely:
                strict_json.refuse_lone_surrogate(name)
            try:
                if outer is not None:
                    assert metadata is not None
                    metadata[name] = _metadata_text(name, value, metadata, file)
                elif name != _METADATA_KEY:
                    tensors.append(_entry(name, value, file, data_start, look_closely, shapes))
                elif metadata is None:
                    metadata = {}
                    _check_metadata(value, file)
                else:
                    raise _repeated(_METADATA_KEY, file)
            except FormatError as problem:
                on_error(problem)
                is_complete = False
    except strict_json.JsonError as error:
        raise InvalidHeaderError(
            "the header is not valid JSON" + ("" if name is None else f", in or after {name!r}"),
            file=file,
            expected="one JSON object",
            found=str(error),
        ) from error
    del text
    tensors.sort(key=attrgetter("start", "stop"))
    by_name = {entry.name: entry for entry in tensors}
    if len(by_name) != len(tensors):
        counts = Counter(entry.name for entry in tensors)
        for repeated in (name for name, count in counts.items() if count > 1):
            on_error(_repeated(repeated, file))
    for misplaced in _misplaced(tensors, file, data_start, file_size, is_complete=is_complete):
        on_error(misplaced)
    return Header(file, by_name, metadata or {}, data_start, file_size)


def _entry(
    name: str,
    value: object,
    file: str,
    data_start: int,
    look_closely: bool,
    shapes: dict[tuple[int, ...], tuple[int, ...]],
) -> TensorEntry:
    code, raw_shape, raw_offsets = _fields(name, value, file, look_closely)
    dtype = dtype_from_code(code, file=file, tensor=name)
    shape = _sizes(name, "shape", raw_shape, file)
    offsets = _sizes(name, "data_offsets", raw_offsets, file)
    if len(offsets) != 2:
        raise InvalidHeaderError(
            "malformed data_offsets",
            file=file,
            tensor=name,
            expected="two integers, begin and end",
            found=short_repr(offsets),
        )
    begin, end = offsets
    needed = _needed_bytes(name, dtype, shape, file)
    if end - begin != needed:
        raise InvalidHeaderError(
            "data_offsets do not fit the shape and dtype",
            file=file,
            tensor=name,
            expected=f"{needed} bytes for {dtype.code}{short_repr(shape)}",
            found=f"{end - begin} bytes, data_offsets {offsets}",
        )
    key = tuple(shape)
    shared = shapes.setdefault(key, key)
    return TensorEntry(name, dtype, shared, file, data_start + begin, data_start + end)


def _fields(name: str, value: object, file: str, look_closely: bool) -> tuple[str, object, object]:
    """Return the code, shape and offsets of a tensor; shape and offsets are not checked yet."""
    # No writer adds a key, and most keep this order; then no dict is made.
    if type(value) is tuple and len(value) == len(_FIELDS) and not look_closely:
        (key_0, code), (key_1, shape), (key_2, offsets) = value
        if (key_0, key_1, key_2) == _FIELDS and type(code) is str:
            return code, shape, offsets
        if {key_0, key_1, key_2} == _FIELD_SET and type(dict(value)["dtype"]) is str:
            code, shape, offsets = map(dict(value).__getitem__, _FIELDS)
            return code, shape, offsets
    strict_json.refuse_unreadable(value)
    return _unusual_fields(name, dict(value) if type(value) is tuple else value, file)


def _unusual_fields(name: str, value: object, file: str) -> tuple[str, object, object]:
    """`_fields` of forms that no writer makes but that the Rust library accepts.

    These are additional keys, the three values as a list, and the dtype as `{"F32": null}`; serde
    reads any struct and any enum so.
    """
    if isinstance(value, list) and len(value) == len(_FIELDS):
        code, shape, offsets = value
    elif isinstance(value, dict) and all(field in value for field in _FIELDS):
        code, shape, offsets = (value[field] for field in _FIELDS)
    else:
        raise InvalidHeaderError(
            "malformed tensor entry",
            file=file,
            tensor=name,
            expected=f"an object with the keys {', '.join(_FIELDS)}",
            found=f"the keys {short_repr(list(value))}"
            if isinstance(value, dict)
            else short_repr(value),
        )
    if type(code) is tuple and len(code) == 1 and code[0][1] is None:
        ((code, _),) = code
    if not isinstance(code, str):
        raise InvalidHeaderError(
            "malformed dtype",
            file=file,
            tensor=name,
            expected="a string",
            found=short_repr(strict_json.plain(code)),
        )
    return code, shape, offsets


def _sizes(name: str, field: str, items: object, file: str) -> list[int]:
    """Return `items` if it is a list of integers in the range of Rust's usize."""
    if type(items) is list:
        for item in items:
            if type(item) is not int or not 0 <= item <= _USIZE_MAX:
                break
        else:
            return items
    raise InvalidHeaderError(
        f"malformed {field}",
        file=file,
        tensor=name,
        expected="a list of integers from 0 to 2**64 - 1",
        found=short_repr(items),
    )


def _needed_bytes(name: str, dtype: DType, shape: list[int], file: str) -> int:
    """Return the bytes of a tensor; refused where Rust's 64-bit arithmetic would overflow."""
    size = 1
    for dimension in shape:
        size *= dimension
        if size > _USIZE_MAX:  # also where a later dimension is zero
            break
    if size * dtype.bits > _USIZE_MAX:
        raise InvalidHeaderError(
            "the tensor's size overflows",
            file=file,
            tensor=name,
            expected="fewer than 2**64 bits",
            found=f"shape {short_repr(shape)} of {dtype.code}",
        )
    whole, rest = divmod(size * dtype.bits, 8)
    if rest:
        raise InvalidHeaderError(
            "the tensor does not fill whole bytes",
            file=file,
            tensor=name,
            expected="a multiple of 8 bits",
            found=f"{size * dtype.bits} bits, shape {short_repr(shape)} of {dtype.code}",
        )
    return whole


def _misplaced(
    tensors: Sequence[TensorEntry], file: str, data_start: int, file_size: int, *, is_complete: bool
) -> Iterator[FormatError]:
    """Yields errors where the sorted tensors do not cover the data exactly.

    Gaps count only where `tensors` is complete.
    """
    position = data_start
    for entry in tensors:
        if entry.start < position or (is_complete and entry.start > position):
            yield InvalidHeaderError(
                "the tensor leaves a gap after the one before it"
                if entry.start > position
                else "the tensor overlaps the one before it",
                file=file,
                tensor=entry.name,
                expected=f"data_offsets that begin at {position - data_start}",
                found=f"{entry.start - data_start}",
            )
        position = max(position, entry.stop)
    if position > file_size:
        cut = next(entry.name for entry in tensors if entry.stop > file_size)
        yield TruncatedFileError(
            "the file is truncated: it ends before its tensors do",
            file=file,
            tensor=cut,
            expected=f"{position} bytes",
            found=f"{file_size} bytes",
        )
    if position < file_size and is_complete:
        yield InvalidHeaderError(
            "the file goes on after its last tensor",
            file=file,
            expected=f"{position} bytes",
            found=f"{file_size} bytes",
        )


def _check_metadata(value: object, file: str) -> None:
    if value is not None and type(value) is not tuple:
        raise InvalidHeaderError(
            f"malformed {_METADATA_KEY}",
            file=file,
            expected="an object of strings",
            found=short_repr(value),
        )


def _metadata_text(key: str, value: object, known: Mapping[str, str], file: str) -> str:
    if key in known:
        raise strict_json.JsonError(f"key {key!r} is repeated")
    if not isinstance(value, str):
        raise InvalidHeaderError(
            f"malformed {_METADATA_KEY}",
            file=file,
            expected="an object of strings",
            found=short_repr({key: value}),
        )
    strict_json.refuse_lone_surrogate(value)
    return value


def _repeated(name: str, file: str) -> InvalidHeaderError:
    return InvalidHeaderError(
        "a name is repeated", file=file, tensor=name, expected="each name once", found="it twice"
    )
