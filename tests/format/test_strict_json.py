"""Members of JSON objects, however many are decoded at once."""

import json

import pytest
from hypothesis import example, given, settings, strategies as st

from orbax_safetensors_layout.format import strict_json

# Strings with what stands between members, and escapes.
PARTS = ["a", '"', "\\", "},", '",', "{", "}", "[", ",", ":", "é", "opened"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=60)


def raw(value):
    """The value with objects as tuples of pairs, as members give them."""
    if isinstance(value, dict):
        return tuple((key, raw(item)) for key, item in value.items())
    return [raw(item) for item in value] if isinstance(value, list) else value


def expected(document):
    for key, value in document.items():
        if key == "opened" and isinstance(value, dict):
            yield None, key, ()
            yield from (("opened", inner, raw(item)) for inner, item in value.items())
        else:
            yield None, key, raw(value)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@example({}, {"opened": {}, "a": {"opened": 1}}, None, 512)
@given(OBJECTS, OBJECTS, st.sampled_from([None, 1]), st.sampled_from([512, 8192]))
def test_members_are_those_of_the_document(document, inner, indent, longest):
    items = [*document.items()]
    document = dict([*items[: len(items) // 2], ("opened", inner), *items[len(items) // 2 :]])
    text = json.dumps(document, indent=indent)
    values = [*items, *inner.items()]
    if max((len(json.dumps(pair, indent=9)) for pair in values), default=0) > longest:
        return  # refused for its length
    assert [*strict_json.members(text, ("opened",), longest)] == [*expected(document)]


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('"k0":1', "key 'k0' is repeated"),
        ('"x":NaN', "NaN is not a JSON number"),
        ('"x":[1,]', "Expecting value|Illegal trailing comma"),
        ("x:1", "a key must be a string"),
        ('"x" 1', "':' expected"),
    ],
)
def test_the_first_flaw_is_told_wherever_it_stands(count, bad, problem):
    members = [f'"k{n}":{{"shape":[{n}]}}' for n in range(count)]
    for place in (1, count // 2, count):
        text = "{" + ",".join([*members[:place], bad, *members[place:]]) + "}"
        with pytest.raises(strict_json.JsonError, match=problem):
            list(strict_json.members(text))
