"""Mappings and functions that arguments name."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from orbax_safetensors_layout.cli.verb import UsageError


def add_mapping(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds `--mapping`.

    Args:
        parser: To this.
        help: What the mapping is for.
    """
    parser.add_argument(
        "--mapping",
        "--family",
        metavar="NAME[:TARGET]|MODULE:ATTRIBUTE",
        help=f"{help}: a ready mapping of osl.families, as 'llama:maxtext', 'mapping:tunix' to go"
        " by config.json, or an osl.Mapping of a Python module",
    )


def find_mapping(text: str, path: str) -> Any:
    """The mapping that an argument names.

    Args:
        text: `NAME[:TARGET]` or `MODULE:ATTRIBUTE`.
        path: The checkpoint whose configuration a ready mapping goes by.

    Raises:
        UsageError: There is none.
    """
    from orbax_safetensors_layout.mapping import families
    from orbax_safetensors_layout.mapping.rules import Mapping

    name, _, target = text.partition(":")
    known = [family for family in families.__all__ if family.islower()]
    if name in known:
        return getattr(families, name)(path, target=target or "plain")
    if not target:
        raise UsageError(f"there is no family {name!r}; there are {', '.join(known)}")
    found = python_object(text)
    if callable(found) and not isinstance(found, Mapping):
        found = found()
    if not isinstance(found, Mapping):
        raise UsageError(f"{text!r} is no osl.Mapping but a {type(found).__name__}")
    return found


def python_object(text: str) -> Any:
    """What `module:attribute` names; modules of the working folder count.

    Raises:
        UsageError: It names nothing.
        ImportError: The module can not be imported.
    """
    module, _, name = text.partition(":")
    if not (module and name):
        raise UsageError(f"{text!r} is no MODULE:ATTRIBUTE")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise UsageError(f"{text!r}: {error}") from error
