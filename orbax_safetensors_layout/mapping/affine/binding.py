"""Binds a mapping's rules to the names and shapes of both sides; one error has all problems."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.errors import MappingError, pattern_of
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.runtime import text_table

from ..expr.expression import Expr, given
from ..expr.opaque_ops import is_opaque
from ..matching import LeafShapes, Matches, Rule, RuleTarget, group_by_pattern, match_rules
from ..names import WILDCARD, Pieces, TensorSpec, TensorSpecs, substitute
from ..problems import Problem, mapping_error, within
from .bound import BoundExpr

_HEAD = ("name", "shape", "dtype", "made of", "takes")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExprModel:
    """An expression that others differ from in the names of tensors alone."""

    bound: BoundExpr
    names: tuple[str, ...]
    cached: dict[object, Any] = dataclasses.field(default_factory=dict)  # results for all


class SimilarExpr(NamedTuple):
    """A model, and how the expression of a leaf differs from it."""

    model: ExprModel
    names: dict[str, str]  # of its tensors, by those of the model


@dataclasses.dataclass(frozen=True, slots=True)
class BoundMapping:
    """Loading: leaves as expressions over tensors. Saving: tensors as expressions over leaves.

    `ties` are leaves that hold the values of another leaf, and that leaf. Where their expressions
    are equal they are the same object. Saving has none: such leaves are left out.
    """

    expressions: dict[str, BoundExpr]
    ties: dict[str, str]
    notes: dict[str, object]  # what each expression was written as, for `explain`
    similar: dict[str, SimilarExpr] = dataclasses.field(default_factory=dict)

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
            if is_opaque(bound.nodes()):
                remarks.append(f"{name}: every shard reads all that its opaque function takes.")
        return "\n".join([text_table(rows, len(_HEAD)), *remarks])


class MatchedNames(NamedTuple):
    """The leaves that a checkpoint's tensors give by their names, before their shapes are known."""

    rules: Sequence[Rule]
    names: TensorSpecs
    leaves: LeafShapes | None
    matches: Matches
    ignored: Sequence[re.Pattern[str]] | None

    def needs(self) -> list[str]:
        """Return the tensors whose shapes `bind` takes."""
        taken = (name for target in self.matches.targets for name in target.tensors(self.names))
        return list(dict.fromkeys(taken))

    def binder(self, entries: Mapping[str, TensorEntry], pieces: Pieces | None = None) -> Binder:
        specs = self.names.described(entries, pieces)
        return Binder(self.rules, specs, self.leaves, self.matches)

    def bind(self, entries: Mapping[str, TensorEntry], pieces: Pieces | None) -> BoundMapping:
        """Return each leaf as an expression over tensors; `pieces` are of those in pieces."""
        return self.binder(entries, pieces).bind(self.ignored)


