"""Headers: what is accepted, and one test per cause of refusal with its message."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from format_helpers import entry, file_bytes, refused

from orbax_safetensors_layout.errors import (
    FormatError,
    InvalidHeaderError,
    TruncatedFileError,
    UnsupportedDtypeError,
)
from orbax_safetensors_layout.format import (
    DTYPES,
    Header,
    header_length,
    parse_header,
)

FILE = "folder/model.safetensors"
A = entry("U8", [2], 0, 2)
TENSOR = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


def parse(data: bytes) -> Header:
    length = header_length(data[:8], file=FILE, file_size=len(data))
    return parse_header(data[8 : 8 + length], file=FILE, file_size=len(data))


def parse_text(text: str | bytes, data: bytes = b"\0\0") -> Header:
    return parse(file_bytes(text, data))


def fill(template: str, *values: str) -> str:
    """`template` with its `@`s replaced, one after the other."""
    parts = template.split("@")
    assert len(parts) == len(values) + 1
    return "".join(part + value for part, value in zip(parts, (*values, ""), strict=True))


def refusal(
    text: Any, data: bytes = b"\0\0", kind: type[FormatError] = InvalidHeaderError
) -> FormatError:
    return refused(lambda: parse(file_bytes(text, data)), kind, FILE)


def assert_says(error: FormatError, *, tensor: str | None, expected: str, found: str) -> None:
    assert error.tensor == tensor
    assert expected in str(error.expected)
    assert found in str(error.found)
    message = str(error)
    assert f"expected: {error.expected}" in message
    assert f"found: {error.found}" in message
    if tensor is not None:
        assert f"tensor: {tensor!r}" in message


# What is accepted.


def test_entries_have_absolute_offsets_in_file_order() -> None:
    data = file_bytes(
        {
            "__metadata__": {"format": "pt"},
            "b": entry("F32", [2, 1], 4, 12),
            "a": entry("BF16", [2], 0, 4),
        },
        bytes(12),
    )
    header = parse(data)
    start = len(data) - 12
    assert header.metadata == {"format": "pt"}
    assert list(header.tensors) == ["a", "b"]
    assert header.tensors["b"] == ("b", DTYPES["F32"], (2, 1), FILE, start + 4, start + 12)
    assert header.tensors["b"].nbytes == 8
    assert header.tensors["a"].start == start


def test_empty_header() -> None:
    header = parse(file_bytes("{}"))
    assert header == ({}, {})


def test_zero_sized_and_scalar_tensors() -> None:
    header = parse(
        file_bytes(
            {
                "scalar": entry("F16", [], 0, 2),
                "none": entry("F32", [3, 0, 5], 2, 2),
                "first": entry("F32", [0], 0, 0),
            },
            bytes(2),
        )
    )
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {
        "first": (0,),
        "scalar": (),
        "none": (3, 0, 5),
    }
    assert list(header.tensors) == ["first", "scalar", "none"]


def test_unaligned_offsets() -> None:
    header = parse(
        file_bytes({"a": entry("U8", [1], 0, 1), "b": entry("F64", [1], 1, 9)}, bytes(9))
    )
    assert header.tensors["b"].nbytes == 8


@pytest.mark.parametrize(
    ("code", "shape", "size"), [("F4", [4], 2), ("F6_E2M3", [4], 3), ("F6_E3M2", [2, 4], 6)]
)
def test_packed_shapes_count_logical_elements(code: str, shape: list[int], size: int) -> None:
    header = parse(file_bytes({"a": entry(code, shape, 0, size)}, bytes(size)))
    assert header.tensors["a"].shape == tuple(shape)
    assert header.tensors["a"].nbytes == size


@pytest.mark.parametrize("padding", ["", " ", " \n\t\r "])
def test_white_space_after_the_header(padding: str) -> None:
    assert list(parse_text(fill('{"a":@}@', TENSOR, padding)).tensors) == ["a"]


def test_white_space_between_tokens() -> None:
    text = '{\n "a" :\t{ "dtype" : "U8" , "shape" : [ 2 ] , "data_offsets" : [ 0 , 2 ] } \r}'
    assert list(parse_text(text).tensors) == ["a"]
    assert parse_text("{ }", b"").tensors == {}


@pytest.mark.parametrize(
    "name", ["", "\0", "\x7f", "a/b", "é", "模型", "😀", 'q"', "back\\slash", "layer-0", "dtype"]
)
def test_any_text_is_a_name(name: str) -> None:
    for ascii_only in (True, False):
        text = json.dumps({name: A}, ensure_ascii=ascii_only)
        assert list(parse_text(text).tensors) == [name]


@pytest.mark.parametrize(
    ("value", "metadata"),
    [
        ("null", {}),
        ("{}", {}),
        ('{"a":"b","":""}', {"a": "b", "": ""}),
        ('{"dtype":"x","shape":"y","data_offsets":"z"}', None),
    ],
)
def test_metadata(value: str, metadata: dict[str, str] | None) -> None:
    header = parse_text(fill('{"__metadata__":@,"a":@}', value, TENSOR))
    assert header.metadata == (json.loads(value) if metadata is None else metadata)


@pytest.mark.parametrize(
    "value",
    [
        '{"data_offsets":[0,2],"shape":[2],"dtype":"U8"}',
        '{"dtype":"U8","shape":[2],"data_offsets":[0,2],"note":{"x":[1.5e3,null]}}',
        '{"d\\u0074ype":"U8","shape":[2],"data_offsets":[0,2]}',
        '{"dtype":"U8","shape":[2],"data_offsets":[0,2],"note":"\\ud83d\\ude00"}',
    ],
    ids=["order", "further-key", "escape", "surrogate-pair"],
)
def test_unusual_forms_that_are_taken(value: str) -> None:
    assert parse_text(fill('{"a":@}', value)).tensors["a"].shape == (2,)


def test_entries_share_their_file_and_dtype() -> None:
    header = parse(file_bytes({"a": A, "b": entry("U8", [2], 2, 4)}, bytes(4)))
    a, b = header.tensors.values()
    assert a.file is b.file
    assert a.dtype is b.dtype


# The first 8 bytes.


@pytest.mark.parametrize("data", [b"", b"\2\0\0\0\0\0\0"])
def test_file_ends_within_its_prefix(data: bytes) -> None:
    with pytest.raises(TruncatedFileError, match="truncated") as caught:
        header_length(data, file=FILE, file_size=len(data))
    assert_says(caught.value, tensor=None, expected="at least 8 bytes", found=f"{len(data)} bytes")


def test_file_ends_within_its_header() -> None:
    with pytest.raises(TruncatedFileError, match="truncated") as caught:
        header_length((100).to_bytes(8, "little"), file=FILE, file_size=107)
    assert_says(caught.value, tensor=None, expected="at least 108 bytes", found="107 bytes")
    assert header_length((100).to_bytes(8, "little"), file=FILE, file_size=108) == 100


def test_header_length_out_of_range() -> None:
    size = 1 << 40
    limit = 100_000_000
    assert header_length(limit.to_bytes(8, "little"), file=FILE, file_size=size) == limit
    with pytest.raises(InvalidHeaderError, match="not a safetensors file") as caught:
        header_length((limit + 1).to_bytes(8, "little"), file=FILE, file_size=size)
    assert_says(caught.value, tensor=None, expected="at most 100000000", found="100000001 bytes")
    assert caught.value.hint is None
    with pytest.raises(InvalidHeaderError):
        header_length(b"\xff" * 8, file=FILE, file_size=size)


def test_git_lfs_pointer_has_a_hint() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    with pytest.raises(InvalidHeaderError, match="git lfs pull"):
        header_length(pointer[:8], file=FILE, file_size=len(pointer))


# The header as text.


@pytest.mark.parametrize("text", ["", " {}", "\n{}", "\ufeff{}", "[]", "null", "\0{}"])
def test_header_does_not_begin_with_a_brace(text: str) -> None:
    error = refusal(text, b"")
    assert_says(error, tensor=None, expected="'{'", found=repr(text.encode()))


@pytest.mark.parametrize("name", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xe6"])
def test_header_is_not_utf8(name: bytes) -> None:
    error = refusal(b'{"%s":%s}' % (name, TENSOR.encode()))
    assert_says(error, tensor=None, expected="UTF-8", found="at byte 2")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "line 1 column 2"),
        ('{"a"}', "line 1 column 5"),
        ('{"a":%s', "',' delimiter"),
        ('{"a":%s;"b":1}', "',' delimiter"),
        ('{"a":%s}\0', "Extra data"),
        ('{"a', "Unterminated string"),
        ('{"a":"b\n"}', "Invalid control character"),
        ('{"a":NaN}', "NaN is not a JSON number"),
        ('{"a":[-Infinity]}', "-Infinity is not a JSON number"),
    ],
)
def test_header_is_not_json(text: str, found: str) -> None:
    error = refusal(text.replace("%s", TENSOR))
    assert "not valid JSON" in str(error)
    assert_says(error, tensor=None, expected="one JSON object", found=found)


def test_nesting_in_every_place() -> None:
    deep = "[" * 100_000
    for text in (deep, '{"a":' + deep, '{"a":{"shape":' + deep, '{"__metadata__":' + deep):
        refusal(text)


# Repeated keys.


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (fill('{"a":@,"b":@,"a":@}', TENSOR, TENSOR, TENSOR), "a"),
        (fill('{"a":@,"\\u0061":@}', TENSOR, TENSOR), "a"),
        (fill('{"__metadata__":{},"a":@,"__metadata__":{}}', TENSOR), "__metadata__"),
        ('{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "dtype"),
        (fill('{"__metadata__":{"k":"1","k":"1"},"a":@}', TENSOR), "k"),
    ],
    ids=["tensor", "escaped", "metadata", "field", "in-metadata"],
)
def test_repeated_key(text: str, key: str) -> None:
    error = refusal(text)
    assert_says(error, tensor=None, expected="one JSON object", found=f"key {key!r} is repeated")


# A tensor's entry.


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("null", "None"),
        ("1", "1"),
        ('"U8"', "'U8'"),
        ("[]", "[]"),
        ('["U8",[2]]', "['U8', [2]]"),
        ('["U8",[2],[0,2],0]', "['U8', [2], [0, 2], 0]"),
        ("{}", "the keys []"),
        ('{"shape":[2],"data_offsets":[0,2]}', "['shape', 'data_offsets']"),
        ('{"dtype":"U8","data_offsets":[0,2]}', "['dtype', 'data_offsets']"),
        ('{"dtype":"U8","shape":[2]}', "['dtype', 'shape']"),
        ('{"dtype":"U8","shape":[2],"data_offset":[0,2]}', "['dtype', 'shape', 'data_offset']"),
        ('[["dtype","U8"],["shape",[2]],["data_offsets",[0,2]]]', ""),
    ],
)
def test_malformed_entry(value: str, found: str) -> None:
    error = refusal(fill('{"a":@}', value))
    if found:
        assert_says(error, tensor="a", expected="dtype, shape, data_offsets", found=found)


@pytest.mark.parametrize(
    "code", ["null", "1", '["U8"]', "{}", '{"U8":1}', '{"U8":{}}', '{"U8":null,"U16":null}', "true"]
)
def test_dtype_is_no_string(code: str) -> None:
    error = refusal(fill('{"a":{"dtype":@,"shape":[2],"data_offsets":[0,2]}}', code))
    assert_says(error, tensor="a", expected="a string", found=repr(json.loads(code)))


@pytest.mark.parametrize("code", ["C128", "u8", "", "U8 ", "__metadata__"])
def test_unknown_dtype(code: str) -> None:
    error = refusal({"a": entry(code, [2], 0, 2)}, kind=UnsupportedDtypeError)
    assert_says(error, tensor="a", expected="one of BOOL", found=repr(code))


@pytest.mark.parametrize("item", ["-1", "2.0", "2e0", "true", "null", '"2"', "[2]", "{}"])
def test_malformed_shape(item: str) -> None:
    error = refusal(fill('{"a":{"dtype":"U8","shape":[@],"data_offsets":[0,2]}}', item))
    assert "malformed shape" in str(error)
    assert_says(error, tensor="a", expected="integers that are not negative", found="[")


@pytest.mark.parametrize("shape", ["null", "2", '"2"', "{}", '{"0":2}', "true"])
def test_shape_is_no_list(shape: str) -> None:
    error = refusal(fill('{"a":{"dtype":"U8","shape":@,"data_offsets":[0,2]}}', shape))
    assert "malformed shape" in str(error)
    assert_says(error, tensor="a", expected="a list of integers", found="")


@pytest.mark.parametrize(
    ("offsets", "found"),
    [
        ("null", "None"),
        ("{}", "{}"),
        ("[]", "[]"),
        ("[0]", "[0]"),
        ("[0,2,2]", "[0, 2, 2]"),
        ("[0,2.0]", "[0, 2.0]"),
        ("[-1,1]", "[-1, 1]"),
        ("[false,2]", "[False, 2]"),
        ('["0",2]', "['0', 2]"),
    ],
)
def test_malformed_offsets(offsets: str, found: str) -> None:
    error = refusal(fill('{"a":{"dtype":"U8","shape":[2],"data_offsets":@}}', offsets))
    assert "malformed data_offsets" in str(error)
    assert_says(error, tensor="a", expected="integers", found=found)


def test_long_values_are_cut_in_messages() -> None:
    error = refusal({"a": {"dtype": "U8", "shape": [0.5] * 1_000_000, "data_offsets": [0, 2]}})
    assert len(str(error)) < 400


@pytest.mark.parametrize(("code", "count"), [("F4", 3), ("F6_E2M3", 2), ("F6_E3M2", 5)])
def test_partial_byte(code: str, count: int) -> None:
    error = refusal({"a": entry(code, [count], 0, 2)})
    assert_says(error, tensor="a", expected="a multiple of 8 bits", found=f"[{count}] of {code}")


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 3), (2, 0), (2, 2), (1, 2)])
def test_offsets_do_not_fit_the_shape(begin: int, end: int) -> None:
    error = refusal({"a": entry("U8", [2], begin, end)})
    found = f"{end - begin} bytes, data_offsets [{begin}, {end}]"
    assert_says(error, tensor="a", expected="2 bytes for U8[2]", found=found)


# The tensors together.


@pytest.mark.parametrize(
    ("begin", "problem"), [(3, "leaves a gap"), (1, "overlaps"), (0, "overlaps")]
)
def test_tensors_do_not_touch(begin: int, problem: str) -> None:
    error = refusal({"b": entry("U8", [2], begin, begin + 2), "a": A}, bytes(5))
    assert problem in str(error)
    expected = "data_offsets that begin at 2"
    if begin:
        assert_says(error, tensor="b", expected=expected, found=str(begin))


def test_first_tensor_does_not_begin_at_zero() -> None:
    error = refusal({"a": entry("U8", [2], 1, 3)}, bytes(3))
    assert_says(error, tensor="a", expected="data_offsets that begin at 0", found="1")


def test_zero_sized_tensor_within_another() -> None:
    error = refusal({"a": A, "b": entry("U8", [0], 1, 1)})
    assert_says(error, tensor="b", expected="data_offsets that begin at 2", found="1")


def test_file_ends_within_its_tensors() -> None:
    text = {"a": A, "b": entry("U8", [2], 2, 4), "c": entry("U8", [2], 4, 6)}
    whole = len(file_bytes(text, bytes(6)))
    error = refusal(text, bytes(3), TruncatedFileError)
    assert "truncated" in str(error)
    assert_says(error, tensor="b", expected=f"{whole} bytes", found=f"{whole - 3} bytes")


def test_file_goes_on_after_its_tensors() -> None:
    whole = len(file_bytes({"a": A}, bytes(2)))
    error = refusal({"a": A}, bytes(3))
    assert "goes on after its last tensor" in str(error)
    assert_says(error, tensor=None, expected=f"{whole} bytes", found=f"{whole + 1} bytes")
    refusal("{}", b"x")


@pytest.mark.parametrize(
    "value", ["[]", '"x"', "1", "true", '{"a":1}', '{"a":null}', '{"a":{}}', '[["a","b"]]']
)
def test_metadata_is_no_object_of_strings(value: str) -> None:
    error = refusal(fill('{"a":@,"__metadata__":@}', TENSOR, value))
    assert "malformed __metadata__" in str(error)
    assert_says(error, tensor=None, expected="an object of strings", found="")


def test_memory_per_entry_is_small() -> None:
    count = 20_000
    text = {
        f"model.layers.{i}.mlp.weight": entry("U8", [2, 1], 2 * i, 2 * i + 2) for i in range(count)
    }
    data = file_bytes(text)
    tracemalloc.start()
    header = parse_header(data[8:], file=FILE, file_size=len(data) + 2 * count)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(header.tensors) == count
    assert kept / count < 600
    assert (peak - len(data)) / count < 800
