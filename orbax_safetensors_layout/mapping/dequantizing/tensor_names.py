"""The names of tensors in quantised checkpoints."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable

# Scales of activations and of caches: what is computed with weights, not weights.
_OF_ACTIVATIONS = re.compile(
    r"(?!.*\.correct_output_scale$)"  # a weight of Gemma 3n
    r"(.*[._](([qkv]|kv)(_cache)?_scale|(input|output)_(scale|zero_point|global_scale|amax)"
    r"|(k|v|q)_zero_point)|.*\.((input|output)_)?activation_scale(_inv)?)"
)
_OF_EXPERTS = re.compile(r"(?P<weight>.+)_activation_scale(_inv)?")
_SPECIAL = re.compile(r"[*?\[{]")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def is_of_activations(name: str, weights: Collection[str]) -> bool:
    """Whether a tensor beside quantised weights is a scale of activations or of a cache."""
    if weights and _OF_ACTIVATIONS.fullmatch(name):
        return True
    of_experts = _OF_EXPERTS.fullmatch(name)
    return of_experts is not None and of_experts["weight"] in weights


def with_wildcards(name: str) -> str:
    """Return a name with wildcards in place of the components that are numbers."""
    counter = itertools.count()
    return _NUMBER.sub(lambda _: f"{{n{next(counter)}}}", name)


def patterns_to_ignore(names: Iterable[str]) -> list[str]:
    """Return patterns of tensors that are left out, with those that differ in numbers alone."""
    return sorted({_NUMBER.sub("*", _SPECIAL.sub(r"[\g<0>]", name)) for name in names})
