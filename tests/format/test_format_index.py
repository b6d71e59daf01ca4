from __future__ import annotations

import json

import pytest
from format_helpers import index_bytes, refused

from orbax_safetensors_layout.errors import InvalidIndexError
from orbax_safetensors_layout.format import WeightIndex, parse_index

FILE = "folder/model.safetensors.index.json"


def refusal(data: str | bytes) -> InvalidIndexError:
    data = data.encode() if isinstance(data, str) else data
    return refused(lambda: parse_index(data, file=FILE), InvalidIndexError, FILE)


def test_index() -> None:
    index = parse_index(
        b'\n{"metadata": {"total_size": 12, "more": [{"x": 1}]}, "note": null, "weight_map": {'
        b'"b": "model-2.safetensors", "a": "model-1.safetensors", "c": "model-2.safetensors"}}\n',
        file=FILE,
    )
    assert index == WeightIndex(
        {"b": "model-2.safetensors", "a": "model-1.safetensors", "c": "model-2.safetensors"},
        {"total_size": 12, "more": [{"x": 1}]},
    )
    assert list(index.weight_map) == ["b", "a", "c"]
    assert index.files == ("model-1.safetensors", "model-2.safetensors")
    assert index.weight_map["b"] is index.weight_map["c"]


@pytest.mark.parametrize("metadata", ["", '"metadata": null, ', '"metadata": {}, '])
def test_metadata_may_be_absent(metadata: str) -> None:
    assert parse_index(f'{{{metadata}"weight_map": {{}}}}'.encode(), file=FILE).metadata == {}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "sub/model.safetensors", "a b..c.safetensors", "é.safetensors"]
)
def test_file_names_within_the_folder(name: str) -> None:
    assert parse_index(index_bytes({"a": name}), file=FILE).files == (name,)
    assert parse_index(index_bytes({"a": f"./{name}", "b": name}), file=FILE).files == (name,)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "x",
            "[]",
            "null",
            '"weight_map"',
            "{",
            '{"weight_map": {}} x',
            '{"weight_map": {},}',
        ),
        *('{"weight_map": {"a": NaN}}', "\ufeff{}"),
    ],
)
def test_not_json(text: str) -> None:
    error = refusal(text)
    assert "not valid JSON" in str(error)
    assert error.expected == "one JSON object"


def test_not_utf8() -> None:
    error = refusal(b'{"weight_map": "\xff"}')
    assert "not UTF-8" in str(error)
    assert "at byte 16" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {}, "weight_map": {}}',
        '{"weight_map": {}, "metadata": {"a": 1, "a": 1}}',
    ],
)
def test_repeated_key(text: str) -> None:
    assert "is repeated" in str(refusal(text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", "nothing"),
        ('{"weight_map": null}', "NoneType"),
        ('{"weight_map": []}', "list"),
        ('{"weight_map": "x"}', "str"),
    ],
)
def test_no_weight_map(text: str, found: str) -> None:
    error = refusal(text)
    assert "no weight_map" in str(error)
    assert error.found == found


@pytest.mark.parametrize("value", [None, 1, ["x.safetensors"], {"file": "x.safetensors"}, True])
def test_file_name_is_no_string(value: object) -> None:
    error = refusal(json.dumps({"weight_map": {"a": "x.safetensors", "b": value}}))
    assert (error.tensor, error.expected) == ("b", "a file name")
    assert error.found == repr(value)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "a/.."),
        *("a/./x", "a//x.safetensors", "a/", "..\\x.safetensors", "\\x.safetensors"),
        *("C:x.safetensors", "c:/x.safetensors", "https://host/x.safetensors"),
        *("a\0.safetensors", "a\n.safetensors"),
    ],
)
def test_file_name_leaves_the_folder(name: str) -> None:
    error = refusal(index_bytes({"ok": "x.safetensors", "bad": name}))
    assert "outside of its folder" in str(error)
    assert error.tensor == "bad"
    assert error.found == repr(name)


@pytest.mark.parametrize(
    "name", ["model.bin", "model.safetensors.json", "safetensors", "x.SAFETENSORS"]
)
def test_file_of_another_format(name: str) -> None:
    error = refusal(index_bytes({"a": name}))
    assert "another format" in str(error)
    assert (error.tensor, error.found) == ("a", repr(name))


@pytest.mark.parametrize("value", ["[]", "1", '"x"'])
def test_malformed_metadata(value: str) -> None:
    error = refusal(f'{{"weight_map": {{}}, "metadata": {value}}}')
    assert "malformed metadata" in str(error)
    assert error.expected == "an object"


def test_large_index() -> None:
    data = index_bytes(
        {f"layers.{i}.weight": f"model-{i // 600}.safetensors" for i in range(92_000)}
    )
    assert len(parse_index(data, file=FILE).weight_map) == 92_000
