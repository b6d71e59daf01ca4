"""Tensors that another, small checkpoint changes: the fine-tuned parts of a model.

A change is looked up by the name of the tensor when a rule is bound. Its own arrays are small:
plans do not have them, and they are read whole where a region is computed (`Overlay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from orbax_safetensors_layout.errors import MappingError

from ..affine.bound import BoundExpr
from ..matching import Rule
from ..names import Captures, TensorSpecs, substitute
from . import ops
from .choices import Either, Same
from .expression import Expr, Tensor
from .opaque_ops import Compute, OpaqueFunction

_STORED = (".weight_packed", ".qweight", "_blocks")  # of quantised tensors, and their plain names
_PLAIN = (".weight", ".weight", "")


class Overlay(Protocol):
    """Changes of tensors, by name."""

    def matches(self, pattern: str) -> set[str]:
        """Return the names of the changes that tensors of a pattern's names can have."""

    def replaces(self, name: str) -> bool:
        """Whether a tensor is replaced, so that the checkpoint need not have it."""

    def changed(
        self, name: str, operand: BoundExpr | None, specs: TensorSpecs, *, decoded: bool
    ) -> BoundExpr:
        """Return a tensor with its change: `operand` where there is none.

        `decoded` tells that it was quantised, None that the checkpoint does not have it; `specs`
        are those of the tensors that the mapping takes, and the names of all.
        """


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Overlaid(Expr):
    """A tensor, or one that is decoded, with the change of its name."""

    operand: Expr
    name: str
    overlay: Overlay

    @property
    def is_generic(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"merged({self.operand!r})"

    def patterns(self) -> Iterator[str]:
        yield from self.operand.patterns()

    def children(self) -> tuple[Expr, ...]:
        return (self.operand,)

    def bind_to(self, captures: Captures, specs: TensorSpecs) -> BoundExpr:
        name = substitute(self.name, captures)
        if self.overlay.replaces(name) and name not in specs:
            return self.overlay.changed(name, None, specs, decoded=False)
        operand = self.operand.bind_to(captures, specs)
        inner = self.operand
        while isinstance(inner, Overlaid):
            inner = inner.operand
        return self.overlay.changed(name, operand, specs, decoded=isinstance(inner, Compute))

    def infer(self, captures: Captures, shape: ops.Extents) -> Iterator[tuple[str, ops.Extents]]:
        raise MappingError(
            f"{self!r} does not invert: a merged weight cannot be taken apart",
            hint="Save through the mapping of the base.",
        )


def overlaid(rules: Sequence[Rule], overlay: Overlay) -> tuple[tuple[Rule, ...], set[str]]:
    """Return rules whose tensors are changed, and the names of the changes that these take."""
    taken: set[str] = set()

    def walk(expr: Any, stands_for: str = "") -> Any:
        def of(expr: Expr, name: str) -> Expr:
            name = stands_for if stands_for and overlay.matches(stands_for) else name
            matches = overlay.matches(name)
            taken.update(matches)
            return Overlaid(expr, name, overlay) if matches else expr

        if isinstance(expr, tuple):
            return tuple(walk(part, stands_for) for part in expr)
        if not isinstance(expr, Expr):
            return expr
        if isinstance(expr, Overlaid):  # by another overlay, whose change comes first
            return of(expr, expr.name)
        if isinstance(expr, Tensor):
            return of(expr, expr.name)
        if isinstance(expr, Same) and isinstance(expr.first, Tensor):
            return of(expr, expr.first.name)
        if isinstance(expr, Either) and all(map(overlay.replaces, expr.first.patterns())):
            return walk(expr.first)
        if isinstance(expr, Either):  # what stands in for a tensor has the change of that
            other = walk(expr.other, _plain_name(next(expr.first.patterns(), "")))
            return dataclasses.replace(expr, first=walk(expr.first), other=other)
        if isinstance(expr, Compute) and not isinstance(expr.kernel, OpaqueFunction):
            return of(expr, _plain_name(next(expr.patterns(), "")))
        fields = {field.name: getattr(expr, field.name) for field in dataclasses.fields(expr)}  # type: ignore[arg-type]
        fields = {name: walk(value, stands_for) for name, value in fields.items()}
        return dataclasses.replace(expr, **fields)  # type: ignore[type-var]

    changed = tuple(dataclasses.replace(rule, expr=walk(rule.expr)) for rule in rules)
    return changed, taken


def _plain_name(stored: str) -> str:
    """Return the name that a quantised tensor has where it is not.

    >>> _plain_name("layers.0.up.weight_packed"), _plain_name("experts.down_proj_blocks")
    ('layers.0.up.weight', 'experts.down_proj')
    """
    for ending, plain in zip(_STORED, _PLAIN, strict=True):
        if stored.endswith(ending):
            return stored.removesuffix(ending) + plain
    return stored
