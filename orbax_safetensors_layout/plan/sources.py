"""Leaves that come from pieces of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box

from .leaf_reads import TensorPiece


def sources_of(pieces: Sequence[tuple[Box, TensorEntry]]) -> tuple[TensorPiece, ...]:
    """Pieces as what a leaf is made of.

    Args:
        pieces: Regions of the leaf, each standing as a row-major tensor of its own.
    """
    return tuple(TensorPiece(entry, box, AffineView.row_major(box.shape)) for box, entry in pieces)
