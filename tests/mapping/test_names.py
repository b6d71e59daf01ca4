"""Name patterns against regular expressions over whole names."""

import re

from hypothesis import given, strategies as st

from orbax_safetensors_layout.mapping import NameTree
from orbax_safetensors_layout.mapping.names import substitute

PARTS = st.sampled_from(["a", "b", "ab", "0", "1", "a0", "%s", "a%", ""])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
PATTERN_PARTS = st.sampled_from(
    ["a", "0", "%s", "", "{i}", "{j}", "a{i}", "{i}{j}", "{i}0", "{j}%"]
)
PATTERNS = st.lists(PATTERN_PARTS, min_size=1, max_size=4).map(".".join)


def expected(names, pattern):
    """By one expression for the whole name, in which a wildcard that comes again is the same."""
    seen, regex = set(), ""
    for literal, name in re.findall(r"([^{}]*)(?:\{(\w+)\})?", pattern):
        regex += re.escape(literal)
        if name:
            regex += f"(?P={name})" if name in seen else rf"(?P<{name}>[^.]+)"
            seen.add(name)
    matches = ((name, re.fullmatch(regex, name)) for name in dict.fromkeys(names))
    return {name: match.groupdict() for name, match in matches if match}


@given(st.lists(NAMES, max_size=12), PATTERNS)
def test_names_that_match(names, pattern):
    found = [*NameTree(names).match(pattern)]
    assert dict(found) == expected(names, pattern)
    assert len(found) == len(dict(found))
    for name, captures in found:
        assert substitute(pattern, captures) == name


@given(PATTERNS, st.dictionaries(st.sampled_from("ij"), st.sampled_from(["x", "%d", "{i}"])))
def test_wildcards_without_a_value_stay(pattern, captures):
    replaced = re.sub(r"\{(\w)\}", lambda match: captures.get(match[1], match[0]), pattern)
    assert substitute(pattern, captures) == replaced
