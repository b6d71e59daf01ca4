"""Digests of mappings, for work on one that is continued later or shared by processes."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from .rules import Mapping


def fingerprint(mapping: Mapping) -> str:
    """Return a digest that is equal for equal mappings, in every process.

    Unlike the `repr` of an expression it covers all indices. Functions count by their names.

    Example:
        >>> from orbax_safetensors_layout.mapping.expr.expression import tensor
        >>> from orbax_safetensors_layout.mapping.rules import rule
        >>> ways = [[*range(20)], [*range(18), 19, 18]]
        >>> a, b = (Mapping([rule("a", tensor("b").take(0, way))]) for way in ways)
        >>> repr(a) == repr(b), fingerprint(a) == fingerprint(b)
        (True, False)
    """
    files = None if mapping.files is None else [*mapping.files.known()]
    parts = (
        [_encoded(rule) for rule in mapping.rules],
        (*mapping.buffers, *mapping.ignore),
        mapping.strict,
        files,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _encoded(value: Any) -> object:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value).__name__, [(name, _encoded(getattr(value, name))) for name in names]
    if isinstance(value, tuple | list):
        return [_encoded(item) for item in value]
    if callable(value):
        return getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))
    return value
