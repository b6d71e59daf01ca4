"""Selects tensors by glob-like patterns of whole names; errors suggest similar names."""

from __future__ import annotations

import difflib
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

from orbax_safetensors_layout.errors import (
    InvalidArgumentError,
    MissingTensorError,
    listed,
    pattern_of,
)

_CANDIDATES = 24  # names that are compared letter by letter
_MAX_HINTS = 5  # suggestions in one error; each is a pass over all names
_MAX_PARTS = 1000  # components of names that those of a pattern are compared with
_MAX_PREFIX = 4  # components
_MAX_RANGE = 10_000
_DOT = re.compile(r"\.")
_TOKEN = re.compile(
    r"\{(?P<low>[0-9]{1,18})\.\.(?P<high>[0-9]{1,18})\}"
    r"|\[(?P<not>(?>!?))(?P<set>.[^\]]*)\]"  # a ']' that comes first belongs to the set
    r"|[*?{},\[]|[^*?{},\[]+",
    re.DOTALL,
)
_SET_ITEM = re.compile(r"(.)-(.)|(.)", re.DOTALL)
_SPECIAL = frozenset("*?[{}")


def select_names(names: Collection[str], patterns: str | Sequence[str], *, path: str) -> list[str]:
    """Return the names that match any of some patterns; see `Catalog.select`."""
    known = frozenset(names)
    chosen: set[str] = set()
    unmatched: list[tuple[str, str]] = []
    is_single = isinstance(patterns, str) or not hasattr(patterns, "__iter__")
    given: Any = [patterns] if is_single else patterns
    for pattern in given:
        if not isinstance(pattern, str):
            text = f"Tensors are chosen by patterns, which are strings, not {patterns!r}"
            raise InvalidArgumentError(text, file=path)
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
            hint = _nearest_pattern(name, names) or nearest_names(name, names)
        errors.append(MissingTensorError(problem, file=path, tensor=name, hint=hint))
    return MissingTensorError.collect(errors)


def _nearest_pattern(pattern: str, names: Collection[str]) -> str | None:
    """Return a hint with a similar pattern and what it matches, if there is one."""
    if is_plain(pattern):
        return None
    known = dict.fromkeys(part for name in names for part in name.split("."))
    parts = [part for part in known if not part.isdecimal()][:_MAX_PARTS]

    def mended(part: str) -> str:
        similar = difflib.get_close_matches(part, parts, 1) if is_plain(part) else []
        return similar[0] if similar and part not in known else part

    similar = ".".join(map(mended, pattern.split(".")))
    for wider in (similar, f"*{pattern}", f"*{similar}", f"*{similar}*"):
        other = wider.replace("**", "*")
        try:
            matching = [] if other == pattern else _matching(names, known.keys(), other)
        except InvalidArgumentError:  # it is a name, and no pattern
            continue
        if matching:
            return f"{other!r} matches {listed(map(repr, matching), 3)}."
    return None


def added_prefixes(longer: Collection[str], shorter: Set[str]) -> list[str]:
    """Return the components, each dotted, that half of the longer or shorter names differ by.

    Of several that differ so, as parameters and their moments do, all are returned.

    >>> added_prefixes(["params.a.w", "params.b.w", "step"], {"a.w", "b.w"})
    ['params.']
    """
    counts = Counter(
        name[:end]
        for name in longer
        for end in (dot.end() for dot in itertools.islice(_DOT.finditer(name), _MAX_PREFIX))
        if name[end:] in shorter
    )
    most = max(counts.values(), default=0)
    if not most or 2 * most < min(len(longer), len(shorter)):
        return []
    return [prefix for prefix, count in counts.items() if count == most]


def nearest_names(name: str, names: Collection[str], what: str = "names") -> str | None:
    """Return a hint that lists similar names, if there are any."""
    suggestions = suggest_names(name, names)
    return f"The nearest {what} are {', '.join(map(repr, suggestions))}." if suggestions else None


