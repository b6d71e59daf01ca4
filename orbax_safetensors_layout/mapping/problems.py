"""Collects the problems of a mapping and lists them in one error."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

from orbax_safetensors_layout.catalog import suggest_names
from orbax_safetensors_layout.errors import MOST_LINES, MappingError

T = TypeVar("T")
_MAX_ALIKE = 3
_MAX_NEAREST = 20
_NEAREST = {
    "file": "The nearest tensors are",
    "leaf": "The nearest leaves are",
    "rule": "The nearest targets of rules are",
    "lacking": "Rules take, and the checkpoint lacks,",
}


class Problem(NamedTuple):
    """One problem.

    Attributes:
        text: A sentence without a final period.
        kind: Of many problems of one kind only the first are listed.
        seek: A name whose nearest existing names are listed.
        among: Where to seek: names of tensors (`"file"`) or leaves (`"leaf"`), targets of rules
            (`"rule"`), or names that rules take and the checkpoint lacks (`"lacking"`).
        hint: The remedy.
    """

    text: str
    kind: str = ""
    seek: str | None = None
    among: str = "file"
    hint: str | None = None


class Problems(MappingError):
    """At least one problem, for the one error that lists all."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        texts = [problem.text for problem in self.problems]
        super().__init__(texts[0] if len(texts) == 1 else "\n".join(texts))


def problems_of(error: MappingError) -> tuple[Problem, ...]:
    """Return the problems of an error."""
    if isinstance(error, Problems):
        return error.problems
    return (Problem(error.message, hint=error.hint),)


def gather(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Return the results of all calls; the problems of all that fail are one `Problems`."""
    results: list[T] = []
    problems: list[Problem] = []
    for call in calls:
        try:
            results.append(call())
        except MappingError as error:
            problems += problems_of(error)
    if problems:
        raise Problems(problems)
    return results


def within(error: MappingError, where: str) -> Problems:
    """Return the problems of an error, each with the place where it was found."""
    return Problems(p._replace(text=f"{where}: {p.text}") for p in problems_of(error))


def mapping_error(
    what: str, problems: Collection[Problem], names: Mapping[str, Collection[str]]
) -> MappingError:
    """Return one error for all problems.

    Args:
        what: The begin of its text.
        problems: At least one.
        names: For each `Problem.among` the names that exist.
    """
    unique = list(dict.fromkeys(problems))
    count = f"{len(unique)} problems" if len(unique) > 1 else "1 problem"
    lines, sought, left = [f"{what}: {count}."], 0, 0
    shown: dict[str, int] = {}
    totals = collections.Counter(problem.kind for problem in unique)
    for problem in unique:
        seen = shown[problem.kind] = shown.get(problem.kind, 0) + 1
        if problem.kind and seen > _MAX_ALIKE:
            if seen == _MAX_ALIKE + 1:
                lines.append(
                    f"  - {totals[problem.kind] - _MAX_ALIKE} more like it ({problem.kind})."
                )
            continue
        if len(lines) > MOST_LINES:
            left += 1
            continue
        line = f"  - {problem.text}."
        if problem.seek is not None and sought < _MAX_NEAREST:
            sought += 1
            nearest = suggest_names(problem.seek, names.get(problem.among, ()))
            if nearest:
                line += f" {_NEAREST[problem.among]} {', '.join(map(repr, nearest))}."
        lines.append(f"{line} {problem.hint}" if problem.hint else line)
    if left:
        lines.append(f"  - and {left:,} more.")
    return MappingError("\n".join(lines))
