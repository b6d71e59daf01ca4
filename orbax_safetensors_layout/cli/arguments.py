"""Meshes and sharding rules that arguments spell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from orbax_safetensors_layout.options import KIB
from orbax_safetensors_layout.runtime import parse_size
from orbax_safetensors_layout.sharding import ShardingRule, parse_rules

_LEAST_BUDGET_BYTES = 64 * KIB


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


def memory_budget(text: str) -> int:
    """Bytes of a memory budget.

    Raises:
        ValueError: It is no size, or so small that one may have forgotten its unit.
    """
    size = parse_size(text)
    if size < _LEAST_BUDGET_BYTES:
        raise ValueError(
            f"{text} is too little memory to work with; 2GiB is usual, 64KiB the least"
        )
    return size


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
