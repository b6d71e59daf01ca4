"""Meshes and sharding rules that arguments spell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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
