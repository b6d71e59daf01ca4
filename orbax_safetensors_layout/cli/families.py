"""Joins names that differ by numbers alone to a pattern: `layers.{0..61}.mlp.up_proj.weight`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

_NUMBER = re.compile(r"(?<![^._])(0|[1-9][0-9]*)(?![^.])")
_MOST_LISTED = 6
_SPECIAL = re.compile(r"([*?\[\]{},])")

Key = TypeVar("Key", bound=Hashable)


class NameFamily(NamedTuple, Generic[Key]):
    """Names of one kind and pattern (as `--filter` takes it), by their numbers in order."""

    pattern: str
    kind: Key
    members: tuple[int, ...]


def name_families(named: Iterable[tuple[str, Key]]) -> list[NameFamily[Key]]:
    """Joins names of one kind that differ by whole numbers alone, as in `layers.0.w`, `layers_0.w`.

    Args:
        named: Names and their kinds.

    Returns:
        In the order of their first members.

    Example:
        >>> [found.pattern for found in name_families([("a.0.w", 1), ("b", 1), ("a.1.w", 1)])]
        ['a.{0..1}.w', 'b']
    """
    members: dict[tuple[tuple[str, ...], Key], list[int]] = {}
    numbers: dict[tuple[tuple[str, ...], Key], list[set[int]]] = {}
    for place, (name, kind) in enumerate(named):
        parts = _NUMBER.split(name)
        key = (tuple(parts[::2]), kind)
        members.setdefault(key, []).append(place)
        found = numbers.setdefault(key, [set() for _ in parts[1::2]])
        for known, number in zip(found, parts[1::2], strict=True):
            known.add(int(number))
    return [
        NameFamily(_pattern(texts, numbers[texts, kind]), kind, tuple(places))
        for (texts, kind), places in members.items()
    ]


def _pattern(texts: Sequence[str], numbers: Sequence[set[int]]) -> str:
    plain = all(len(values) == 1 for values in numbers)
    escaped = [text if plain else _SPECIAL.sub(r"[\1]", text) for text in texts]
    spans = [_span(sorted(values)) for values in numbers] + [""]
    return "".join(text + span for text, span in zip(escaped, spans, strict=True))


def _span(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    if last - first + 1 == len(numbers):
        return f"{{{first}..{last}}}"
    if len(numbers) <= _MOST_LISTED:
        return f"{{{','.join(map(str, numbers))}}}"
    return "*"
