"""What tells mappings apart, for work on one that is continued later or shared by processes."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from .rules import Mapping


def fingerprint(mapping: Mapping) -> str:
    """A digest that mappings have in common which are written alike, in whatever process.

    The `repr` of an expression is for people and leaves out most of many indices; this does not.
    Functions count by their names.

    Example:
        >>> from orbax_safetensors_layout.mapping.expr.expression import tensor
        >>> from orbax_safetensors_layout.mapping.rules import rule
        >>> ways = [[*range(20)], [*range(18), 19, 18]]
        >>> one, two = (Mapping([rule("a", tensor("b").take(0, way))]) for way in ways)
        >>> repr(one) == repr(two), fingerprint(one) == fingerprint(two)
        (True, False)
    """
    files = None if mapping.files is None else [*mapping.files.known()]
    facts = (
        [_facts(rule) for rule in mapping.rules],
        (*mapping.buffers, *mapping.ignore),
        mapping.strict,
        files,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _facts(value: Any) -> object:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value).__name__, [(name, _facts(getattr(value, name))) for name in names]
    if isinstance(value, tuple | list):
        return [_facts(item) for item in value]
    if callable(value):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))
    return value
