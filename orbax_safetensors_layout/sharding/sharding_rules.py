"""Sharding rules: regular expressions of tensor names, each with the split of its dimensions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .mesh_shape import MeshShape, Spec

AUTO, REPLICATED = "auto", "replicated"
_UNSPLIT = ([""], ["-"], ["none"], ["None"])


class ShardingRule(NamedTuple):
    """A split of the tensors of some names."""

    pattern: str  # a regular expression that must match a whole name
    spec: Spec | None  # how the dimensions are split; None splits as `auto_spec` does

    @classmethod
    def parse(cls, text: str) -> ShardingRule:
        """Return a rule from its text; raises ValueError for other text.

        After the last `=` come the mesh axes of each dimension, with commas between dimensions,
        `-` for one that is not split and `+` between axes that split the same one; or
        `replicated`, or `auto`. The pattern may be quoted.

        Examples:
            >>> ShardingRule.parse("'.*kernel' = fsdp,tensor")
            ShardingRule(pattern='.*kernel', spec=(('fsdp',), ('tensor',)))
            >>> ShardingRule.parse("embed = -,fsdp+tensor").spec
            ((), ('fsdp', 'tensor'))
        """
        pattern, separator, right = (part.strip() for part in str(text).rpartition("="))
        if pattern[:1] in ("'", '"') and pattern[-1:] == pattern[:1] and len(pattern) > 1:
            pattern = pattern[1:-1]
        if not separator or not pattern or not right:
            raise ValueError(
                f"{text!r} is not a sharding rule; write for instance '.*kernel' = fsdp"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"the pattern of the rule {text!r} is malformed: {error}") from error
        if right in (AUTO, REPLICATED):
            return cls(pattern, None if right == AUTO else ())
        parts = [[name.strip() for name in part.split("+")] for part in right.split(",")]
        return cls(pattern, tuple(() if part in _UNSPLIT else tuple(part) for part in parts))

    def __str__(self) -> str:
        right = AUTO if self.spec is None else spec_text(self.spec)
        return f"'{self.pattern}' = {right}"


def spec_text(spec: Spec) -> str:
    """Return a spec as rules spell it."""
    return ",".join("+".join(names) or "-" for names in spec) or REPLICATED


def parse_rules(lines: Iterable[str]) -> list[ShardingRule]:
    """Parse rules, one a line; empty lines and those that begin with `#` are skipped."""
    stripped = (line.strip() for line in lines)
    return [ShardingRule.parse(line) for line in stripped if line and not line.startswith("#")]


class Misfit(NamedTuple):
    """A tensor that does not fit its rule; the dimension in question is not split."""

    name: str
    shape: tuple[int, ...]
    spec: Spec  # the rule's
    reason: str  # why it does not fit


class Placed(NamedTuple):
    """The sharding of one tensor."""

    spec: Spec  # its sharding
    rule: int | None  # number of the rule that it comes from; None where none matched
    misfit: Misfit | None = None  # why the rule was not followed, if it was not


class ShardingRules:
    """Rules for a mesh, of which the first that matches a name applies."""

    def __init__(self, rules: Sequence[ShardingRule], mesh: MeshShape) -> None:
        self.rules = tuple(rules)
        self._mesh = mesh
        for rule in rules:
            names = [*itertools.chain.from_iterable(rule.spec or ())]
            unknown = sorted(set(names) - set(mesh.axes))
            if unknown:
                raise ValueError(
                    f"the rule {rule} names {unknown[0]!r}; the mesh has the axes"
                    f" {', '.join(mesh.axes)}"
                )
            if len(set(names)) != len(names):
                raise ValueError(f"the rule {rule} names an axis twice")
        self._matchers = [re.compile(rule.pattern).fullmatch for rule in rules]
        self._fitted: dict[tuple[int, tuple[int, ...]], tuple[Spec, str | None]] = {}

    def place(self, name: str, shape: tuple[int, ...]) -> Placed:
        """Return the sharding of a tensor; replicated where no rule matches its name."""
        rules = enumerate(self._matchers)
        number = next((number for number, matches in rules if matches(name)), None)
        if number is None:
            return Placed((), None)
        given = self.rules[number].spec
        if (number, shape) not in self._fitted:
            self._fitted[number, shape] = _fit(given, shape, self._mesh)
        spec, reason = self._fitted[number, shape]
        misfit = None if reason is None else Misfit(name, shape, given or (), reason)
        return Placed(spec, number, misfit)


def auto_spec(shape: Sequence[int], mesh: MeshShape) -> Spec:
    """Return a split of the outermost dimension that the most devices divide; of a vector, none."""
    if len(shape) < 2:
        return ()
    axes = tuple(mesh.axes)
    spans = [axes[i:j] for i in range(len(axes)) for j in range(i + 1, len(axes) + 1)]
    for names in sorted(spans, key=mesh.ways, reverse=True):
        ways = mesh.ways(names)
        for axis, extent in enumerate(shape):
            if ways > 1 and extent % ways == 0:
                return (*[()] * axis, names)
    return ()


def _fit(spec: Spec | None, shape: Sequence[int], mesh: MeshShape) -> tuple[Spec, str | None]:
    """Return the part of a rule's spec that fits a shape, and why the rest does not."""
    if spec is None:
        return auto_spec(shape, mesh), None
    reasons = []
    fitted = list(spec[: len(shape)])
    if any(spec[len(shape) :]):
        reasons.append(f"it has {len(shape)} dimensions, the rule {len(spec)}")
    for axis, names in enumerate(fitted):
        if shape[axis] % mesh.ways(names):
            reasons.append(
                f"dimension {axis} of {shape[axis]} is not divisible by {mesh.ways(names)}"
            )
            fitted[axis] = ()
    return tuple(fitted), "; ".join(reasons) or None
