"""Selects tensors by patterns of names; errors suggest similar names."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Collection, Sequence
from typing import Any

from orbax_safetensors_layout.errors import InvalidArgumentError, MissingTensorError, pattern_of

from .patterns import compile_pattern, is_plain

_FEW = 512
_CANDIDATES = 64
_MAX_HINTS = 5  # suggestions in one error; each is a pass over all names


def select_names(names: Collection[str], patterns: str | Sequence[str], *, path: str) -> list[str]:
    """Return the names that match any of some patterns; see `Catalog.select`."""
    known = frozenset(names)
    chosen: set[str] = set()
    unmatched: list[tuple[str, str]] = []
    is_single = isinstance(patterns, str) or not hasattr(patterns, "__iter__")
    given: list[Any] = [patterns] if is_single else list(patterns)
    if not all(isinstance(pattern, str) for pattern in given):
        text = f"Tensors are chosen by patterns, which are strings, not {patterns!r}"
        raise InvalidArgumentError(text, file=path)
    for pattern in given:
        if is_plain(pattern):
            matching = [pattern] if pattern in known else []
            problem = f"Tensor '{pattern}' not found"
        else:
            matching = _matching(names, known, pattern)
            problem = f"Pattern '{pattern}' matches no tensor"
        if not matching:
            unmatched.append((problem, pattern))
        chosen.update(matching)
    if unmatched:
        raise missing_names(unmatched, names, path=path)
    return [name for name in names if name in chosen]


def _matching(names: Collection[str], known: Collection[str], pattern: str) -> list[str]:
    try:
        matches = compile_pattern(pattern).fullmatch
    except InvalidArgumentError:
        if pattern in known:  # it is a name, and no pattern
            return [pattern]
        raise
    return [name for name in names if name == pattern or matches(name)]


def missing_names(
    problems: Sequence[tuple[str, str]], names: Collection[str], *, path: str
) -> MissingTensorError:
    """Return one error for pairs of a message and a name or pattern, with similar `names`."""
    errors = []
    sought: set[str] = set()  # patterns: of names that differ in numbers the first is looked up
    for problem, name in problems:
        hint = None
        if len(sought) < _MAX_HINTS and (pattern := pattern_of(name)) not in sought:
            sought.add(pattern)
            nearest = suggest_names(name, names)
            hint = f"The nearest names are {', '.join(map(repr, nearest))}." if nearest else None
        errors.append(MissingTensorError(problem, file=path, tensor=name, hint=hint))
    return MissingTensorError.collect(errors)


def suggest_names(name: str, names: Collection[str], count: int = 3) -> list[str]:
    """Return up to `count` of `names` that are similar to `name`, the most similar first.

    `difflib` takes minutes for the names of a large checkpoint, so of many it compares only those
    that share the most dotted components with `name`.

    >>> suggest_names("layers.0.kernel", ["layers.0.weight", "layers.10.weight", "embed"])
    ['layers.0.weight', 'layers.10.weight']
    """
    parts = frozenset(name.split("."))
    length = len(name)

    def likeness(other: str) -> tuple[int, int]:
        return len(parts.intersection(other.split("."))), -abs(len(other) - length)

    many = len(names) > _FEW
    candidates = heapq.nlargest(_CANDIDATES, names, key=likeness) if many else names
    return difflib.get_close_matches(name, candidates, n=count)
