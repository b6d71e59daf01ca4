"""Writes results to stdout and messages to stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from orbax_safetensors_layout.runtime import text_table

_SURROGATES = {n: f"\\u{n:04x}" for n in (*range(0xD800, 0xDC80), *range(0xDD00, 0xE000))}
"""Surrogates that JSON can hold and no stream takes; the others are bytes of paths."""

_CONTROLS = _SURROGATES | {
    n: repr(chr(n))[1:-1] for n in (*range(32), *range(127, 160)) if chr(n) != "\n"
}
"""Control characters of a terminal, which a file may put into names of its tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The two streams of a command; `quiet` leaves out messages but errors, and progress."""

    program: str
    quiet: bool = False

    @property
    def progress(self) -> bool:
        """The option `progress` of an operation."""
        return not self.quiet

    def result(self, text: str) -> None:
        """Writes a result to stdout."""
        sys.stdout.write(text.translate(_CONTROLS) + "\n")

    def json(self, document: object) -> None:
        """Writes a result to stdout as one JSON document."""
        text = json.dumps(document, indent=2, ensure_ascii=False)
        sys.stdout.write(text.translate(_SURROGATES) + "\n")

    def message(self, text: str) -> None:
        """Writes a line to stderr, unless it is quiet."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        """Writes a line to stderr."""
        sys.stdout.flush()  # in order, where both streams are one
        sys.stderr.write(f"{self.program}: {text.translate(_CONTROLS)}\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format rows in columns.

    Args:
        header: The head of each column.
        rows: The cells.
        left: Number of columns that are aligned to the left; the others hold numbers.

    Example:
        >>> print(table(["name", "bytes"], [["a", "1"], ["bcdef", "10"]]))
        name   bytes
        a          1
        bcdef     10
    """
    lines = [
        [cell.replace("\n", "\\n").translate(_CONTROLS) for cell in row] for row in [header, *rows]
    ]
    return text_table(lines, left)
