"""Glob-like patterns on whole tensor names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import InvalidArgumentError

_MAX_RANGE = 10_000
_MAX_DEPTH = 20
_MAX_LOOSE = 3
_NUMERIC_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_SET_ITEM = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_SPECIAL = frozenset("*?[{}")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a regular expression whose `fullmatch` is the pattern's.

    `*` is any text, dots included, and `?` any one character; `[abc]`, `[a-z]` and `[!abc]` are one
    character of a set; `{a,b}` is one of several patterns; `{0..15}` is a number of a range, both
    ends included, and `{00..15}` one with leading zeros. A special character stands for itself in
    a set: `[*]`.

    Raises:
        InvalidArgumentError: It is not a string, a bracket or brace is not closed or not opened, a
            range is empty or has more than 10,000 numbers, or the pattern would take long to match.

    >>> bool(compile_pattern("layers.{0..3}.*.{weight,bias}").fullmatch("layers.3.mlp.up.bias"))
    True
    """
    if not isinstance(pattern, str):
        raise InvalidArgumentError(f"A pattern of names is a string, not {pattern!r}.")
    return re.compile(_Translator(pattern).translate(), re.DOTALL)


def is_plain(pattern: str) -> bool:
    """Return whether a pattern has no special character, so that it matches itself alone."""
    return _SPECIAL.isdisjoint(pattern)


class _Part(NamedTuple):
    """The regular expression of a part of a pattern.

    Attributes:
        text: The expression.
        width: Number of characters that it matches; None if that varies.
        loose: Number of its `*`s that the matching may have to try again.
    """

    text: str
    width: int | None
    loose: int = 0


class _Alternative:
    """One of several patterns in braces, or a pattern itself.

    A `*` before a text of fixed width that another `*` follows is never tried again: the first
    place where the text matches will do. It is an atomic group, so that the time of matching is not
    exponential in the number of `*`s.
    """

    def __init__(self) -> None:
        self._done: list[str] = []
        self._texts: list[str] = []  # since the last `*`
        self._width: int | None = 0  # theirs
        self._loose = 0
        self._has_star = False

    def add(self, part: _Part) -> None:
        self._texts.append(part.text)
        fixed = self._width is not None and part.width is not None
        self._width = (self._width or 0) + (part.width or 0) if fixed else None
        self._loose += part.loose

    def star(self) -> None:
        if self._has_star and not self._texts:
            return
        self._close(atomic=self._width is not None)
        self._has_star, self._width = True, 0

    def finish(self) -> _Part:
        self._close(atomic=False)
        return _Part("".join(self._done), None if self._has_star else self._width, self._loose)

    def _close(self, *, atomic: bool) -> None:
        text = "".join(self._texts)
        if self._has_star:
            self._loose += not atomic
            text = f"(?>.*?{text})" if atomic else f".*{text}"
        self._done.append(text)
        self._texts = []


class _Translator:
    """Translates a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def translate(self) -> str:
        whole = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error(f"'}}' at {self._at} closes nothing")
        if whole.loose > _MAX_LOOSE:
            raise self._error(f"more than {_MAX_LOOSE} '*' beside braces take too long to match")
        return whole.text

    def _alternatives(self) -> _Part:
        """Parses up to the closing brace, or the end; commas separate only within braces."""
        alternatives = [_Alternative()]
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "}":
                break
            if character == "[":
                alternatives[-1].add(_Part(self._set(), 1))
                continue
            if character == "{":
                alternatives[-1].add(self._braces())
                continue
            self._at += 1
            if character == "*":
                alternatives[-1].star()
            elif character == "?":
                alternatives[-1].add(_Part(".", 1))
            elif character == "," and self._depth:
                alternatives.append(_Alternative())
            else:
                alternatives[-1].add(_Part(re.escape(character), 1))
        return _any_of([alternative.finish() for alternative in alternatives])

    def _braces(self) -> _Part:
        numeric = _NUMERIC_RANGE.match(self._pattern, self._at)
        if numeric is not None:
            self._at = numeric.end()
            numbers = self._numbers(*numeric.groups())
            return _any_of([_Part(number, len(number)) for number in numbers])
        if self._depth == _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} braces within one another")
        self._at += 1
        self._depth += 1
        part = self._alternatives()
        self._depth -= 1
        if self._at == len(self._pattern):
            raise self._error("a '{' is not closed")
        self._at += 1
        return part

    def _set(self) -> str:
        position = self._at
        start = position + 1
        negated = self._pattern.startswith("!", start)
        start += negated
        stop = self._pattern.find("]", start + 1)  # a ']' that comes first belongs to the set
        if stop < 0:
            raise self._error(f"the '[' at {position} is not closed")
        body = ""
        for low, high, single in _SET_ITEM.findall(self._pattern, start, stop):
            if high < low:
                raise self._error(f"the set range {low}-{high} is empty")
            body += re.escape(single) or f"{re.escape(low)}-{re.escape(high)}"
        self._at = stop + 1
        return f"[{'^' if negated else ''}{body}]"

    def _numbers(self, low: str, high: str) -> list[str]:
        if not 0 <= int(high) - int(low) < _MAX_RANGE:
            raise self._error(f"the range {{{low}..{high}}} must have 1 to {_MAX_RANGE} numbers")
        padded = any(len(end) > 1 and end.startswith("0") for end in (low, high))
        width = max(len(low), len(high)) if padded else 0
        return [f"{number:0{width}d}" for number in range(int(low), int(high) + 1)]

    def _error(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"Pattern {self._pattern[:200]!r}: {problem}.")


def _any_of(parts: Sequence[_Part]) -> _Part:
    widths = {part.width for part in parts}
    width = widths.pop() if len(widths) == 1 else None
    text = "|".join(part.text for part in parts)
    return _Part(f"(?:{text})", width, max(part.loose for part in parts))
