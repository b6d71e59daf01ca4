"""Loads as on an accelerator."""

from __future__ import annotations

import sys

import orbax_safetensors_layout.reading.read as read_module
from orbax_safetensors_layout.reading import tile_buffers


class Accelerator:
    """Makes the load believe that arrays do not keep the buffers they are made of."""

    def __init__(self, monkeypatch):
        module = sys.modules["orbax_safetensors_layout.load"]
        monkeypatch.setattr(module, "adopts", lambda parsed: False)
        monkeypatch.setattr(read_module, "buffer_slices", self.buffer_slices)
        self.sizes: list[int] = []

    def buffer_slices(self, group, opened, staging):
        slices = tile_buffers.buffer_slices(group, opened, staging)
        memories = {
            id(destination.buffer.memory): destination.buffer.memory for destination in slices
        }
        self.sizes.append(sum(memory.size for memory in memories.values()))
        return slices
