"""Matches rules with leaves: the rule of each leaf, and the values of its wildcards."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from orbax_safetensors_layout.errors import MappingError, pattern_of
from orbax_safetensors_layout.format import natural_key

from .expr.expression import Expr, as_expr
from .names import NameTree, TensorSpecs, substitute, wildcards
from .problems import Problem

LeafShapes = Mapping[str, tuple[int, ...] | None]
"""Leaf name to shape; None where the leaf takes what the checkpoint gives."""

_Bindings: TypeAlias = dict[tuple[tuple[str, str], ...], None]
"""Values that wildcards can take; a set in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The rule of the leaves of one name pattern; see `rule`."""

    target: str
    expr: Expr | None
    tied_to: str | None
    optional: bool = False
    lossy_inverse: bool = False

    def __repr__(self) -> str:
        tied = "" if self.tied_to is None else f", tied_to={self.tied_to!r}"
        optional = ", optional=True" if self.optional else ""
        lossy = ", lossy_inverse=True" if self.lossy_inverse else ""
        return f"rule({self.target!r}, {self.expr!r}{tied}{optional}{lossy})"

    def patterns(self) -> list[str]:
        """Return the name patterns of its tensors."""
        return [] if self.expr is None else [*self.expr.patterns()]

    def targets(self, matches: Iterable[tuple[str, dict[str, str]]]) -> Iterator[RuleTarget]:
        """Yields the leaves of some names, given with the values of wildcards."""
        patterns = self.patterns()
        for leaf, captures in matches:
            taken = [substitute(pattern, captures) for pattern in patterns]
            yield RuleTarget(leaf, self, captures, taken)


def described_rule(item: Rule) -> str:
    """Return a text that is equal in every process for equal rules, and for no others.

    Of functions of whole arrays it has only the tensors that they take.
    """
    text = repr(item)
    if "opaque(" in text:
        return f"{item.target} {item.patterns()}"
    if " more]" not in text or item.expr is None:
        return text
    nodes = [item.expr]
    for node in nodes:  # for all indices; the text has the first ones
        nodes.extend(node.children())
        text += repr(getattr(getattr(node, "op", node), "indices", None))
    return text


def rule(
    target_pattern: str,
    expr: Expr | None,
    *,
    tied_to: str | None = None,
    optional: bool = False,
    lossy_inverse: bool = False,
) -> Rule:
    """Return a rule that makes the leaves of one name pattern.

    Args:
        target_pattern: Dotted names of leaves. `{i}` matches one component, or for a part of
            one, and for the same text in the names of `expr`.
        expr: The expression of each. None, for a tied leaf: that of the other leaf.
        tied_to: The leaf that holds the same values. Saving writes them once, and refuses leaves
            that differ. Where `expr` takes a tensor that the other does not, both are saved.
        optional: Whether a checkpoint may have none of the tensors of `expr`, and the model no such
            leaf. Otherwise that is an error.
        lossy_inverse: Whether saving writes the leaf of `tied_to`, whatever a tied leaf holds.

    Raises:
        MappingError: A wildcard of `expr` is in neither the target nor a `stack`, or in both.
            `lossy_inverse` is set, and `tied_to` is not.

    Examples:
        >>> from orbax_safetensors_layout.mapping import tensor
        >>> rule("layers.{i}.up.kernel", tensor("model.layers.{i}.up.weight").transpose())
        rule('layers.{i}.up.kernel', tensor('model.layers.{i}.up.weight').transpose())
    """
    expr = None if expr is None else as_expr(expr, "rule")
    result = Rule(target_pattern, expr, tied_to, optional, lossy_inverse)
    captured = set(wildcards(target_pattern))
    if expr is None and tied_to is None:
        raise MappingError(f"{result!r} has neither an expression nor a leaf to be tied to")
    if lossy_inverse and tied_to is None:
        raise MappingError(
            f"{result!r} is not tied to a leaf",
            hint="Only a tied leaf has lossy_inverse; operations of an expression have their own.",
        )
    stacked = frozenset[str]() if expr is None else expr.stacked_over()
    both = sorted(captured & stacked)
    if both:
        raise MappingError(f"{result!r}: {both[0]!r} is stacked over, and in the target too")
    patterns = [(pattern, captured | stacked) for pattern in result.patterns()]
    for pattern, known in [*patterns, (tied_to or "", captured)]:
        unknown = [name for name in wildcards(pattern) if name not in known]
        if unknown:
            raise MappingError(
                f"{result!r}: nothing gives {{{unknown[0]}}} of {pattern!r} a value: it must be in"
                " the target, or in a stack(..., over=...)"
            )
    return result


def names_by_rules(rules: Sequence[Rule], names: Iterable[str]) -> list[str]:
    """Return names of leaves as rules have them, which may have the level of a box, or lack it."""

    def matched(names: Iterable[str]) -> set[str]:
        tree = NameTree(names)
        return {name for rule in rules for name, _ in tree.match(rule.target)}

    names = list(names)
    left = set(names) - matched(names)
    others = {
        other: name for name in left for other in (f"{name}.value", name.removesuffix(".value"))
    }
    renamed = {others[other]: other for other in matched(others.keys() - names)}
    return [renamed.get(name, name) for name in names]


class RuleTarget(NamedTuple):
    """A leaf and the rule that makes it."""

    leaf: str
    rule: Rule
    captures: dict[str, str]
    patterns: Sequence[str]  # of its tensors, with the values of wildcards in place

    def tensors(self, specs: TensorSpecs) -> Iterator[str]:
        """Yields the tensors of a checkpoint that the leaf takes."""
        for pattern in self.patterns:
            if "{" in pattern:
                yield from (name for name, _ in specs.tree.match(pattern))
            elif pattern in specs.names:
                yield pattern


class Matches(NamedTuple):
    """The leaves of a mapping."""

    targets: list[RuleTarget]  # leaves with the one rule that makes them
    ambiguous: list[RuleTarget]  # leaves with each of several rules
    unmade: list[str]  # leaves without a rule
    problems: list[Problem]  # leaves with several rules, and rules without a leaf


def match_rules(rules: Sequence[Rule], specs: TensorSpecs, leaves: LeafShapes | None) -> Matches:
    """Find the rule of each leaf.

    Where several rules match a leaf, those count that the checkpoint has tensors for, so that the
    choice is the same whether leaves are given or not. Only the names of the tensors count. Where
    `leaves` is None, the leaves are all that the checkpoint gives, and required ones.
    """
    problems: list[Problem] = []
    if leaves is None:
        matches = _given(rules, specs, problems)
        _add_required(rules, matches, problems)
    else:
        matches = {leaf: [] for leaf in leaves}
        tree = NameTree(leaves)
        for rule in rules:
            for target in rule.targets(tree.match(rule.target)):
                matches[target.leaf].append(target)
        if any(len(targets) > 1 for targets in matches.values()):
            given = _given(rules, specs, [])
            for leaf, targets in matches.items():
                if len(targets) > 1:
                    matches[leaf] = given.get(leaf, targets)
    ambiguous = []
    for leaf, targets in matches.items():
        if len(targets) > 1:
            ambiguous += targets
            names = [repr(target.rule.target) for target in targets]
            if len(set(names)) < len(names):  # only their expressions differ
                names = [repr(target.rule.expr) for target in targets]
            listed = " and ".join(names)
            text = f"{len(targets)} rules make leaf {leaf!r}: those for {listed}"
            problems.append(Problem(text, f"the rules for {listed}"))
    unmade = [leaf for leaf, targets in matches.items() if not targets]
    single = [targets[0] for targets in matches.values() if len(targets) == 1]
    untied = [_untied(target, rules, matches) for target in single]
    return Matches(untied, ambiguous, unmade, problems)


def _given(
    rules: Sequence[Rule], specs: TensorSpecs, problems: list[Problem]
) -> dict[str, list[RuleTarget]]:
    """Return the leaves that the checkpoint has tensors for, each with all rules that match."""
    matches: dict[str, list[RuleTarget]] = {}
    left = sorted(rules, key=lambda rule: rule.expr is None)
    while left:
        later = []
        for rule in left:
            captured = [*_captures(rule, specs, matches, problems)]
            if not captured and rule.expr is None:
                later.append(rule)  # another rule may make what it is tied to
            named = ((substitute(rule.target, captures), captures) for captures in captured)
            for target in rule.targets(named):
                matches.setdefault(target.leaf, []).append(target)
        left = later if len(later) < len(left) else []
    return matches


def _untied(target: RuleTarget, rules: Sequence[Rule], leaves: Container[str]) -> RuleTarget:
    """Give a tied leaf without an expression the rule of the other leaf, if that is not there."""
    leaf, rule, captures, _ = target
    if rule.expr is not None or rule.tied_to is None:
        return target
    other = substitute(rule.tied_to, captures)
    if other in leaves:
        return target
    tree = NameTree([other])
    matches = [
        match
        for candidate in rules
        if candidate.expr is not None
        for match in candidate.targets((leaf, values) for _, values in tree.match(candidate.target))
    ]
    return matches[0] if len(matches) == 1 else target


def no_rule(unmade: Iterable[str], hint: str) -> list[Problem]:
    """Return the problems of leaves without a rule, and what to do."""
    return [
        Problem(f"no rule makes leaf {first!r}{others}", "", first, "rule", None if n else hint)
        for n, (first, others) in enumerate(group_by_pattern(unmade))
    ]


def group_by_pattern(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the first of names that differ in numbers only, and a text on the number of others."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(name)
    for first, *more in groups.values():
        others = f", nor {len(more)} more that differ in numbers only" if more else ""
        yield first, others


def _captures(
    rule: Rule, specs: TensorSpecs, leaves: Iterable[str], problems: list[Problem]
) -> Iterator[dict[str, str]]:
    """Yields the values of a target's wildcards, from the tensors that a checkpoint has."""
    names = wildcards(rule.target)
    if rule.expr is None:
        tree, patterns = NameTree(leaves), [rule.tied_to or ""]
    else:
        tree, patterns = specs.tree, list(dict.fromkeys(rule.patterns()))
    if not patterns and not names:
        yield {}
    elif not patterns:
        text = f"the checkpoint does not name the leaves of {rule.target!r}: {rule.expr!r}"
        problems.append(Problem(f"{text} takes no tensor", hint="Give the model's leaves."))
    trees = [(tree.match(pattern), wildcards(pattern)) for pattern in patterns]
    full = {
        tuple([match[name] for name in names]): None
        for matches, known in trees
        if set(names) <= set(known)
        for _, match in matches
    } or _joined([tree.match(pattern) for pattern in patterns], names)
    keys = {value: natural_key(value) for value in {v for values in full for v in values}}
    for values in sorted(full, key=lambda values: [keys[value] for value in values]):
        if patterns:
            yield dict(zip(names, values, strict=True))


