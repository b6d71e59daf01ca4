from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given, strategies as st

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.catalog import (
    added_prefixes,
    compile_pattern,
    select_names,
    suggest_names,
)
from orbax_safetensors_layout.catalog.select import is_plain
from orbax_safetensors_layout.errors import MissingTensorError


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
        ("a}", "'}' at 1 has no '{' before it"),
        ("[z-a]", "z-a is empty"),
        ("{5..3}", "{5..3} must have 1 to 10000 numbers"),
        ("{0..10000}", "{0..10000} must have 1 to 10000 numbers"),
    ],
)
def test_malformed_pattern(pattern: str, problem: str) -> None:
    with pytest.raises(osl.InvalidArgumentError, match="Pattern") as caught:
        compile_pattern(pattern)
    assert isinstance(caught.value, ValueError)
    assert problem in str(caught.value)
    assert repr(pattern) in str(caught.value)


@given(st.text("ab.*?", max_size=8), st.text("ab.", max_size=8))
def test_agrees_with_fnmatch(pattern: str, name: str) -> None:
    assert bool(compile_pattern(pattern).fullmatch(name)) == fnmatch.fnmatchcase(name, pattern)


@given(st.data())
def test_braces_agree_with_what_they_stand_for(data: st.DataObject) -> None:
    texts = st.text("ab.*?", max_size=4)
    inner = st.one_of(texts, st.just("{8..11}"), st.builds("{{{},{}}}".format, texts, texts))
    braces = st.builds("{{{},{}}}".format, inner, texts)
    drawn = st.lists(st.one_of(texts, braces, st.just("{8..11}")), max_size=3)
    pattern = "".join(data.draw(drawn))
    name = data.draw(st.text("ab.189", max_size=8))
    alone = pattern.replace("{8..11}", "{8,9,10,11}")
    matches = bool(compile_pattern(pattern).fullmatch(name))
    assert matches == any(
        fnmatch.fnmatchcase(name, alternative) for alternative in alternatives(alone)
    )


def alternatives(pattern: str) -> list[str]:
    """The patterns without braces that one with braces stands for."""
    start = pattern.find("{")
    if start < 0:
        return [pattern]
    depth, at, parts = 0, start + 1, []
    for stop in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[stop], 0)
        if (pattern[stop] == "," and depth == 1) or not depth:
            parts.append(pattern[at:stop])
            at = stop + 1
        if not depth:
            break
    heads = [pattern[:start] + option for part in parts for option in alternatives(part)]
    return [head + rest for head in heads for rest in alternatives(pattern[stop + 1 :])]


def test_names_that_are_patterns_are_spelled() -> None:
    names = ["a[0", "a[0]", "a0", "}", "*"]
    assert select_names(names, "a[0", path="x") == ["a[0"]
    assert select_names(names, ["}", "a[0]"], path="x") == ["a[0]", "a0", "}"]
    assert select_names(names, "*", path="x") == names
    with pytest.raises(ValueError, match="not closed"):
        select_names(names, "a[1", path="x")
    for wrong in (7, b"a", ["a0", 7], None, range(10**9)):  # the last at once
        with pytest.raises(osl.InvalidArgumentError, match="patterns, which are strings"):
            select_names(names, wrong, path="x")  # type: ignore[arg-type]


def test_is_plain() -> None:
    assert is_plain("model.layers.0.weight,")
    assert not any(map(is_plain, ["a*", "a?", "[a]", "{a}", "}"]))


def test_patterns_that_match_nothing_name_similar_ones() -> None:
    names = [f"model.layers.{i}.mlp.{p}_proj.weight" for i in range(32) for p in ("up", "down")]
    names.append("model.embed_tokens.weight")
    first = "'model.layers.0.mlp.up_proj.weight'"
    for pattern, said in {
        "model.layer.*": f"'model.layers.*' matches {first}",
        "*.upp_proj.weight": f"'*.up_proj.weight' matches {first}",
        "layers.{0..3}.*": f"'*layers.{{0..3}}.*' matches {first}",
        "layer.0.*": f"'*layers.0.*' matches {first}",
        "*embed_token": "'*embed_token*' matches 'model.embed_tokens.weight'",
        "*.mlp.up_proj": f"'*.mlp.up_proj*' matches {first}",
        "zzz*": None,
    }.items():
        with pytest.raises(MissingTensorError) as caught:
            select_names(names, pattern, path="/m")
        assert (caught.value.hint is None) == (said is None)
        if said is not None:
            assert said in caught.value.hint, caught.value.hint


def test_prefixes_that_names_have_in_addition() -> None:
    assert added_prefixes(["a.b.w", "a.b.v", "step"], {"w", "v"}) == ["a.b."]
    adam = [f"{part}.{name}" for part in ("mu", "params") for name in ("w", "v")]
    assert added_prefixes(adam, {"w", "v"}) == ["mu.", "params."]
    assert added_prefixes(["a.w", "b.v", "step"], {"w", "v", "x"}) == []
    assert added_prefixes(["w"], {"w"}) == []
    assert added_prefixes([], {"w"}) == []
    assert added_prefixes(["a." * 1_000_000 + "w"], {"w"}) == []  # without quadratic work


def test_nearest_names_of_few() -> None:
    assert suggest_names("embeding", ["embedding", "norm", "head"]) == ["embedding"]
    assert suggest_names("zzz", ["embedding", "norm"]) == []
    assert suggest_names("a", []) == []


def test_nearest_names_of_many() -> None:
    names = [f"model.layers.{i}.mlp.{p}.weight" for i in range(3000) for p in ("up", "down")]
    assert (
        suggest_names("model.layers.77.mlp.up.wieght", names)[0] == "model.layers.77.mlp.up.weight"
    )
    assert suggest_names("layers.77.mlp.down.weight", names)[0] == "model.layers.77.mlp.down.weight"