def suggest_names(name: str, names: Collection[str], count: int = 3) -> list[str]:
    """Return up to `count` of `names` that are similar to `name`, the most similar first.

    `difflib` takes minutes for the names of a large checkpoint, and 40 ms for those of a small one,
    so it compares only those that share the most dotted components with `name`.

    >>> suggest_names("layers.0.kernel", ["layers.0.weight", "layers.10.weight", "embed"])
    ['layers.0.weight', 'layers.10.weight']
    """
    parts = frozenset(name.split("."))
    length = len(name)

    def likeness(other: str) -> tuple[int, int]:
        return len(parts.intersection(other.split("."))), -abs(len(other) - length)

    candidates = heapq.nlargest(_CANDIDATES, names, key=likeness)
    return difflib.get_close_matches(name, candidates, n=count)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a regular expression whose `fullmatch` is the pattern's.

    `*` is any text, dots included, and `?` any one character; `[abc]`, `[a-z]` and `[!abc]` are one
    character of a set; `{a,b}` is one of several patterns; `{0..15}` is a number of a range, both
    ends included, and `{00..15}` one with leading zeros. A special character stands for itself in
    a set: `[*]`. Malformed patterns are refused.

    >>> bool(compile_pattern("layers.{0..3}.*.{weight,bias}").fullmatch("layers.3.mlp.up.bias"))
    True
    """
    if not isinstance(pattern, str):
        raise InvalidArgumentError(f"A pattern of names is a string, not {pattern!r}.")
    try:
        return re.compile(_translated(pattern), re.DOTALL)
    except ValueError as error:
        raise InvalidArgumentError(f"Pattern {pattern[:200]!r}: {error}.") from error


def patterns_of(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return patterns that match all of some names, of whole subtrees, and none of the others.

    >>> patterns_of(["rngs.key", "rngs.count", "layers.0.seed", "step"], ["layers.0.w"])
    ['rngs.*', 'layers.*.seed', 'step']
    """
    kept = list(dict.fromkeys(map(pattern_of, others)))
    patterns: dict[str, None] = {}
    for kind in dict.fromkeys(map(pattern_of, names)):
        pattern = re.sub(r"[*?{},[]", r"[\g<0>]", kind).replace("#", "*")
        wider = [f"{pattern[: dot.end()]}*" for dot in _DOT.finditer(pattern)]
        fitting = (p for p in wider if not any(map(compile_pattern(p).fullmatch, kept)))
        patterns[next(fitting, pattern)] = None
    return [*patterns]


def is_plain(pattern: str) -> bool:
    """Return whether a pattern has no special character, so that it matches itself alone."""
    return _SPECIAL.isdisjoint(pattern)


def _translated(pattern: str) -> str:
    levels = [[""]]  # for each open brace its alternatives, as regular expressions
    for token in _TOKEN.finditer(pattern):
        alternatives, text = levels[-1], token[0]
        part = re.escape(text)
        if token["low"]:
            part = _number(token["low"], token["high"])
        elif token["set"]:
            part = f"[{'^' if token['not'] else ''}{_set_body(token['set'])}]"
        elif text == "*":
            part = "" if alternatives[-1].endswith(".*") else ".*"
        elif text == "?":
            part = "."
        elif text == "[":
            raise ValueError(f"the '[' at {token.start()} is not closed")
        elif text == "{":
            levels.append([""])
            continue
        elif text == "," and len(levels) > 1:
            alternatives.append("")
            continue
        elif text == "}":
            if len(levels) == 1:
                raise ValueError(f"'}}' at {token.start()} has no '{{' before it")
            part = f"(?:{'|'.join(levels.pop())})"
        levels[-1][-1] += part
    if len(levels) > 1:
        raise ValueError("a '{' is not closed")
    return levels[0][0]


def _set_body(text: str) -> str:
    body = ""
    for low, high, single in _SET_ITEM.findall(text):
        if high < low:
            raise ValueError(f"the set range {low}-{high} is empty")
        body += re.escape(single) or f"{re.escape(low)}-{re.escape(high)}"
    return body


def _number(low: str, high: str) -> str:
    if not 0 <= int(high) - int(low) < _MAX_RANGE:
        raise ValueError(f"the range {{{low}..{high}}} must have 1 to {_MAX_RANGE} numbers")
    padded = any(len(end) > 1 and end.startswith("0") for end in (low, high))
    width = max(len(low), len(high)) if padded else 0
    numbers = (f"{number:0{width}d}" for number in range(int(low), int(high) + 1))
    return f"(?:{'|'.join(numbers)})"
