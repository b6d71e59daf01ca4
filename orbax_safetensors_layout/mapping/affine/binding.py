"""A mapping's rules bound to the names and shapes of both sides; all problems in one error."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

from orbax_safetensors_layout.errors import MappingError, pattern_of

from ..explanation import table
from ..expr.expression import Expr, given
from ..matching import (
    LeafShapes,
    Rule,
    RuleTarget,
    group_by_pattern,
    match_rules,
)
from ..names import WILDCARD, Captures, substitute
from ..problems import Problem, mapping_error, problems_of
from ..shapes import TensorSpec, TensorSpecs
from .bound import BoundExpr


@dataclasses.dataclass(frozen=True, slots=True)
class BoundMapping:
    """Expressions by name, each with known shape and dtype.

    Attributes:
        expressions: Loading: each leaf as an expression over the checkpoint's tensors. Saving:
            each tensor as an expression over leaves.
        ties: Leaves that hold what another leaf holds, and that leaf. Where they are made alike
            both have the same expression. Saving has none: such leaves are left out.
        notes: For each name what `explain` says of how it is made.
    """

    expressions: dict[str, BoundExpr]
    ties: dict[str, str]
    notes: dict[str, str]

    def facts(self) -> dict[str, TensorSpec]:
        """Shape and dtype by name."""
        return {name: TensorSpec(made.shape, made.dtype) for name, made in self.expressions.items()}

    def explain(self) -> str:
        """A table of names, shapes, expressions and what they take."""
        return table(self.expressions, self.ties, self.notes)


class Binder:
    """Binds rules and gathers what is wrong.

    Args:
        rules: The rules.
        facts: The checkpoint's tensors.
        leaves: The model's leaves; None takes those that the checkpoint gives.
    """

    def __init__(
        self, rules: Sequence[Rule], facts: TensorSpecs, leaves: LeafShapes | None
    ) -> None:
        self._rules = rules
        self._facts = facts
        self._leaves = leaves
        self._problems: list[Problem] = []
        self._used: set[str] = set()
        self._missing: dict[str, None] = {}

    def bind(self) -> BoundMapping:
        """Binds every leaf; what fails is left out and kept for `raise_problems`."""
        made: dict[str, BoundExpr] = {}
        notes: dict[str, str] = {}
        found, ambiguous, problems = match_rules(self._rules, self._facts, self._leaves)
        self._problems += problems
        for leaf, rule, captures in found:
            if rule.expr is not None:
                self._bind_leaf(leaf, rule.expr, rule.target, captures, made)
                notes[leaf] = repr(rule.expr)
        for _, rule, captures in ambiguous:
            self._mark_used(rule.expr, captures)
        ties = self._tie(found, made, notes)
        order = [target.leaf for target in found if target.leaf in made]
        return BoundMapping({leaf: made[leaf] for leaf in order}, ties, notes)

    def _tie(
        self, found: Sequence[RuleTarget], made: dict[str, BoundExpr], notes: dict[str, str]
    ) -> dict[str, str]:
        """The ties; gives tied leaves without an expression, or of an equal one, the other's."""
        leaves = {target.leaf for target in found}
        ties: dict[str, str] = {}
        for leaf, rule, captures in found:
            if rule.tied_to is None:
                continue
            other = substitute(rule.tied_to, captures)
            if other in leaves and _takes_no_more(made.get(leaf), made.get(other)):
                ties[leaf] = other
            if leaf in made and made[leaf] == made.get(other):
                made[leaf] = made[other]  # the very same: loading knows them by that
            if rule.expr is None and other in made:
                made[leaf], notes[leaf] = made[other], f"as {other!r}"
                self._check_shape(leaf, made[leaf], notes[leaf], rule.target)
            elif rule.expr is None and other not in leaves:
                text = f"leaf {leaf!r} is tied to {other!r}, which no rule makes"
                self._problems.append(Problem(text, f"rule {rule.target!r}", other, "leaf"))
        return ties

    def check_unused(self, ignored: Iterable[re.Pattern[str]]) -> None:
        """Adds a problem for every tensor that is neither used nor ignored."""
        unused = [
            name
            for name in self._facts
            if name not in self._used and not any(p.fullmatch(name) for p in ignored)
        ]
        hint: str | None = "Add rules for such, or name them in Mapping(..., ignore=[...])."
        for first, others in group_by_pattern(unused):
            problem = f"no rule uses tensor {first!r}{others}"
            self._problems.append(Problem(problem, "", first, "wanted", hint))
            hint = None

    def raise_problems(self, what: str) -> None:
        """Raises one error for all problems, if there are any.

        Args:
            what: What was being done.
        """
        if self._problems:
            names = {
                "file": tuple(self._facts),
                "leaf": tuple(self._leaves or ()),
                "rule": [rule.target for rule in self._rules],
                "wanted": self._lacking(),
            }
            raise mapping_error(what, self._problems, names)

    def _lacking(self) -> list[str]:
        """The names of tensors that rules take and the checkpoint does not have."""
        patterns = {p: None for r in self._rules if r.expr is not None for p in r.expr.patterns()}
        lacking = [p for p in patterns if next(self._facts.tree.match(p), None) is None]
        names = {WILDCARD.sub("0", pattern): None for pattern in lacking}
        return list(names | self._missing)

    def _bind_leaf(
        self, leaf: str, expr: Expr, target: str, captures: Captures, made: dict[str, BoundExpr]
    ) -> None:
        try:
            bound = expr.bind(captures, self._facts)
        except MappingError as error:
            for problem in problems_of(error):
                if problem.seek is not None:
                    self._missing[problem.seek] = None
                text = f"leaf {leaf!r}: {problem.text}"
                kind = problem.kind or f"rule {pattern_of(target)!r}"
                self._problems.append(problem._replace(text=text, kind=kind))
            self._mark_used(expr, captures)
            return
        self._used.update(bound.sources())
        self._check_shape(leaf, bound, repr(expr), target)
        made[leaf] = bound

    def _mark_used(self, expr: Expr | None, captures: Captures) -> None:
        """Tensors that a faulty rule speaks for are not told to be unused as well."""
        for pattern in () if expr is None else expr.patterns():
            found = self._facts.tree.match(substitute(pattern, captures))
            self._used.update(name for name, _ in found)

    def _check_shape(self, leaf: str, bound: BoundExpr, made_by: str, target: str) -> None:
        wanted = None if self._leaves is None else self._leaves.get(leaf)
        if wanted is not None and tuple(wanted) != bound.shape:
            text = f"leaf {leaf!r} has shape {list(wanted)}, but {made_by} gives {given(bound)}"
            hint = _shape_hint(tuple(wanted), bound.shape)
            self._problems.append(Problem(text, f"rule {pattern_of(target)!r}", hint=hint))


def _takes_no_more(leaf: BoundExpr | None, other: BoundExpr | None) -> bool:
    """Whether a leaf has no tensor of its own: such a leaf is none that another can be tied to."""
    return leaf is None or other is None or set(leaf.sources()) <= set(other.sources())


def _shape_hint(wanted: tuple[int, ...], found: tuple[int, ...]) -> str | None:
    """What may be wrong with a rule that gives one shape in place of another."""
    if sorted(wanted) == sorted(found):
        return "The axes are in another order: transpose, rearrange, or stack along another one."
    if math.prod(wanted) == math.prod(found):
        return "There are as many elements: mend the sizes (such as d= of heads), or reshape."
    return None
