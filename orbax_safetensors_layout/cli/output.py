"""Writes results to stdout and messages to stderr; formats tables, and patterns of names."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from orbax_safetensors_layout.runtime import text_table

PROGRAM = "orbax-safetensors"

_SURROGATES = {n: f"\\u{n:04x}" for n in (*range(0xD800, 0xDC80), *range(0xDD00, 0xE000))}
"""Surrogates that JSON can hold and no stream takes; the others are bytes of paths."""

_CONTROLS = _SURROGATES | {
    n: repr(chr(n))[1:-1] for n in (*range(32), *range(127, 160)) if chr(n) != "\n"
}
"""Control characters of a terminal, which a file may put into names of its tensors."""

_NUMBER = re.compile(r"(?<![^._])(0|[1-9][0-9]*)(?![^.])")
_MOST_LISTED = 6
_SPECIAL = re.compile(r"([*?\[\]{},])")

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The two streams of a command; `quiet` leaves out messages but errors, and progress."""

    quiet: bool = False

    def result(self, text: str) -> None:
        sys.stdout.write(text.translate(_CONTROLS) + "\n")

    def json(self, document: object) -> None:
        text = json.dumps(document, indent=2, ensure_ascii=False)
        sys.stdout.write(text.translate(_SURROGATES) + "\n")

    def message(self, text: str) -> None:
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        sys.stdout.flush()  # in order, where both streams are one
        sys.stderr.write(f"{PROGRAM}: {text.translate(_CONTROLS)}\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format rows in columns, the first `left` aligned to the left; the others hold numbers."""
    lines = [
        [cell.replace("\n", "\\n").translate(_CONTROLS) for cell in row] for row in [header, *rows]
    ]
    return text_table(lines, left)


class NameFamily(NamedTuple, Generic[Key]):
    """Names of one kind and pattern, as `layers.{0..61}.w`, which `--filter` takes."""

    pattern: str
    kind: Key
    members: tuple[int, ...]  # places of the names


def name_families(named: Iterable[tuple[str, Key]]) -> list[NameFamily[Key]]:
    """Joins names, given with kinds, of one kind that differ by whole numbers alone, in order."""
    members: dict[tuple[tuple[str, ...], Key], list[int]] = {}
    numbers: dict[tuple[tuple[str, ...], Key], list[set[int]]] = {}
    for place, (name, kind) in enumerate(named):
        parts = _NUMBER.split(name)
        key = (tuple(parts[::2]), kind)
        members.setdefault(key, []).append(place)
        columns = numbers.setdefault(key, [set() for _ in parts[1::2]])
        for column, number in zip(columns, parts[1::2], strict=True):
            column.add(int(number))
    return [
        NameFamily(_pattern(texts, numbers[texts, kind]), kind, tuple(places))
        for (texts, kind), places in members.items()
    ]


def _pattern(texts: Sequence[str], columns: Sequence[set[int]]) -> str:
    spans = [_span(sorted(column)) for column in columns] + [""]
    if not all(span.isdecimal() for span in spans[:-1]):
        texts = [_SPECIAL.sub(r"[\1]", text) for text in texts]
    return "".join(text + span for text, span in zip(texts, spans, strict=True))


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}" if len(numbers) <= _MOST_LISTED else "*"
