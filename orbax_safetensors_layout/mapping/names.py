"""Name patterns with named wildcards, and the tensors of one side of a mapping by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format import TensorEntry, short_repr
from orbax_safetensors_layout.geometry import Box

from .argument_checks import integers, text

if TYPE_CHECKING:
    from .affine.bound import BoundExpr

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
    template, names = _template(pattern)
    return template % tuple([captures.get(name, f"{{{name}}}") for name in names])


@functools.lru_cache(1 << 14)
def _template(pattern: str) -> tuple[str, tuple[str, ...]]:
    """Return a pattern as a format of `%`, and its wildcards in turn."""
    literals = WILDCARD.split(pattern)
    names, literals = tuple(literals[1::2]), literals[::2]
    return "%s".join(literal.replace("%", "%%") for literal in literals), names


class _OpenPart(NamedTuple):
    """A component whose wildcards have no value yet, and the components before it, each dotted."""

    before: str
    component: _Component


@functools.lru_cache(1 << 14)
def _open_parts(components: tuple[_Component, ...]) -> tuple[tuple[_OpenPart, ...], str]:
    """Return the open parts of a pattern, and the components after the last, each dotted."""
    parts: list[_OpenPart] = []
    known: set[str] = set()
    before = ""
    for component in components:
        if known.issuperset(component.wildcards):
            before += component.text + "."
        else:
            parts.append(_OpenPart(before, component))
            known.update(component.wildcards)
            before = ""
    return tuple(parts), before


class NameTree:
    """Names by their dotted components."""

    __slots__ = "_children", "_names"

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: Set[str] = dict.fromkeys(names).keys()
        # By the components before them, each dotted, those that names go on with, in their order.
        self._children: dict[str, dict[str, None]] = {"": {}}
        for name in self._names:
            end = name.rfind(".") + 1
            self._of(name[:end])[name[end:]] = None

    def _of(self, prefix: str) -> dict[str, None]:
        children = self._children.get(prefix)
        if children is None:
            end = prefix.rfind(".", 0, -1) + 1
            self._of(prefix[:end])[prefix[end:-1]] = None
            children = self._children[prefix] = {}
        return children

    def match(self, pattern: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Yields the names that match a pattern, each with the values of all wildcards.

        >>> list(NameTree(["a.0.w", "a.1.w", "a.1.b"]).match("a.{i}.w"))
        [('a.0.w', {'i': '0'}), ('a.1.w', {'i': '1'})]
        """
        parts, after = _open_parts(parse_pattern(pattern))
        for prefix, captures in self._match(parts):
            name = (prefix + substitute(after, captures))[:-1]
            if name in self._names:
                yield name, captures

    def _match(self, parts: Sequence[_OpenPart]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yields what some parts match, each component dotted."""
        if not parts:
            yield "", {}
            return
        before, component = parts[-1]
        for prefix, captures in self._match(parts[:-1]):
            place = prefix + substitute(before, captures)
            for part in self._children.get(place, ()):
                values = component.match(part, captures)
                if values is not None:
                    yield f"{place}{part}.", values


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
    ) -> None:
        kinds: dict[object, TensorSpec] = {}  # the same object for equal ones
        for name, (shape, dtype) in shapes.items():
            spec = TensorSpec(tuple(shape), np.dtype(dtype))
            self[name] = kinds.setdefault(spec, spec)
        self.bound: set[str] = set()  # those of `expressions` that were taken
        self.names = self.keys() if names is None else dict.fromkeys(names).keys()
        self.pieces = pieces or {}
        self.expressions: Mapping[str, BoundExpr] = {}  # of those that another mapping makes
        self._of_names: TensorSpecs | None = None  # others of the same names

    def made_of(self, expressions: Mapping[str, BoundExpr]) -> TensorSpecs:
        """Return the same names, of tensors that are made of others."""
        specs = TensorSpecs({name: (e.shape, e.dtype) for name, e in expressions.items()})
        specs.names, specs._of_names, specs.expressions = self.names, self, expressions
        return specs

    def described(
        self,
        entries: Mapping[str, TensorEntry],
        pieces: Pieces | None = None,
    ) -> TensorSpecs:
        """Return the same names, with shapes and dtypes of a checkpoint's tensors.

        Tensors of one shape and dtype of the file have the same object.
        """
        specs = TensorSpecs({}, None, pieces)
        specs.names, specs._of_names = self.names, self
        kinds: dict[object, TensorSpec] = {}
        for name, (_, dtype, shape, _, _, _) in entries.items():
            key = shape, id(dtype)  # dtypes of the file, of which several are one of numpy
            spec = kinds.get(key)
            if spec is None:
                spec = kinds[key] = TensorSpec(shape, dtype.numpy)
            specs[name] = spec
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
        return NameTree(self.names) if self._of_names is None else self._of_names.tree
