"""Arguments that several verbs take: meshes, sharding rules, mappings, objects of modules."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orbax_safetensors_layout.cli.verb import UsageError
from orbax_safetensors_layout.plan.sharding_rules import ShardingRule, parse_rules


def mesh_axes(text: str) -> dict[str, int]:
    """Axes from `fsdp=64,tensor=4`.

    Raises:
        ValueError: It is no mesh.
    """
    axes = {}
    for part in text.split(","):
        name, separator, size = (piece.strip() for piece in part.partition("="))
        if not (name and separator and size.isdecimal() and int(size)) or name in axes:
            raise ValueError(f"{text!r} is no mesh; write for instance fsdp=64,tensor=4")
        axes[name] = int(size)
    return axes


def sharding_rules(texts: Sequence[str] | None) -> tuple[ShardingRule, ...]:
    """Rules, each given as itself or as a file of them.

    Raises:
        ValueError: A text is no rule.
    """
    rules: list[ShardingRule] = []
    for text in texts or ():
        lines = Path(text).read_text().splitlines() if os.path.isfile(text) else [text]
        rules += parse_rules(lines)
    return tuple(rules)


def object_of(text: str) -> Any:
    """What `module:name` is; modules of the working folder count.

    Raises:
        UsageError: There is no such object.
    """
    module, separator, name = text.partition(":")
    if not (module and separator and name):
        raise UsageError(f"{text!r} is no MODULE:NAME")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise UsageError(f"{text!r}: {error}") from error


def family_mapping(text: str, path: str) -> Any:
    """A ready mapping from `NAME[:TARGET]`.

    Args:
        text: The text.
        path: The folder with the model's `config.json`.

    Raises:
        UsageError: There is no such family.
    """
    from orbax_safetensors_layout.mapping import families

    name, _, target = text.partition(":")
    if name not in families.__all__ or not name.islower():
        names = ", ".join(known for known in families.__all__ if known.islower())
        raise UsageError(f"there is no family {name!r}; there are {names}")
    return getattr(families, name)(path, target=target or "plain")
