"""Regular expressions of configurations, refused where a hostile one might match for ever.

`re` backtracks, so its time grows with the ways to match. On a name of `n` characters `r`
repetitions divide it in at most `comb(n + r, r)` ways; each optional part doubles these, and
alternatives multiply them by the number of those that can begin at one place.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import short_repr

_MOST_WAYS = 2 * 10**8  # two seconds or so
_MOST_REPETITIONS = 20  # which are too many on any name; the number of ways would be long
_MOST_CHARACTERS = 1 << 16
_TOKEN = re.compile(
    r"(?P<begin>\((\?([ai]*:|=|!|<=|<!|P<\w+>)|(?!\?)))"
    r"|(?P<end>\))"
    r"|(?P<bar>\|)"
    r"|(?P<repeat>([*+?]|\{\d*(,\d*)?\})[?+]?)"
    r"|(?P<atom>\\.|\[\^?\]?(\\.|[^]\\])*\]|\(\?[ai]+\)|[^(])|(?P<other>\()",
    re.DOTALL,
)
_LITERAL = re.compile(r"[\w-]|\\[.-]", re.ASCII)


@dataclasses.dataclass(slots=True)
class _Sequence:
    """Atoms and groups in a row."""

    first: str = ""  # the literal that it begins with, if it does
    length: int = 0
    repetitions: int = 0
    ways: int = 1  # for one way of the repetitions


def compiled_regex(pattern: str, longest: int, place: str) -> re.Pattern[str]:
    """Return a regular expression, for names of up to `longest` characters.

    Args:
        pattern: As the configuration has it.
        longest: Characters of the longest name.
        place: The part of the configuration, for the error.

    Raises:
        MappingError: It is malformed, or may take too long.
    """
    problem: object = "it may take too long"
    try:
        compiled, parsed = _parsed(pattern)
        count, ways = parsed.repetitions, parsed.ways
        if count < _MOST_REPETITIONS and ways * math.comb(longest + count, count) <= _MOST_WAYS:
            return compiled
    except (ValueError, RecursionError, OverflowError, re.error) as error:
        problem = error
    raise MappingError(
        f"the regular expression {short_repr(pattern)} of {place} cannot be used on names of"
        f" {longest} characters: {problem}",
        expected="few repetitions, and none of a group",
        hint="List the names instead, or write a shorter one.",
    )


@functools.lru_cache(1 << 12)
def _parsed(pattern: str) -> tuple[re.Pattern[str], _Sequence]:
    if len(pattern) > _MOST_CHARACTERS:
        raise ValueError(f"it has {len(pattern):,} characters")
    compiled = re.compile(pattern)
    return compiled, _group(_TOKEN.finditer(pattern))


def _group(tokens: Iterator[re.Match[str]]) -> _Sequence:
    """Return the alternatives up to the end of a group as one sequence."""
    alternatives = [_Sequence()]
    last: str | None = "bar"
    for token in tokens:
        kind, text, sequence = token.lastgroup, token[0], alternatives[-1]
        if kind == "end":
            break
        if kind == "bar":
            alternatives.append(_Sequence())
        elif kind == "other":
            raise ValueError("it has flags, or a group of a rare kind")
        elif kind == "repeat":
            is_optional = text[0] == "?"
            if last == "begin" and not is_optional:
                raise ValueError(f"{text!r} repeats a group")
            if sequence.length == 1 and text[0] != "+":
                sequence.first = ""
            sequence.repetitions += not is_optional
            sequence.ways *= 1 + is_optional
        else:
            inner = _group(tokens) if kind == "begin" else _Sequence()
            sequence.repetitions += inner.repetitions
            sequence.ways *= inner.ways
            if not sequence.length and _LITERAL.fullmatch(text):
                sequence.first = text.lower()
            sequence.length += 1
        last = kind
    literals = collections.Counter(sequence.first for sequence in alternatives)
    shared = len(alternatives) if literals[""] else max(literals.values())
    return _Sequence(
        repetitions=max(sequence.repetitions for sequence in alternatives),
        ways=shared * max(sequence.ways for sequence in alternatives),
    )
