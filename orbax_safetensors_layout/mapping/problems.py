"""Collects the problems of a mapping and lists them in one error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

from orbax_safetensors_layout.catalog import nearest_names
from orbax_safetensors_layout.errors import MappingError, group_lines

S = TypeVar("S")
T = TypeVar("T")
_MAX_SUGGESTIONS = 20
_KINDS = {
    "file": "tensors",
    "leaf": "leaves",
    "rule": "targets of rules",
    "lacking": "names that rules take and the checkpoint lacks",
}


class Problem(NamedTuple):
    """One problem of a mapping."""

    text: str  # a sentence without a final period
    kind: str = ""  # of many problems of one kind only the first are listed
    seek: str | None = None  # a name whose nearest existing names are listed,
    among: str = "file"  # of this kind, a key of `_KINDS`
    hint: str | None = None  # the remedy


class Problems(MappingError):
    """At least one problem, for the one error that lists all."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.text for problem in self.problems))


def problems_of(error: MappingError) -> tuple[Problem, ...]:
    """Return the problems of an error."""
    if isinstance(error, Problems):
        return error.problems
    return (Problem(error.message, hint=error.hint),)


def gather(call: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return the results for all items; the problems of all that fail are one `Problems`."""
    results: list[T] = []
    problems: list[Problem] = []
    for item in items:
        try:
            results.append(call(item))
        except MappingError as error:
            problems += problems_of(error)
    if problems:
        raise Problems(problems)
    return results


def within(error: MappingError, where: str, kind: str = "") -> Problems:
    """Return the problems of an error, each with the place where it was found."""
    return Problems(
        problem._replace(text=f"{where}: {problem.text}", kind=problem.kind or kind)
        for problem in problems_of(error)
    )


def mapping_error(
    what: str, problems: Collection[Problem], names: Mapping[str, Collection[str]]
) -> MappingError:
    """Return one error for at least one problem; `names` are those that exist, by kind."""
    unique = list(dict.fromkeys(problems))
    count = f"{len(unique)} problems" if len(unique) > 1 else "1 problem"
    searches = itertools.count()

    def line(problem: Problem) -> str:
        text = f"{problem.text}."
        if problem.seek is not None and next(searches) < _MAX_SUGGESTIONS:
            known = names.get(problem.among, ())
            if hint := nearest_names(problem.seek, known, _KINDS[problem.among]):
                text += f" {hint}"
        return f"{text} {problem.hint}" if problem.hint else text

    lines = group_lines(((p.kind or p, p) for p in unique), line)
    return MappingError("\n  - ".join([f"{what}: {count}.", *lines]))
