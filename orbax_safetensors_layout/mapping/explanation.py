"""Formats bound expressions as the table that `explain` prints."""

from __future__ import annotations

from collections.abc import Mapping

from orbax_safetensors_layout.runtime import text_table

from .affine.bound import BoundExpr
from .affine.decoded import Computed
from .expr.opaque_ops import Whole

_HEAD = ("name", "shape", "dtype", "made of", "takes")


def table(
    expressions: Mapping[str, BoundExpr], ties: Mapping[str, str], notes: Mapping[str, str]
) -> str:
    """Return a table of names, shapes, expressions and sources; see `BoundMapping`."""
    rows = [_HEAD]
    for name, bound in expressions.items():
        tied = f" (tied to {ties[name]!r})" if name in ties else ""
        shape = str([*bound.shape])
        rows.append((name, shape, bound.dtype.name, notes[name] + tied, _sources(bound.sources())))
    lines = [text_table(rows, len(_HEAD))]
    for name, bound in expressions.items():
        if any(isinstance(n, Computed) and isinstance(n.decoder, Whole) for n in bound.nodes()):
            lines.append(f"{name}: every shard reads all that its opaque function takes.")
    return "\n".join(lines)


def _sources(names: tuple[str, ...]) -> str:
    if len(names) > 2:
        return f"{names[0]} … {names[-1]} ({len(names)} tensors)"
    return ", ".join(names) or "nothing"
