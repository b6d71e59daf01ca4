"""Where a verb writes: results to stdout, messages to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

_SURROGATES = {n: f"\\u{n:04x}" for n in (*range(0xD800, 0xDC80), *range(0xDD00, 0xE000))}
"""Halves of pairs, which JSON can hold and no stream takes alone; others are bytes of paths."""

_CONTROLS = _SURROGATES | {
    n: repr(chr(n))[1:-1] for n in (*range(32), *range(127, 160)) if chr(n) != "\n"
}
"""What a terminal would take for a command, in names that a file may give to its tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The two streams of a verb.

    Attributes:
        program: The program's name, which begins each message.
        quiet: Write no messages but errors, and draw no progress.
    """

    program: str
    quiet: bool = False

    @property
    def progress(self) -> bool:
        """What the options of an operation are given as `progress`."""
        return not self.quiet

    def result(self, text: str) -> None:
        """Writes a result to stdout, and ends the line."""
        sys.stdout.write(text.translate(_CONTROLS) + "\n")

    def json(self, document: object) -> None:
        """Writes a result to stdout as one JSON document."""
        text = json.dumps(document, indent=2, ensure_ascii=False)
        sys.stdout.write(text.translate(_SURROGATES) + "\n")

    def message(self, text: str) -> None:
        """Writes a line to stderr, unless it shall be quiet."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Writes a line to stderr."""
        sys.stdout.flush()  # in the order in which things were said, where both are one
        sys.stderr.write(f"{self.program}: {text.translate(_CONTROLS)}\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows in columns.

    Args:
        header: The head of each column.
        rows: The cells.
        left: How many columns stand to the left; the others hold numbers and stand to the right.

    Example:
        >>> print(table(["name", "bytes"], [["a", "1"], ["bcdef", "10"]]))
        name   bytes
        a          1
        bcdef     10
    """
    lines = [
        [cell.replace("\n", "\\n").translate(_CONTROLS) for cell in row] for row in [header, *rows]
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
