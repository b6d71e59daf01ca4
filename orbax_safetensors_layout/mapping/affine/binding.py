"""Binds a mapping's rules to the names and shapes of both sides; one error has all problems."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from orbax_safetensors_layout.errors import MappingError, pattern_of
from orbax_safetensors_layout.runtime import text_table

from ..expr.expression import Expr, given
from ..expr.opaque_ops import Whole
from ..matching import LeafShapes, Rule, RuleTarget, group_by_pattern, match_rules
from ..names import WILDCARD, Captures, substitute
from ..problems import Problem, mapping_error, problems_of
from ..shapes import TensorSpec, TensorSpecs
from .bound import BoundExpr
from .index_nodes import Computed

_HEAD = ("name", "shape", "dtype", "made of", "takes")


@dataclasses.dataclass(frozen=True, slots=True)
class BoundMapping:
    """Expressions by name, each with known shape and dtype.

    Attributes:
        expressions: Loading: each leaf as an expression over the checkpoint's tensors. Saving:
            each tensor as an expression over leaves.
        ties: Leaves that hold the values of another leaf, and that leaf. Where their expressions
            are equal they are the same object. Saving has none: such leaves are left out.
        notes: For each name what its expression was written as, for `explain`.
    """

    expressions: dict[str, BoundExpr]
    ties: dict[str, str]
    notes: dict[str, object]

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(expr.shape, expr.dtype) for name, expr in self.expressions.items()}

    def explain(self) -> str:
        """Return a table of names, shapes, expressions and their tensors."""
        rows = [_HEAD]
        remarks = []
        for name, bound in self.expressions.items():
            tied = f" (tied to {self.ties[name]!r})" if name in self.ties else ""
            sources = bound.sources()
            taken = ", ".join(sources) or "nothing"
            if len(sources) > 2:
                taken = f"{sources[0]} … {sources[-1]} ({len(sources)} tensors)"
            note = f"{self.notes[name]}{tied}"
            rows.append((name, str([*bound.shape]), bound.dtype.name, note, taken))
            if any(isinstance(n, Computed) and isinstance(n.decoder, Whole) for n in bound.nodes()):
                remarks.append(f"{name}: every shard reads all that its opaque function takes.")
        return "\n".join([text_table(rows, len(_HEAD)), *remarks])


@dataclasses.dataclass(slots=True)
class Binder:
    """Binds rules to a checkpoint's tensors and a model's leaves, and collects problems.

    Without leaves these are the ones that the checkpoint gives.
    """

    rules: Sequence[Rule]
    specs: TensorSpecs
    leaves: LeafShapes | None
    _problems: list[Problem] = dataclasses.field(default_factory=list)
    _used: set[str] = dataclasses.field(default_factory=set)
    _missing: dict[str, None] = dataclasses.field(default_factory=dict)

    def bind(self, ignored: Sequence[re.Pattern[str]] | None) -> BoundMapping:
        """Binds every leaf, or raises one error for all problems.

        Tensors that are neither used nor `ignored` are problems, unless that is None.
        """
        bound: dict[str, BoundExpr] = {}
        notes: dict[str, object] = {}
        targets, ambiguous, problems = match_rules(self.rules, self.specs, self.leaves)
        self._problems += problems
        for leaf, rule, captures in targets:
            if rule.expr is not None:
                self._bind_leaf(leaf, rule.expr, rule.target, captures, bound)
                notes[leaf] = rule.expr
        for _, rule, captures in ambiguous:
            self._mark_used(rule.expr, captures)
        ties = self._tie(targets, bound, notes)
        if ignored is not None:
            self._check_unused(ignored)
        if self._problems:
            names = {
                "file": tuple(self.specs),
                "leaf": tuple(self.leaves or ()),
                "rule": [rule.target for rule in self.rules],
                "lacking": self._lacking(),
            }
            what = "The mapping does not fit the checkpoint and the model"
            raise mapping_error(what, self._problems, names)
        order = [target.leaf for target in targets if target.leaf in bound]
        return BoundMapping({leaf: bound[leaf] for leaf in order}, ties, notes)

    def _tie(
        self, targets: Sequence[RuleTarget], bound: dict[str, BoundExpr], notes: dict[str, object]
    ) -> dict[str, str]:
        """Return the ties; tied leaves without an expression, or with an equal one, share it."""
        leaves = {target.leaf for target in targets}
        ties: dict[str, str] = {}
        for leaf, rule, captures in targets:
            if rule.tied_to is None:
                continue
            other = substitute(rule.tied_to, captures)
            if other in leaves and _takes_no_more(bound.get(leaf), bound.get(other)):
                ties[leaf] = other
            if leaf in bound and bound[leaf] == bound.get(other):
                bound[leaf] = bound[other]  # the same object: loading compares identities
            if rule.expr is None and other in bound:
                bound[leaf], notes[leaf] = bound[other], f"as {other!r}"
                self._check_shape(leaf, bound[leaf], notes[leaf], rule.target)
            elif rule.expr is None and other not in leaves:
                text = f"leaf {leaf!r} is tied to {other!r}, which no rule makes"
                self._problems.append(Problem(text, f"rule {rule.target!r}", other, "leaf"))
        return ties

    def _check_unused(self, ignored: Sequence[re.Pattern[str]]) -> None:
        unused = [
            name
            for name in self.specs
            if name not in self._used and not any(p.fullmatch(name) for p in ignored)
        ]
        hint: str | None = "Add rules for such, or name them in Mapping(..., ignore=[...])."
        for first, others in group_by_pattern(unused):
            problem = f"no rule uses tensor {first!r}{others}"
            self._problems.append(Problem(problem, "", first, "lacking", hint))
            hint = None

    def _lacking(self) -> list[str]:
        """Return the names of tensors that rules take and the checkpoint does not have."""
        patterns = {p: None for r in self.rules if r.expr is not None for p in r.expr.patterns()}
        lacking = [p for p in patterns if next(self.specs.tree.match(p), None) is None]
        names = {WILDCARD.sub("0", pattern): None for pattern in lacking}
        return list(names | self._missing)

    def _bind_leaf(
        self, leaf: str, expr: Expr, target: str, captures: Captures, leaves: dict[str, BoundExpr]
    ) -> None:
        try:
            bound = expr.bind(captures, self.specs)
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
        self._check_shape(leaf, bound, expr, target)
        leaves[leaf] = bound

    def _mark_used(self, expr: Expr | None, captures: Captures) -> None:
        """Counts the tensors of a faulty rule as used: one problem is enough."""
        for pattern in () if expr is None else expr.patterns():
            matches = self.specs.tree.match(substitute(pattern, captures))
            self._used.update(name for name, _ in matches)

    def _check_shape(self, leaf: str, bound: BoundExpr, made_by: object, target: str) -> None:
        expected = None if self.leaves is None else self.leaves.get(leaf)
        if expected is not None and tuple(expected) != bound.shape:
            text = f"leaf {leaf!r} has shape {list(expected)}, but {made_by} gives {given(bound)}"
            hint = _shape_hint(tuple(expected), bound.shape)
            self._problems.append(Problem(text, f"rule {pattern_of(target)!r}", hint=hint))


def _takes_no_more(leaf: BoundExpr | None, other: BoundExpr | None) -> bool:
    """Whether a leaf has no tensor that the other does not have; else they are not tied."""
    return leaf is None or other is None or set(leaf.sources()) <= set(other.sources())


def _shape_hint(expected: tuple[int, ...], found: tuple[int, ...]) -> str | None:
    if sorted(expected) == sorted(found):
        return "The axes are in another order: transpose, rearrange, or stack along another one."
    if math.prod(expected) == math.prod(found):
        return "There are as many elements: mend the sizes (such as d= of heads), or reshape."
    return None
