"""Messages about many names: of those that differ in numbers only, the first are told."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

MOST_LINES = 50
"""About as many lines has a message; what is beyond them is counted."""
_MOST_OF_A_KEY = 3

_NUMBERS = re.compile(r"(?<![^.'])[0-9]+(?![^.'])")


def pattern_of(text: str) -> str:
    """A name, or a text that quotes names, without the numbers that are components of a name.

    >>> pattern_of("'layers.7.mlp.w1' is missing")
    "'layers.#.mlp.w1' is missing"
    """
    return _NUMBERS.sub("#", text)


def grouped(items: Iterable[tuple[Hashable, str]]) -> list[str]:
    """The first texts of each key, and how many more there are.

    Args:
        items: Keys and texts.

    >>> grouped([("#.w", f"no '{i}.w'.") for i in range(9)] + [("b", "no 'b'.")])
    ["no '0.w'.", "no '1.w'.", "no '2.w'.", '... 6 more that differ in numbers only', "no 'b'."]
    """
    counts: dict[Hashable, int] = {}
    texts: dict[Hashable, list[str]] = {}
    for key, text in items:
        counts[key] = counts.get(key, 0) + 1
        some = texts.setdefault(key, [])
        if len(some) < _MOST_OF_A_KEY:
            some.append(text)
    lines: list[str] = []
    left = sum(counts.values())
    for key, some in texts.items():
        if len(lines) >= MOST_LINES:
            return [*lines, f"... {left:,} more"]
        more = counts[key] - len(some)
        lines += [*some, *([f"... {more:,} more that differ in numbers only"] if more else ())]
        left -= counts[key]
    return lines