def _add_required(
    rules: Sequence[Rule], leaves: dict[str, list[RuleTarget]], problems: list[Problem]
) -> None:
    """Adds the leaves of rules that are not optional and have no tensor in the checkpoint."""
    used = {id(target.rule) for targets in leaves.values() for target in targets}
    for rule in rules:
        if rule.optional or rule.expr is None or id(rule) in used:
            continue
        patterns = rule.patterns()
        if not wildcards(rule.target):
            leaves.setdefault(rule.target, [*rule.targets([(rule.target, {})])])
        elif patterns:
            text = f"there is no tensor {patterns[0]!r}, and so no leaf {rule.target!r}"
            hint = "If there need not be any, say so: rule(..., optional=True)."
            problems.append(Problem(text, f"rule {rule.target!r}", patterns[0], hint=hint))


def _joined(
    matches: Sequence[Iterable[tuple[str, dict[str, str]]]], names: Sequence[str]
) -> dict[tuple[str, ...], None]:
    """Return the values of all wildcards, from matches that each have some."""
    joined = _Bindings({(): None})
    for of_pattern in matches:
        rows = {tuple((n, match[n]) for n in names if n in match): None for _, match in of_pattern}
        joined = _join(joined, rows)
    full = [dict(binding) for binding in joined if len(binding) == len(names)]
    return {tuple(values[name] for name in names): None for values in full}


def _join(left: _Bindings, right: _Bindings) -> _Bindings:
    """Merge bindings that agree on the wildcards which both have."""
    joined: _Bindings = {}
    for a in left:
        for b in right:
            both = dict(a)
            if all(both.setdefault(name, value) == value for name, value in b):
                joined[tuple(sorted(both.items()))] = None
    return joined
