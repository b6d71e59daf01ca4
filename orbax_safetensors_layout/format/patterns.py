"""Glob-like patterns on whole tensor names."""

from __future__ import annotations

import re

_MAX_RANGE = 10_000
_NUMERIC_RANGE = re.compile(r"\{([0-9]+)\.\.([0-9]+)\}")
_SPECIAL = frozenset("*?[{}")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression whose `fullmatch` is the pattern's.

    `*` is any text, dots included, and `?` any one character; `[abc]`, `[a-z]` and `[!abc]` are one
    character of a set; `{a,b}` is one of several patterns; `{0..15}` is a number of a range, both
    ends included, and `{00..15}` one with leading zeros. A special character stands for itself in
    a set: `[*]`.

    Args:
        pattern: The pattern.

    Raises:
        ValueError: A bracket or brace is not closed or not opened, or a range is empty or has more
            than 10,000 numbers.

    >>> bool(compile_pattern("layers.{0..3}.*.{weight,bias}").fullmatch("layers.3.mlp.up.bias"))
    True
    """
    translated, _ = _translate(pattern, 0, in_braces=False)
    return re.compile(translated, re.DOTALL)


def is_plain(pattern: str) -> bool:
    """Whether a pattern has no special character, so that it matches only the name it spells."""
    return _SPECIAL.isdisjoint(pattern)


def _translate(pattern: str, position: int, *, in_braces: bool) -> tuple[str, int]:
    """The regular expression of `pattern[position:]` up to the brace that closes it."""
    parts: list[str] = []
    while position < len(pattern):
        character = pattern[position]
        if character == "*":
            while pattern.startswith("*", position + 1):
                position += 1
            parts.append(".*")
        elif character == "?":
            parts.append(".")
        elif character == "[":
            translated, position = _translate_set(pattern, position)
            parts.append(translated)
            continue
        elif character == "{":
            translated, position = _translate_braces(pattern, position)
            parts.append(translated)
            continue
        elif character == "}":
            if not in_braces:
                raise ValueError(f"Pattern {pattern!r}: '}}' at {position} closes nothing.")
            return "".join(parts), position
        elif character == "," and in_braces:
            parts.append("|")
        else:
            parts.append(re.escape(character))
        position += 1
    if in_braces:
        raise ValueError(f"Pattern {pattern!r}: a '{{' is not closed.")
    return "".join(parts), position


def _translate_set(pattern: str, position: int) -> tuple[str, int]:
    start = position + 1
    negated = pattern.startswith("!", start)
    start += negated
    stop = pattern.find("]", start + 1)  # a ']' that comes first belongs to the set
    if stop < 0:
        raise ValueError(f"Pattern {pattern!r}: the '[' at {position} is not closed.")
    body, index = "", start
    while index < stop:
        low = pattern[index]
        if index + 2 < stop and pattern[index + 1] == "-":
            high = pattern[index + 2]
            if high < low:
                raise ValueError(f"Pattern {pattern!r}: the set range {low}-{high} is empty.")
            body += f"{re.escape(low)}-{re.escape(high)}"
            index += 3
        else:
            body += re.escape(low)
            index += 1
    return f"[{'^' if negated else ''}{body}]", stop + 1


def _translate_braces(pattern: str, position: int) -> tuple[str, int]:
    numeric = _NUMERIC_RANGE.match(pattern, position)
    if numeric is None:
        inner, stop = _translate(pattern, position + 1, in_braces=True)
        return f"(?:{inner})", stop + 1
    low, high = numeric.groups()
    if not 0 <= int(high) - int(low) < _MAX_RANGE:
        raise ValueError(
            f"Pattern {pattern!r}: the range {numeric.group()} must have 1 to {_MAX_RANGE} numbers."
        )
    padded = any(len(end) > 1 and end.startswith("0") for end in (low, high))
    width = max(len(low), len(high)) if padded else 0
    numbers = (f"{number:0{width}d}" for number in range(int(low), int(high) + 1))
    return f"(?:{'|'.join(numbers)})", numeric.end()
