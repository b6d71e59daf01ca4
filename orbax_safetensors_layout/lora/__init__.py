"""Adapters of fine-tuned models, as PEFT stores them: small tensors beside a base model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_safetensors_layout.lazy import lazy_exports

if TYPE_CHECKING:
    from . import peft

__getattr__ = lazy_exports(__name__, {".peft": ""})
