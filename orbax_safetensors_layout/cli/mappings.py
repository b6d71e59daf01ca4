"""Mappings and functions that arguments name."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from orbax_safetensors_layout.errors import MappingError

from .command import UsageError


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
        help=f"{help}: a ready mapping of osl.families, as 'llama:maxtext-unscanned', 'auto:tunix'"
        " to go by config.json, or an osl.Mapping of a Python module or FILE.py",
    )


def find_mapping(text: str, path: str) -> Any:
    """The mapping that an argument names; modules of the working folder count.

    Args:
        text: As for `mapping.find_mapping`.
        path: The checkpoint whose configuration a ready mapping goes by.

    Raises:
        UsageError: There is none.
    """
    from orbax_safetensors_layout.mapping import find_mapping as find

    _see_working_folder()
    try:
        return find(text, path)
    except MappingError as error:
        raise UsageError(str(error)) from error


def python_object(text: str) -> Any:
    """What `module:attribute` names; modules of the working folder count.

    Raises:
        UsageError: It names nothing.
        ImportError: The module cannot be imported.
    """
    module, _, name = text.partition(":")
    if not (module and name):
        raise UsageError(f"{text!r} is no MODULE:ATTRIBUTE")
    _see_working_folder()
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise UsageError(f"{text!r}: {error}") from error


def _see_working_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
