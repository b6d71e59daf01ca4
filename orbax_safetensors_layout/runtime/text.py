"""Sizes, counts and times as text, and parsed from text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kKMGT]?)(i?)B?(?:/s)?\s*")
_SECONDS = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs)?\s*")
_PER_SECOND = {None: 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6}


def size_text(count: float) -> str:
    """Return a number of bytes in decimal units, as Hugging Face does: `15.2 MB`."""
    return f"{_scaled(count, ' ')}B"


def count_text(count: float) -> str:
    """Return a number of parameters or requests: `8.03G`."""
    return _scaled(count, "")


def number_text(count: int, noun: str) -> str:
    """Return a number of things: `1,200 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """Return a time: `10 us`, `12 ms`, `12.3 s`, `12 min 34 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def parse_size(text: str) -> int:
    """Return bytes from `5GB`, `2GiB` or a plain number; `ValueError` for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for instance 5GB, 2GiB or 100MB/s")
    number, prefix, binary = match.groups()
    scale: int = (1024 if binary else 1000) ** _POWERS.get(prefix.upper(), 0)
    return round(float(number) * scale)


def parse_seconds(text: str) -> float:
    """Return seconds from `20ms`, `10us` or `0.02`; `ValueError` for anything else."""
    match = _SECONDS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; write for instance 20ms, 10us or 0.5s")
    number, unit = match.groups()
    return float(number) / _PER_SECOND[unit]


def _scaled(count: float, separator: str) -> str:
    value, power = float(count), 0
    while abs(value) >= 999.5 and power < len(_DECIMAL) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if power == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{separator}{_DECIMAL[power]}"


def text_table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Align rows in columns: the first `left` of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
