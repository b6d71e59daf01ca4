"""The README and the pages of `docs/`, and the checkpoint that their code and commands are for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from checkpoints import llama_like, save
from programs import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
_FIRST = (README, DOCS / "load.md", DOCS / "training.md")  # whose names the other pages use
PAGES = (*_FIRST, *sorted({*DOCS.glob("*.md")}.difference(_FIRST)))
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "vocab_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}

TENSORS = llama_like(hidden=512)
# What a reader's Llama has besides.
for _layer in ("model.layers.0.", "model.layers.1."):
    TENSORS[_layer + "self_attn.v_proj.weight"] = TENSORS[_layer + "self_attn.k_proj.weight"]
    TENSORS[_layer + "mlp.gate_proj.weight"] = TENSORS[_layer + "mlp.up_proj.weight"]
    TENSORS[_layer + "post_attention_layernorm.weight"] = TENSORS["model.norm.weight"]
TENSORS["lm_head.weight"] = TENSORS["model.embed_tokens.weight"]


def save_llama(folder: Path) -> Path:
    """Saves the checkpoint as the hub would have it."""
    save(folder, TENSORS, files=3)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
        language: As the fence names it.
        line: The number in the page of its first line.
        text: Its lines.
    """

    language: str
    line: int
    text: str


def blocks(text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page."""
    language, first, inside = None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("```"):
            inside.append(line)
        elif language is None:
            language, first, inside = line.removeprefix("```"), number + 1, []
        else:
            yield Block(language, first, "\n".join(inside))
            language = None
    assert language is None, "a block is not closed"
