"""Binds a mapping's rules to the names and shapes of both sides; one error has all problems."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.errors import MappingError, pattern_of
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.runtime import text_table

from ..expr.expression import Expr, given
from ..expr.opaque_ops import is_opaque
from ..matching import (
    LeafShapes,
    Matches,
    Rule,
    RuleTarget,
    group_by_pattern,
    match_rules,
    no_rule,
)
from ..names import WILDCARD, NameTree, Pieces, TensorSpec, TensorSpecs, substitute
from ..problems import Problem, mapping_error, within
from .bound import BoundExpr

_HEAD = ("name", "shape", "dtype", "made of", "takes")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExprModel:
    """An expression that others differ from in the names of tensors alone."""

    bound: BoundExpr
    names: tuple[str, ...]
    takes: tuple[int, ...]  # numbers of those that it takes, each name once
    cached: dict[object, Any] | None  # results for all; None where there are no others

    @classmethod
    def of(cls, bound: BoundExpr, names: Sequence[str], *, is_shared: bool) -> ExprModel:
        takes = tuple(map(names.index, bound.sources()))
        return cls(bound, tuple(names), takes, {} if is_shared else None)


class LeafExpr:
    """The expression of a leaf: that of a model, over tensors of its own."""

    __slots__ = "_bound", "model", "names"

    def __init__(self, model: ExprModel, names: Sequence[str]) -> None:
        self.model = model
        self.names = names  # of its tensors, as many as the model has
        self._bound: BoundExpr | None = None

    @classmethod
    def alone(cls, bound: BoundExpr) -> LeafExpr:
        """Return an expression that others do not share."""
        return cls.of_model(ExprModel.of(bound, bound.sources(), is_shared=False))

    @classmethod
    def of_model(cls, model: ExprModel) -> LeafExpr:
        """Return the expression that is the model of others."""
        leaf = cls(model, model.names)
        leaf._bound = model.bound
        return leaf

    @property
    def identity(self) -> object:
        """The same object for leaves that share an expression, not just an equal one."""
        return self.model.bound if self.model.cached is None else self

    @property
    def bound(self) -> BoundExpr:
        """The expression itself; it is made when it is asked for."""
        if self._bound is None:
            names = dict(zip(self.model.names, self.names, strict=True))
            self._bound = self.model.bound.renamed(names)
        return self._bound

    @property
    def shape(self) -> tuple[int, ...]:
        return self.model.bound.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.model.bound.dtype

    def sources(self) -> list[str]:
        """Return the names of its tensors, each once, in the order of their use."""
        names = self.names
        return [names[number] for number in self.model.takes]


class Tie(NamedTuple):
    """The tie of a leaf to another, whose values it holds."""

    other: str  # a leaf
    is_compared: bool  # whether saving refuses other values


@dataclasses.dataclass(frozen=True)
class BoundMapping:
    """Loading: leaves as expressions over tensors. Saving: tensors as expressions over leaves.

    `ties` are leaves that hold the values of another leaf. Where their expressions are equal they
    are the same object. Saving has none: such leaves are only compared.
    """

    leaves: Mapping[str, LeafExpr]
    ties: dict[str, Tie]
    notes: dict[str, object]  # what each expression was written as, for `explain`

    @functools.cached_property
    def expressions(self) -> dict[str, BoundExpr]:
        """The expressions themselves, which planning does not need."""
        return {name: leaf.bound for name, leaf in self.leaves.items()}

    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(leaf.shape, leaf.dtype) for name, leaf in self.leaves.items()}

    def explain(self) -> str:
        """Return a table of names, shapes, expressions and their tensors."""
        rows = [_HEAD]
        remarks = []
        for name, bound in self.expressions.items():
            tied = f" (tied to {self.ties[name].other!r})" if name in self.ties else ""
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
    source: MatchedNames | None = None  # what another mapping makes the tensors of, if one does
    unmade: Sequence[str] = ()  # of the checkpoint: what that one takes for no tensor, nor ignores

    @classmethod
    def of(
        cls,
        rules: Sequence[Rule],
        names: TensorSpecs,
        leaves: LeafShapes | None,
        ignored: Sequence[re.Pattern[str]] | None,
    ) -> MatchedNames:
        return cls(rules, names, leaves, match_rules(rules, names, leaves), ignored)

    def taken(self) -> list[str]:
        """Return the tensors that the leaves take."""
        taken = (name for target in self.matches.targets for name in target.tensors(self.names))
        return list(dict.fromkeys(taken))

    def given(self) -> list[str]:
        """Return the leaves that the checkpoint gives, or that take no tensor."""
        return [
            target.leaf
            for target in (*self.matches.targets, *self.matches.ambiguous)
            if not target.patterns or any(target.tensors(self.names))
        ]

    def untaken(self) -> list[str]:
        """Return the tensors that no leaf takes and that are not ignored, if that is checked."""
        if self.ignored is None:
            return []
        targets = (*self.matches.targets, *self.matches.ambiguous)
        taken = {name for target in targets for name in target.tensors(self.names)}
        left = (name for name in self.names.names if name not in taken)
        return [name for name in left if not any(p.fullmatch(name) for p in self.ignored)]

    def needs(self) -> list[str]:
        """Return the tensors of the checkpoint whose shapes `bind` takes."""
        return self.taken() if self.source is None else self.source.needs()

    def described(
        self, entries: Mapping[str, TensorEntry], pieces: Pieces | None = None
    ) -> TensorSpecs:
        """Return the tensors of the checkpoint with their shapes, for `binder`."""
        if self.source is not None:
            return self.source.described(entries, pieces)
        return self.names.described(entries, pieces)

    def binder(self, specs: TensorSpecs) -> Binder:
        if self.source is not None:
            specs = self.names.made_of(self.source.binder(specs).bind(None).expressions)
        return Binder(self.rules, specs, self.leaves, self.matches, unmade=self.unmade)

    def bind(self, entries: Mapping[str, TensorEntry], pieces: Pieces | None) -> BoundMapping:
        """Return each leaf as an expression over tensors; `pieces` are of those in pieces."""
        return self.binder(self.described(entries, pieces)).bind(self.ignored)


@dataclasses.dataclass(slots=True)
class Binder:
    """Binds rules to a checkpoint's tensors, and to leaves: None for all that it gives."""

    rules: Sequence[Rule]
    specs: TensorSpecs
    leaves: LeafShapes | None
    matches: Matches | None = None  # if known
    used: set[str] = dataclasses.field(default_factory=set)  # tensors that leaves take
    unmade: Sequence[str] = ()  # of the checkpoint, which another mapping makes no tensors of
    _problems: list[Problem] = dataclasses.field(default_factory=list)
    _missing: dict[str, None] = dataclasses.field(default_factory=dict)
    _models: dict[object, ExprModel] = dataclasses.field(default_factory=dict)

    def bind(self, ignored: Sequence[re.Pattern[str]] | None) -> BoundMapping:
        """Binds every leaf, or raises one error for all problems; None ignores all tensors."""
        bound: dict[str, LeafExpr] = {}
        notes: dict[str, object] = {}
        matches = self.matches or match_rules(self.rules, self.specs, self.leaves)
        targets, ambiguous, unmade, problems = matches
        self._problems += problems
        self._problems += no_rule(unmade, "Add rules for such, or leave them out of the tree.")
        for target in targets:
            if target.rule.expr is not None:
                self._bind_leaf(target, target.rule.expr, bound)
                notes[target.leaf] = target.rule.expr
        for target in ambiguous:
            self.used.update(target.tensors(self.specs))
        self.used |= self.specs.bound
        ties = self._tie(targets, bound, notes)
        if ignored is not None:
            self._check_unused([n for n in self.specs.names if n not in self.used], ignored)
            self._check_unused(self.unmade, ignored, are_others=True)
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
        return BoundMapping({leaf: bound[leaf] for leaf in order}, ties, notes)

    def _tie(
        self, targets: Sequence[RuleTarget], bound: dict[str, LeafExpr], notes: dict[str, object]
    ) -> dict[str, Tie]:
        """Return the ties; tied leaves without an expression, or with an equal one, share it."""
        leaves = {target.leaf for target in targets}
        ties: dict[str, Tie] = {}
        for leaf, rule, other in _in_turn(targets):
            expr, first = bound.get(leaf), bound.get(other)
            more = set(expr.sources()) - set(first.sources()) if expr and first else ()
            if other in leaves and not more:
                ties[leaf] = Tie(other, is_compared=not rule.lossy_inverse)
            if expr is not None and first is not None and expr.bound == first.bound:
                bound[leaf] = first  # the same object: loading compares identities
            if rule.expr is None and first is not None:
                bound[leaf], notes[leaf] = first, f"as {other!r}"
                self._check_shape(leaf, first, notes[leaf], rule.target)
            elif rule.expr is None and (other not in leaves or other in ties):
                text = f"leaf {leaf!r} is tied to {other!r}, which no rule makes"
                self._problems.append(Problem(text, f"rule {rule.target!r}", other, "leaf"))
        return ties

    def _check_unused(
        self, names: Iterable[str], ignored: Sequence[re.Pattern[str]], *, are_others: bool = False
    ) -> None:
        unused = [name for name in names if not any(p.fullmatch(name) for p in ignored)]
        hint: str | None = "Add rules for such, or name them in Mapping(..., ignore=[...])."
        for first, others in group_by_pattern(unused):
            target = None if are_others else self._lacking_leaf(first)
            if target is not None:
                problem = f"no leaf takes tensor {first!r}{others}, as rule {target!r} would"
                give = "Give the tree that leaf."
                self._problems.append(Problem(problem, "", first, "lacking", give))
                continue
            problem = f"no rule uses tensor {first!r}{others}"
            self._problems.append(Problem(problem, "", first, "lacking", hint))
            hint = None

    def _lacking_leaf(self, tensor: str) -> str | None:
        """Return the target of a rule that takes a tensor for a leaf that the tree lacks."""
        alone, leaves = NameTree([tensor]), self.leaves
        for rule in () if leaves is None else self.rules:
            for pattern in rule.patterns():
                for _, captures in alone.match(pattern):
                    leaf = substitute(rule.target, captures)
                    if leaves is not None and "{" not in leaf and leaf not in leaves:
                        return rule.target
        return None

    def _lacking(self) -> list[str]:
        """Return the names of tensors that rules take and the checkpoint does not have."""
        patterns = {pattern: None for rule in self.rules for pattern in rule.patterns()}
        lacking = [p for p in patterns if next(self.specs.tree.match(p), None) is None]
        return list({WILDCARD.sub("0", pattern): None for pattern in lacking} | self._missing)

    def _bind_leaf(self, target: RuleTarget, expr: Expr, leaves: dict[str, LeafExpr]) -> None:
        leaf, rule, _, _ = target
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

    def _bound(self, target: RuleTarget, expr: Expr) -> LeafExpr:
        """Binds an expression, or takes that of another leaf, for other tensors."""
        names, specs = target.patterns, self.specs
        alone = specs.expressions or specs.pieces
        known = [id(specs[name]) for name in names if name in specs and name not in alone]
        numbers = {name: str(number) for number, name in reversed([*enumerate(names)])}
        likeness = (id(expr), *known, *map(numbers.__getitem__, names))
        model = self._models.get(likeness)
        if model is None:
            bound = expr.bind(target.captures, specs)
            if len(known) < len(names) or not expr.is_generic:
                return LeafExpr.alone(bound)
            # Rules may be written for one leaf each, and differ in names alone.
            key = bound.renamed(numbers), *likeness[1:]
            model = self._models.setdefault(key, ExprModel.of(bound, names, is_shared=True))
            self._models[likeness] = model
        return LeafExpr(model, names)

    def _check_shape(self, leaf: str, bound: LeafExpr, origin: object, target: str) -> None:
        expected = None if self.leaves is None else self.leaves.get(leaf)
        if expected is not None and tuple(expected) != bound.shape:
            text = (
                f"leaf {leaf!r} has shape {list(expected)}, but {origin} gives {given(bound.bound)}"
            )
            hint = _shape_hint(tuple(expected), bound.shape)
            self._problems.append(Problem(text, f"rule {pattern_of(target)!r}", hint=hint))


def _in_turn(targets: Sequence[RuleTarget]) -> Iterator[tuple[str, Rule, str]]:
    """Yields tied leaves, each after those that its values come from, with the others' names."""
    tied = {
        leaf: (leaf, rule, substitute(rule.tied_to, captures))
        for leaf, rule, captures, _ in targets
        if rule.tied_to is not None
    }
    while tied:
        ready = [tie for tie in tied.values() if tie[1].expr is not None or tie[2] not in tied]
        yield from ready or tied.values()
        done = {leaf for leaf, _, _ in ready or tied.values()}  # all where they go in a circle
        tied = {leaf: tie for leaf, tie in tied.items() if leaf not in done}


def _shape_hint(expected: tuple[int, ...], actual: tuple[int, ...]) -> str | None:
    if sorted(expected) == sorted(actual):
        return "The axes are in another order: transpose, rearrange, or stack along another one."
    if math.prod(expected) == math.prod(actual):
        return "There are as many elements: mend the sizes (such as d= of heads), or reshape."
    return None
