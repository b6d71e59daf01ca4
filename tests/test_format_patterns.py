from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors_layout.format.nearest import nearest_names
from orbax_safetensors_layout.format.patterns import compile_pattern, is_plain


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.b", ["a.b"], ["axb", "a.b.c", "xa.b"]),
        ("*", ["", "a", "a.b\n"], []),
        ("a.*.c", ["a.b.c", "a..c", "a.b.b.c"], ["a.c", "a.b.c.d"]),
        ("a***b", ["ab", "axb"], ["a"]),
        ("?.b", ["a.b", "..b"], ["ab.b", ".b"]),
        ("[abc]", ["a", "c"], ["d", "ab", "["]),
        ("[a-c0-9]", ["b", "5"], ["d", "-"]),
        ("[!a-c]", ["d", "!", "^"], ["a", "b", ""]),
        ("[]]", ["]"], ["["]),
        ("[!]]", ["["], ["]"]),
        ("[a-]", ["a", "-"], ["b"]),
        ("[^a]", ["^", "a"], ["b"]),
        ("[*][?][[][{][}]", ["*?[{}"], ["aaaaa"]),
        ("[&&][||][~~][\\]", ["&|~\\"], ["a"]),
        ("{a,b}.c", ["a.c", "b.c"], ["ab.c", "a,b.c", "{a,b}.c"]),
        ("{a,}b", ["ab", "b"], ["bb"]),
        ("{a.*,b.?}", ["a.xyz", "b.x"], ["b.xyz"]),
        ("{a,{b,c}d}", ["a", "bd", "cd"], ["ad", "b"]),
        ("{[a,],b}", ["a", ",", "b"], ["c"]),
        ("{ab}", ["ab"], ["{ab}"]),
        ("l.{0..15}.w", ["l.0.w", "l.9.w", "l.15.w"], ["l.16.w", "l.00.w", "l..w", "l.1.5.w"]),
        ("{3..3}", ["3"], ["2", "4"]),
        ("{08..11}", ["08", "09", "10", "11"], ["8", "12"]),
        ("{{0..1},x}", ["0", "1", "x"], ["2"]),
        ("{1..5}*", ["12", "1"], ["62", ""]),
        ("{a..c}", ["a..c"], ["a", "b"]),
        ("a+(b)|c^$", ["a+(b)|c^$"], ["aab", "c"]),
        ("a,b", ["a,b"], ["a", "b"]),
    ],
)
def test_pattern(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = compile_pattern(pattern)
    assert [name for name in matching + others if compiled.fullmatch(name)] == matching


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a[b", "'[' at 1 is not closed"),
        ("[]", "'[' at 0 is not closed"),
        ("{a,b", "'{' is not closed"),
        ("{a,{b}", "'{' is not closed"),
        ("a}", "'}' at 1 closes nothing"),
        ("[z-a]", "z-a is empty"),
        ("{5..3}", "{5..3} must have 1 to 10000 numbers"),
        ("{0..10000}", "{0..10000} must have 1 to 10000 numbers"),
    ],
)
def test_malformed_pattern(pattern: str, problem: str) -> None:
    with pytest.raises(ValueError, match="Pattern") as caught:
        compile_pattern(pattern)
    assert problem in str(caught.value)
    assert repr(pattern) in str(caught.value)


@given(st.text("ab.*?", max_size=8), st.text("ab.", max_size=8))
def test_agrees_with_fnmatch(pattern: str, name: str) -> None:
    assert bool(compile_pattern(pattern).fullmatch(name)) == fnmatch.fnmatchcase(name, pattern)


def test_is_plain() -> None:
    assert is_plain("model.layers.0.weight,")
    assert not any(map(is_plain, ["a*", "a?", "[a]", "{a}", "}"]))


def test_nearest_names_of_few() -> None:
    assert nearest_names("embeding", ["embedding", "norm", "head"]) == ["embedding"]
    assert nearest_names("zzz", ["embedding", "norm"]) == []
    assert nearest_names("a", []) == []


def test_nearest_names_of_many() -> None:
    names = [f"model.layers.{i}.mlp.{p}.weight" for i in range(3000) for p in ("up", "down")]
    assert (
        nearest_names("model.layers.77.mlp.up.wieght", names)[0] == "model.layers.77.mlp.up.weight"
    )
    assert nearest_names("layers.77.mlp.down.weight", names)[0] == "model.layers.77.mlp.down.weight"