@dataclasses.dataclass(slots=True)
class Binder:
    """Binds rules to a checkpoint's tensors, and to leaves: None for all that it gives."""

    rules: Sequence[Rule]
    specs: TensorSpecs
    leaves: LeafShapes | None
    matches: Matches | None = None  # if known
    used: set[str] = dataclasses.field(default_factory=set)  # tensors that leaves take
    _problems: list[Problem] = dataclasses.field(default_factory=list)
    _missing: dict[str, None] = dataclasses.field(default_factory=dict)
    _models: dict[object, ExprModel] = dataclasses.field(default_factory=dict)
    _similar: dict[str, SimilarExpr] = dataclasses.field(default_factory=dict)

    def bind(self, ignored: Sequence[re.Pattern[str]] | None) -> BoundMapping:
        """Binds every leaf, or raises one error for all problems; None ignores all tensors."""
        bound: dict[str, BoundExpr] = {}
        notes: dict[str, object] = {}
        matches = self.matches or match_rules(self.rules, self.specs, self.leaves)
        targets, ambiguous, problems = matches
        self._problems += problems
        for target in targets:
            if target.rule.expr is not None:
                self._bind_leaf(target, target.rule.expr, bound)
                notes[target.leaf] = target.rule.expr
        for target in ambiguous:
            self.used.update(target.tensors(self.specs))
        ties = self._tie(targets, bound, notes)
        if ignored is not None:
            self._check_unused(ignored)
        if self._problems:
            names = {
                "file": tuple(self.specs.names),
                "leaf": tuple(self.leaves or ()),
                "rule": [rule.target for rule in self.rules],
                "lacking": self._lacking(),
            }
            what = "The mapping does not fit the checkpoint and the model"
            raise mapping_error(what, self._problems, names)
        order = [target.leaf for target in targets if target.leaf in bound]
        return BoundMapping({leaf: bound[leaf] for leaf in order}, ties, notes, self._similar)

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
            expr, first = bound.get(leaf), bound.get(other)
            more = set(expr.sources()) - set(first.sources()) if expr and first else ()
            if other in leaves and not more:
                ties[leaf] = other
            if expr is not None and first is not None and expr == first:
                bound[leaf] = first  # the same object: loading compares identities
            if rule.expr is None and first is not None:
                bound[leaf], notes[leaf] = first, f"as {other!r}"
                self._check_shape(leaf, first, notes[leaf], rule.target)
            elif rule.expr is None and other not in leaves:
                text = f"leaf {leaf!r} is tied to {other!r}, which no rule makes"
                self._problems.append(Problem(text, f"rule {rule.target!r}", other, "leaf"))
        return ties

    def _check_unused(self, ignored: Sequence[re.Pattern[str]]) -> None:
        unused = [
            name
            for name in self.specs.names
            if name not in self.used and not any(p.fullmatch(name) for p in ignored)
        ]
        hint: str | None = "Add rules for such, or name them in Mapping(..., ignore=[...])."
        for first, others in group_by_pattern(unused):
            problem = f"no rule uses tensor {first!r}{others}"
            self._problems.append(Problem(problem, "", first, "lacking", hint))
            hint = None

    def _lacking(self) -> list[str]:
        """Return the names of tensors that rules take and the checkpoint does not have."""
        patterns = {pattern: None for rule in self.rules for pattern in rule.patterns()}
        lacking = [p for p in patterns if next(self.specs.tree.match(p), None) is None]
        return list({WILDCARD.sub("0", pattern): None for pattern in lacking} | self._missing)

    def _bind_leaf(self, target: RuleTarget, expr: Expr, leaves: dict[str, BoundExpr]) -> None:
        leaf, rule, _ = target
        try:
            bound = self._bound(target, expr)
        except MappingError as error:
            problems = within(error, f"leaf {leaf!r}", f"rule {pattern_of(rule.target)!r}").problems
            self._problems += problems
            self._missing.update({p.seek: None for p in problems if p.seek is not None})
            self.used.update(target.tensors(self.specs))  # one problem is enough
        else:
            self.used.update(bound.sources())
            self._check_shape(leaf, bound, expr, rule.target)
            leaves[leaf] = bound

    def _bound(self, target: RuleTarget, expr: Expr) -> BoundExpr:
        """Binds an expression, or takes that of another leaf of its rule, for other tensors."""
        names = target.rule.patterns(target.captures)
        known = [self.specs[n] for n in names if n in self.specs and n not in self.specs.pieces]
        packed = (name in self.specs.packed for name in names)
        likeness = (id(expr), *known, *map(names.index, names), *packed)
        model = self._models.get(likeness)
        if model is None:
            bound = expr.bind(target.captures, self.specs)
            if len(known) < len(names) or not expr.is_generic:
                return bound
            model = self._models[likeness] = ExprModel(bound, tuple(names))
        renaming = dict(zip(model.names, names, strict=True))
        self._similar[target.leaf] = SimilarExpr(model, renaming)
        return model.bound.renamed(renaming)

    def _check_shape(self, leaf: str, bound: BoundExpr, origin: object, target: str) -> None:
        expected = None if self.leaves is None else self.leaves.get(leaf)
        if expected is not None and tuple(expected) != bound.shape:
            text = f"leaf {leaf!r} has shape {list(expected)}, but {origin} gives {given(bound)}"
            hint = _shape_hint(tuple(expected), bound.shape)
            self._problems.append(Problem(text, f"rule {pattern_of(target)!r}", hint=hint))


def _shape_hint(expected: tuple[int, ...], actual: tuple[int, ...]) -> str | None:
    if sorted(expected) == sorted(actual):
        return "The axes are in another order: transpose, rearrange, or stack along another one."
    if math.prod(expected) == math.prod(actual):
        return "There are as many elements: mend the sizes (such as d= of heads), or reshape."
    return None
