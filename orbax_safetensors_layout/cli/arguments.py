"""Parses arguments that several commands share: meshes, sharding rules, budgets, mappings."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.options import KIB
from orbax_safetensors_layout.runtime import parse_size
from orbax_safetensors_layout.sharding import ShardingRule, parse_rules

from .command import UsageError

_LEAST_BUDGET_BYTES = 64 * KIB


def mesh_axes(text: str) -> dict[str, int]:
    """Parse the axes of `fsdp=64,tensor=4`; a malformed text is a `ValueError`."""
    axes = {}
    for part in text.split(","):
        name, separator, size = (piece.strip() for piece in part.partition("="))
        if not (name and separator and size.isdecimal() and int(size)) or name in axes:
            raise ValueError(f"{text!r} is no mesh; write for instance fsdp=64,tensor=4")
        axes[name] = int(size)
    return axes


def memory_budget(text: str) -> int:
    """Parse the bytes of a memory budget; too few, as without a unit, are a `ValueError`."""
    size = parse_size(text)
    if size < _LEAST_BUDGET_BYTES:
        raise ValueError(
            f"{text} is too little memory to work with; 2GiB is usual, 64KiB the least"
        )
    return size


def sharding_rules(texts: Sequence[str] | None) -> tuple[ShardingRule, ...]:
    """Parse rules, each given as itself or as a file of them; a malformed one is a `ValueError`."""
    rules: list[ShardingRule] = []
    for text in texts or ():
        lines = Path(text).read_text().splitlines() if os.path.isfile(text) else [text]
        rules += parse_rules(lines)
    return tuple(rules)


def add_mapping(parser: argparse.ArgumentParser, help: str) -> None:
    """Adds `--mapping`, whose purpose `help` says."""
    parser.add_argument(
        "--mapping",
        "--family",
        metavar="NAME[:TARGET]|MODULE:ATTRIBUTE",
        help=f"{help}: a ready mapping of osl.families, as 'llama:maxtext-unscanned', 'auto:tunix'"
        " to go by config.json, or an osl.Mapping of a Python module or FILE.py",
    )


def find_mapping(text: str, path: str) -> Any:
    """Return the mapping that `--mapping` names; the working folder is on the module path.

    Args:
        text: As for `mapping.find_mapping`.
        path: The checkpoint whose configuration a ready mapping takes.
    """
    from orbax_safetensors_layout.mapping import find_mapping as find

    _see_working_folder()
    try:
        return find(text, path)
    except MappingError as error:
        raise UsageError(str(error)) from error


def python_object(text: str) -> Any:
    """Return the object that `module:attribute` names; the working folder is on the module path."""
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
