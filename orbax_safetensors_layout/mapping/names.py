"""Name patterns with named wildcards, and names arranged so that matching them is cheap."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from orbax_safetensors_layout.errors import MappingError

from .argument_checks import text

Captures = Mapping[str, str]
"""The value of each wildcard."""

WILDCARD = re.compile(r"\{([^{}]*)\}")

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # that a numpy index can be


class Component(NamedTuple):
    """One dotted component of a pattern: literal text and wildcards in alternation.

    Attributes:
        texts: The literal text before each wildcard, and after the last.
        wildcards: The names of the wildcards.
    """

    texts: tuple[str, ...]
    wildcards: tuple[str, ...]

    def format(self, captures: Captures) -> str | None:
        """Return the text, or None where a wildcard has no value."""
        parts = [self.texts[0]]
        for name, literal in zip(self.wildcards, self.texts[1:], strict=True):
            if name not in captures:
                return None
            parts += captures[name], literal
        return "".join(parts)

    def match(self, text: str, captures: dict[str, str]) -> dict[str, str] | None:
        """Return the captures with those of `text`, or None where it does not match."""
        if len(self.wildcards) == 1 and self.texts == ("", ""):
            return {**captures, self.wildcards[0]: text}
        match = _compiled(self).fullmatch(text)
        if match is None:
            return None
        merged = dict(captures)
        for name, value in zip(self.wildcards, match.groups(), strict=True):
            if merged.setdefault(name, value) != value:
                return None
        return merged


@functools.lru_cache(1024)
def _compiled(component: Component) -> re.Pattern[str]:
    return re.compile("(.+)".join(map(re.escape, component.texts)))


def parse_pattern(pattern: str) -> tuple[Component, ...]:
    """Return the components of a pattern.

    `{name}` stands for one dotted component of a name, or for a part of one: `layers.{i}.kernel`
    or `layers_{i}.kernel`. The same wildcard stands for the same text everywhere.

    Raises:
        MappingError: It is not a string, a brace is left alone, or a wildcard has no name.
    """
    return _parse_pattern(text(pattern, "a pattern of names"))


@functools.lru_cache(1 << 14)
def _parse_pattern(pattern: str) -> tuple[Component, ...]:
    components = []
    for dotted in pattern.split("."):
        parts = WILDCARD.split(dotted)
        names = parts[1::2]
        if not all(name.isidentifier() for name in names) or any(
            brace in literal for literal in parts[::2] for brace in "{}"
        ):
            raise MappingError(
                f"name pattern {pattern!r}: a wildcard is written as {{name}}, in one component"
            )
        components.append(Component(tuple(parts[::2]), tuple(names)))
    return tuple(components)


def wildcards(pattern: str) -> tuple[str, ...]:
    """Return the names of a pattern's wildcards, each once.

    >>> wildcards("layers.{i}.experts.{e}.kernel")
    ('i', 'e')
    """
    return tuple(dict.fromkeys(n for part in parse_pattern(pattern) for n in part.wildcards))


def substitute(pattern: str, captures: Captures) -> str:
    """Return a pattern with the wildcards that have a value replaced.

    >>> substitute("layers.{i}.experts.{e}", {"i": "3"})
    'layers.3.experts.{e}'
    """
    if "{" not in pattern:
        return pattern
    return WILDCARD.sub(lambda found: captures.get(found[1], found[0]), pattern)


def is_index(text: str) -> bool:
    """Whether a text is a decimal number as a name has it: without sign or leading zeros."""
    return _NUMBER.fullmatch(text) is not None


class NameTree:
    """Names by their dotted components."""

    def __init__(self, names: Iterable[str]) -> None:
        self._root = _Node()
        for name in names:
            node = self._root
            for part in name.split("."):
                node = node.children.setdefault(part, _Node())
            node.ends = True

    def match(
        self, pattern: str, captures: Captures | None = None
    ) -> Iterator[tuple[str, dict[str, str]]]:
        """Yields the names that match a pattern, each with the values of all wildcards.

        Only branches that can match are visited.

        Args:
            pattern: The pattern.
            captures: Required values of some wildcards.

        >>> list(NameTree(["a.0.w", "a.1.w", "a.1.b"]).match("a.{i}.w"))
        [('a.0.w', {'i': '0'}), ('a.1.w', {'i': '1'})]
        """
        components = parse_pattern(pattern)
        yield from _match(self._root.children, components, 0, "", dict(captures or {}))


@dataclasses.dataclass(slots=True)
class _Node:
    ends: bool = False  # whether a name ends here
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)


def _match(
    children: dict[str, _Node],
    components: tuple[Component, ...],
    depth: int,
    prefix: str,
    captures: dict[str, str],
) -> Iterator[tuple[str, dict[str, str]]]:
    component = components[depth]
    literal = component.format(captures)
    parts = children if literal is None else [literal] if literal in children else []
    for part in parts:
        found = captures if literal is not None else component.match(part, captures)
        if found is None:
            continue
        node, name = children[part], prefix + part
        if depth + 1 < len(components):
            yield from _match(node.children, components, depth + 1, f"{name}.", found)
        elif node.ends:
            yield name, found
