"""Regular expressions of configurations: those that programs write are taken, hostile ones not."""

import contextlib
import time

import pytest

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.mapping import compiled_regex

TAKEN = [
    r"q_proj",
    r"layers\.[12]\.q_proj",
    r"^model.decoder.layers.0.k_proj",
    r".*\.layers\.([0-9]|[1-4][0-9])\..*",
    r"^(?!.*(?:visual|patch_embed)).*(?:q_proj|k_proj|v_proj).*",
    r"^(model\.language_model(?=\.).*\.(q_proj|k_proj|v_proj))$",
    r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj",
    r"(?i).*ATTN.*",
    r"(?P<kind>self_attn|mlp)?\.?(?i:Q|K)_proj{1}",
    r"[]a*+]|[^]*+(]|\(|\*",
    # of Unsloth
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp"
    r"|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:k_proj|v_proj|q_proj|down_proj)))",
]
REFUSED = [
    "(",
    "*",
    "[",
    "(a*)*b",
    "(a|b)+",
    "(a){2}{3}",
    ".*" * 7 + "x",
    ".*" * 30_000,
    "a?" * 30,
    "(?:)?" * 40,
    "(|a)" * 40,
    "(ab|a(b))" * 40 + "c",
    "(?i:ab|A(b))" * 40,
    "(a*b|b)" * 9,
    "a{1,2}" * 40,
    "(?>a)b",
    "(?x)a # b",
    "(?#a)",
    "(?P<x>a)(?P=x)",
    "(a)?(?(1)b|c)",
    "(" * 3000 + ")" * 3000,
    "a" * 70_000,
]


@pytest.mark.parametrize("pattern", TAKEN)
def test_what_programs_write_is_taken(pattern):
    assert compiled_regex(pattern, 100, "targets").pattern == pattern


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_malformed_or_may_not_end_is_refused(pattern):
    message = r"the regular expression .* of targets cannot be used on names of 100 characters: "
    with pytest.raises(osl.MappingError, match=message) as error:
        compiled_regex(pattern, 100, "targets")
    assert len(str(error.value)) < 500


def test_longer_names_take_longer():
    pattern = r"\w*" * 3 + "[xy]"
    assert compiled_regex(pattern, 500, "targets")
    with pytest.raises(osl.MappingError, match="on names of 100000 characters: it may take too"):
        compiled_regex(pattern, 100_000, "targets")


@pytest.mark.parametrize(
    ("part", "name"),
    [(r"\w*", "a"), (r"\w*?", "a"), (r"(\w*)", "a"), ("a?", "a"), ("(ab|a(b))", "ab")],
)
def test_what_is_taken_ends(part, name):
    count = 0
    with contextlib.suppress(osl.MappingError):
        while count < 40:
            regex = compiled_regex(part * (count + 1) + "[xy]", 60, "targets")
            count += 1
    assert 3 < count < 30
    start = time.monotonic()
    regex.fullmatch((name * 60)[:59] + ".")
    assert time.monotonic() - start < 60
