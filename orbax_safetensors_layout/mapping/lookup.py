"""Resolves the name of a mapping on a command line: a family and model side, or a variable."""

from __future__ import annotations

import functools
import importlib
import runpy
import types
from typing import Any, cast

from orbax_safetensors_layout.catalog import nearest_names
from orbax_safetensors_layout.errors import MappingError

from . import families
from .families.config import Config
from .families.ready import Options
from .rules import Mapping

FORMS = (
    "FAMILY[:TARGET[-scanned|-unscanned][-quantized][-vision]] ('llama:maxtext-scanned'; 'auto'"
    " takes the family from config.json), MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE"
)
"""The forms of a name, for the help of a command."""

_AUTO = "auto"
_WORDS: dict[str, Options] = {
    "scanned": {"scan": True},
    "unscanned": {"scan": False},
    "quantized": {"quantized": "keep"},
    "vision": {"vision": True},
}
_FAMILIES = families.TARGETS["plain"]


def find_mapping(name: str, config: Config | None = None) -> Mapping:
    """Return the mapping of a name, one of `FORMS`; families and functions take `config`."""
    before, colon, after = name.partition(":")
    if before == _AUTO or before in _FAMILIES:
        return _family(before, after if colon else "plain", config)
    where, colon, attribute = name.rpartition(":")
    if not (where and colon and attribute):
        hint = nearest_names(name, (_AUTO, *_FAMILIES))
        raise MappingError(f"there is no mapping {name!r}", expected=FORMS, hint=hint)
    return _attribute(_module(where), where, attribute, config)


def _family(family: str, side: str, config: Config | None) -> Mapping:
    target, *words = side.split("-")
    options = Options(target=cast(Any, target))  # checked where it is used
    for word in words:
        if word not in _WORDS:
            raise MappingError(
                f"a model side cannot be {word!r}, as in {side!r}",
                expected=f"one of {', '.join(_WORDS)}",
            )
        options |= _WORDS[word]
    if config is None:
        raise MappingError(
            f"the mapping {family}:{side} needs a model's configuration",
            hint="Give the Hugging Face checkpoint, or its config.json.",
        )
    make = families.mapping if family == _AUTO else getattr(families, family)
    mapping: Mapping = make(config, **options)
    return mapping


def imported(where: str) -> object:
    """Return a module by its name, or the variables of a FILE.py."""
    if where.endswith(".py"):
        return types.SimpleNamespace(**runpy.run_path(where))
    return importlib.import_module(where)


def _module(where: str) -> object:
    try:
        return imported(where)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == where
        raise MappingError(
            f"cannot import {where!r}: {type(error).__name__}: {error}",
            expected=FORMS if missing else None,
            hint=nearest_names(where, (_AUTO, *_FAMILIES)) if missing else None,
        ) from error


def _attribute(module: object, where: str, attribute: str, config: Config | None) -> Mapping:
    try:
        value = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        hint = nearest_names(attribute, [n for n in vars(module) if not n.startswith("_")])
        raise MappingError(f"{where!r} has no {attribute!r}", hint=hint) from error
    mapping = value(config) if callable(value) else value
    if not isinstance(mapping, Mapping):
        raise MappingError(
            f"{where}:{attribute} is not a mapping",
            expected="an osl.Mapping, or a function that makes one of a checkpoint's path",
            found=type(mapping).__name__,
        )
    return mapping
