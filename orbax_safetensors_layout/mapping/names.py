"""Name patterns with named wildcards, and the tensors of one side of a mapping by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import TensorEntry, short_repr
from orbax_safetensors_layout.geometry import Box

from .argument_checks import integers, text

Captures = Mapping[str, str]
"""The value of each wildcard."""

WILDCARD = re.compile(r"\{([^{}]*)\}")


class _Component(NamedTuple):
    text: str
    wildcards: tuple[str, ...]
    regex: re.Pattern[str] | None  # None where one wildcard is all

    def match(self, text: str, captures: dict[str, str]) -> dict[str, str] | None:
        """Return the captures with those of `text`, or None where it does not match."""
        if self.regex is None:
            return {**captures, self.wildcards[0]: text}
        match = self.regex.fullmatch(text)
        if match is None:
            return None
        merged = dict(captures)
        for name, value in zip(self.wildcards, match.groups(), strict=True):
            if merged.setdefault(name, value) != value:
                return None
        return merged


def parse_pattern(pattern: str) -> tuple[_Component, ...]:
    """Return the components of a pattern.

    `{name}` matches one dotted component of a name, or for a part of one: `layers.{i}.kernel`
    or `layers_{i}.kernel`. The same wildcard matches the same text everywhere.
    """
    return _parse_pattern(text(pattern, "a pattern of names"))


@functools.lru_cache(1 << 14)
def _parse_pattern(pattern: str) -> tuple[_Component, ...]:
    components = []
    for dotted in pattern.split("."):
        parts = WILDCARD.split(dotted)
        literals, names = parts[::2], tuple(parts[1::2])
        if not all(map(str.isidentifier, names)) or any(set("{}") & set(x) for x in literals):
            raise MappingError(
                f"name pattern {pattern!r}: a wildcard is written as {{name}}, in one component"
            )
        regex = None if literals == ["", ""] else re.compile("(.+)".join(map(re.escape, literals)))
        components.append(_Component(dotted, names, regex))
    return tuple(components)


def wildcards(pattern: str) -> tuple[str, ...]:
    """Return the names of a pattern's wildcards, each once."""
    return tuple(dict.fromkeys(n for part in parse_pattern(pattern) for n in part.wildcards))


def substitute(pattern: str, captures: Captures) -> str:
    """Return a pattern with the wildcards that have a value replaced."""
    if "{" not in pattern:
        return pattern
    return WILDCARD.sub(lambda match: captures.get(match[1], match[0]), pattern)


class NameTree:
    """Names by their dotted components."""

    __slots__ = "_children", "_ends"

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._children: dict[str, NameTree] = {}
        self._ends = False  # whether a name ends here
        for name in names:
            node = self
            for part in name.split("."):
                if part not in node._children:
                    node._children[part] = NameTree()
                node = node._children[part]
            node._ends = True

    def match(self, pattern: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Yields the names that match a pattern, each with the values of all wildcards.

        >>> list(NameTree(["a.0.w", "a.1.w", "a.1.b"]).match("a.{i}.w"))
        [('a.0.w', {'i': '0'}), ('a.1.w', {'i': '1'})]
        """
        yield from self._match(parse_pattern(pattern), 0, "", {})

    def _match(
        self, components: tuple[_Component, ...], depth: int, prefix: str, captures: dict[str, str]
    ) -> Iterator[tuple[str, dict[str, str]]]:
        component = components[depth]
        literal = substitute(component.text, captures)
        is_open = any(name not in captures for name in component.wildcards)
        parts = self._children if is_open else [literal] if literal in self._children else []
        for part in parts:
            values = component.match(part, captures) if is_open else captures
            if values is None:
                continue
            node, name = self._children[part], prefix + part
            if depth + 1 < len(components):
                yield from node._match(components, depth + 1, f"{name}.", values)
            elif node._ends:
                yield name, values


class TensorSpec(NamedTuple):
    """Shape, and numpy or ml_dtypes dtype, of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Name to shape and dtype."""


Pieces: TypeAlias = Mapping[str, Sequence[tuple[Box, str]]]
"""Boxes of tensors that are stored in pieces, each with a name of its own."""


class TensorSpecs(dict[str, TensorSpec]):
    """Shapes and dtypes by name; `names` are also of tensors of which these are not known."""

    def __init__(
        self,
        shapes: Shapes,
        names: Iterable[str] | None = None,
        pieces: Pieces | None = None,
        packed: Set[str] = frozenset(),
    ) -> None:
        for name, (shape, dtype) in shapes.items():
            self[name] = TensorSpec(tuple(shape), np.dtype(dtype))
        self.names = self.keys() if names is None else dict.fromkeys(names).keys()
        self.pieces = pieces or {}
        self.packed = packed  # those whose elements share bytes

    def described(
        self,
        entries: Mapping[str, TensorEntry],
        pieces: Pieces | None = None,
    ) -> TensorSpecs:
        """Return the same names, with shapes and dtypes of a checkpoint's tensors."""
        shapes = {name: (entry.shape, entry.dtype.numpy) for name, entry in entries.items()}
        packed = {name for name, entry in entries.items() if entry.dtype.packed}
        specs = TensorSpecs(shapes, self.names, pieces, packed)
        specs.tree = self.tree
        return specs

    @classmethod
    def of(cls, shapes: Shapes) -> TensorSpecs:
        """Check tensors that a user gives."""
        if isinstance(shapes, TensorSpecs):
            return shapes
        try:
            return cls({text(n, "a name"): (integers(s, n), d) for n, (s, d) in shapes.items()})
        except (AttributeError, TypeError, ValueError) as error:
            what, expected = "there are no shapes and dtypes by name", "{'name': ((4,), 'float32')}"
            raise MappingError(what, expected=expected, found=short_repr(shapes)) from error

    @functools.cached_property
    def tree(self) -> NameTree:
        return NameTree(self.names)
