"""The nearest of many names, at a bounded cost, for messages about a missing one."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Collection

_FEW = 512
_CANDIDATES = 64


def suggest_names(name: str, names: Collection[str], count: int = 3) -> list[str]:
    """Up to `count` of `names` that look like `name`, the most alike first.

    `difflib` takes minutes over the names of a large checkpoint, so of many only those that share
    the most dotted components with `name` are given to it.

    >>> nearest_names("layers.0.kernel", ["layers.0.weight", "layers.10.weight", "embed"])
    ['layers.0.weight', 'layers.10.weight']
    """
    parts = frozenset(name.split("."))
    length = len(name)

    def likeness(other: str) -> tuple[int, int]:
        return len(parts.intersection(other.split("."))), -abs(len(other) - length)

    many = len(names) > _FEW
    candidates = heapq.nlargest(_CANDIDATES, names, key=likeness) if many else names
    return difflib.get_close_matches(name, candidates, n=count)
