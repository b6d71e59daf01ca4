"""The table that `explain` prints."""

from __future__ import annotations

from collections.abc import Mapping

from .affine.bound import BoundExpr
from .affine.decoded import Computed
from .expr.opaque_ops import Whole

_HEAD = ("name", "shape", "dtype", "made of", "takes")


def table(
    expressions: Mapping[str, BoundExpr], ties: Mapping[str, str], notes: Mapping[str, str]
) -> str:
    """Names, shapes, expressions and sources, one a line.

    Args:
        expressions: What to print.
        ties: Names that hold what another name holds.
        notes: For each name how it is made.
    """
    rows = [_HEAD]
    for name, made in expressions.items():
        tied = f" (tied to {ties[name]!r})" if name in ties else ""
        shape = "[" + ", ".join(map(str, made.shape)) + "]"
        rows.append((name, shape, made.dtype.name, notes[name] + tied, _sources(made.sources())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for name, made in expressions.items():
        if any(isinstance(n, Computed) and isinstance(n.decoder, Whole) for n in made.nodes()):
            lines.append(f"{name}: every shard reads all that its opaque function takes.")
    return "\n".join(lines)


def _sources(names: tuple[str, ...]) -> str:
    if len(names) > 2:
        return f"{names[0]} … {names[-1]} ({len(names)} tensors)"
    return ", ".join(names) or "nothing"
