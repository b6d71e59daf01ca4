"""Names that differ by numbers alone, as one pattern: `model.layers.{0..61}.mlp.up_proj.weight`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

_NUMBER = re.compile(r"(?<![^._])(0|[1-9][0-9]*)(?![^.])")
_MOST_LISTED = 6
_SPECIAL = re.compile(r"([*?\[\]{},])")

Key = TypeVar("Key", bound=Hashable)


class NameFamily(NamedTuple, Generic[Key]):
    """Names that belong together.

    Attributes:
        pattern: A pattern, as `--filter` takes it, that matches them.
        kind: What they have in common.
        members: Numbers of the names, in the given order.
    """

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
    plain = all(len(found) == 1 for found in numbers)
    made = [texts[0] if plain else _SPECIAL.sub(r"[\1]", texts[0])]
    for text, found in zip(texts[1:], numbers, strict=True):
        made += [_span(sorted(found)), text if plain else _SPECIAL.sub(r"[\1]", text)]
    return "".join(made)


def _span(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    if last - first + 1 == len(numbers):
        return f"{{{first}..{last}}}"
    if len(numbers) <= _MOST_LISTED:
        return f"{{{','.join(map(str, numbers))}}}"
    return "*"
