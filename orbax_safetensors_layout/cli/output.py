"""Writes results to stdout and messages to stderr; formats tables, and patterns of names."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TextIO, TypeVar

from orbax_safetensors_layout.runtime import text_table

PROGRAM = "orbax-safetensors"

_SURROGATES = {n: f"\\u{n:04x}" for n in (*range(0xD800, 0xDC80), *range(0xDD00, 0xE000))}
"""Surrogates that JSON can hold and no stream takes; the others are bytes of paths."""

_CONTROLS = _SURROGATES | {
    n: repr(chr(n))[1:-1] for n in (*range(32), *range(127, 160)) if chr(n) != "\n"
}
"""Control characters of a terminal, which a file may put into names of its tensors."""

_NUMBER = re.compile(r"(?<![^._])(0|[1-9][0-9]{0,17})(?![^.])")
_LABEL = re.compile(r"\S.*? {2,}")
_MARGIN = 2
_MOST_LISTED = 6
_SPECIAL = re.compile(r"([*?\[\]{},])")

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The two streams of a command; `quiet` leaves out messages but errors, and progress."""

    quiet: bool = False

    def result(self, text: str) -> None:
        sys.stdout.write(_fitted(text.translate(_CONTROLS), sys.stdout) + "\n")

    def json(self, document: object) -> None:
        text = json.dumps(document, indent=2, ensure_ascii=False)
        sys.stdout.write(text.translate(_SURROGATES) + "\n")

    def message(self, text: str) -> None:
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Writes a text, whose further lines are indented, to stderr."""
        sys.stdout.flush()  # in order, where both streams are one
        text = f"{PROGRAM}: {text.translate(_CONTROLS)}"
        sys.stderr.write(_fitted(text, sys.stderr) + "\n")


def _columns(stream: TextIO) -> int | None:
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _fitted(text: str, stream: TextIO) -> str:
    """Wrap lines that a terminal would break within words, each below its label if it has one."""
    width = _columns(stream)
    if width is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        label = _LABEL.match(line)
        wrapped = _wrapped(line, width, label.end() if label else _MARGIN)
        if max(map(len, wrapped), default=0) > width:
            wrapped = _wrapped(line, width, _MARGIN)
        lines += wrapped or [line]
    return "\n".join(lines)


def _wrapped(line: str, width: int, margin: int) -> list[str]:
    deeper = len(line) - len(line.lstrip()) + margin
    indent = " " * min(deeper, width // 3)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    optional: str | None = None,
) -> str:
    """Format rows in columns, the first `left` aligned to the left; the others hold numbers.

    On a terminal that is too narrow column `optional` is left out; then the first cell of each row
    gets a line of its own.
    """
    lines = [
        [cell.replace("\n", "\\n").translate(_CONTROLS) for cell in row] for row in [header, *rows]
    ]
    text, width = text_table(lines, left), _columns(sys.stdout)
    if width is None or _extent(text) <= width:
        return text
    if optional in header:
        place = header.index(optional)
        lines = [line[:place] + line[place + 1 :] for line in lines]
        left -= place < left
        text = text_table(lines, left)
    if _extent(text) <= width:
        return text
    rest = text_table([line[1:] for line in lines], left - 1).split("\n")
    return "\n".join(f"{line[0]}\n    {others}" for line, others in zip(lines, rest, strict=True))


def _extent(text: str) -> int:
    return max(map(len, text.split("\n")))


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
