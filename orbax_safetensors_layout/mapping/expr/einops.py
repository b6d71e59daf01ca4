"""Parses the notation of `rearrange`, `"(h d) e -> e h d"`, as the einops library defines it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orbax_safetensors_layout.errors import MappingError

from ..inverse.inference import Extent, product, quotient

_TOKEN = re.compile(r"\s*(\.\.\.|\(|\)|\w+|\S)")
_ELLIPSIS = ("...",)

Groups = tuple[tuple[str, ...], ...]
"""For each axis the names of the factors it is merged of; none for an axis of extent 1."""


class Pattern(NamedTuple):
    """The axes of the operand and of the result."""

    left: Groups
    right: Groups


def parse(text: str) -> Pattern:
    """Parse a pattern; its `...` becomes a group of its own.

    >>> parse("(h d) e -> e h d").left
    (('h', 'd'), ('e',))
    """
    halves = text.split("->")
    if len(halves) != 2:
        raise _malformed(text, "it needs one '->'")
    left, right = (_groups(text, half) for half in halves)
    names = [[name for group in side for name in group] for side in (left, right)]
    for side in names:
        repeated = sorted({name for name in side if side.count(name) > 1})
        if repeated:
            raise _malformed(text, f"{', '.join(map(repr, repeated))} is twice on one side")
    single = sorted(set(names[0]) ^ set(names[1]))
    if single:
        raise _malformed(text, f"{', '.join(map(repr, single))} is on one side only")
    return Pattern(left, right)


def expand(pattern: Pattern, rank: int, side: str) -> Pattern:
    """Replace the `...` of a pattern by names, for the rank of its `"left"` or `"right"` array."""
    groups = pattern.left if side == "left" else pattern.right
    hidden = rank - len(groups) + (_ELLIPSIS in groups)
    if hidden < 0 or (hidden and _ELLIPSIS not in groups):
        raise MappingError(f"the pattern has {len(groups)} axes, the shape {rank}")
    names = tuple((f"...{i}",) for i in range(hidden))

    def put(groups: Groups) -> Groups:
        return tuple(n for group in groups for n in (names if group == _ELLIPSIS else (group,)))

    return Pattern(put(pattern.left), put(pattern.right))


def solve(groups: Groups, shape: Sequence[Extent], sizes: Mapping[str, int]) -> dict[str, Extent]:
    """Return the extent of each name of one side, of its axes' extents and known `sizes`."""
    extents = {name: Extent(n) for name, n in sizes.items()}
    for axis, (group, extent) in enumerate(zip(groups, shape, strict=True)):
        unknown = [name for name in group if name not in extents]
        if len(unknown) > 1:
            raise MappingError(
                f"the sizes of {' and '.join(map(repr, unknown))}, which make axis {axis}"
                f" of extent {extent}, are not known",
                hint=f"Give all but one of them: rearrange(..., {unknown[-1]}=...).",
            )
        size = quotient(extent, product(extents[name] for name in group if name in extents))
        if size is None or (not unknown and size != Extent(1) and size.exact):
            known = " * ".join(f"{name}={extents[name]}" for name in group if name in extents)
            problem = f"is not a multiple of {known}" if unknown else f"is not {known or 1}"
            raise MappingError(f"axis {axis} has extent {extent}, which {problem}")
        if unknown:
            extents[unknown[0]] = size
    return extents


def _groups(text: str, half: str) -> Groups:
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for token in _TOKEN.findall(half):
        if token == "(" and inside is None:
            inside = []
        elif token == ")" and inside is not None:
            groups.append(tuple(inside))
            inside = None
        elif token == "..." and inside is None and _ELLIPSIS not in groups:
            groups.append(_ELLIPSIS)
        elif token == "1" or token.isidentifier():
            names = () if token == "1" else (token,)
            if inside is None:
                groups.append(names)
            else:
                inside.extend(names)
        else:
            raise _malformed(text, f"{token!r} is not understood here")
    if inside is not None:
        raise _malformed(text, "a '(' is not closed")
    return tuple(groups)


def _malformed(text: str, problem: str) -> MappingError:
    return MappingError(
        f"rearrange pattern {text!r}: {problem}",
        hint="It is written as in einops: 'a (b c) ... -> b a c ...'.",
    )
