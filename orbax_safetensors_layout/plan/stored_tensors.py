"""Tensors that expressions take, and their pieces: named first, then all located at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.geometry import AffineView, Box

from .leaf_reads import PiecePattern, TensorPiece


class StoredTensors:
    """Tensors by name as if each were in one place, and the names of their pieces, if any."""

    def __init__(self, entries: Mapping[str, TensorEntry], catalog: Catalog | None = None) -> None:
        self.entries = entries
        self.pieces = named_pieces(catalog.pieces(entries) if catalog is not None else {})
        self.catalog = catalog if self.pieces else None
        self.places = {  # a tensor and its box by the name of the piece
            piece: (name, box) for name, boxes in self.pieces.items() for box, piece in boxes
        }

    def __getitem__(self, name: str) -> TensorEntry:
        """Return a tensor, or a piece, whose file and offset are not those where it is stored."""
        if name not in self.places:
            return self.entries[name]
        tensor, box = self.places[name]
        entry = self.entries[tensor]
        stop = entry.start + box.size * entry.dtype.bits // 8
        return entry._replace(name=name, shape=box.shape, stop=stop)


class LocatedPieces:
    """Pieces of the tensors of a catalog that overlap some regions, located at once."""

    def __init__(self, catalog: Catalog, regions: Iterable[tuple[str, Box]]) -> None:
        self._regions: dict[str, dict[Box, None]] = {}
        for name, box in regions:
            self._regions.setdefault(name, {})[box] = None
        self._pieces = catalog.locate({name: (*boxes,) for name, boxes in self._regions.items()})
        self._entries: dict[str, dict[Box, TensorEntry]] = {}
        # Pieces of tensors with equal shards have the same boxes, as objects.
        self._patterns: dict[tuple[int, ...], PiecePattern] = {}

    def entry(self, name: str, box: Box) -> TensorEntry:
        """Return a piece that is one of the regions."""
        if name not in self._entries:
            self._entries[name] = dict(self._pieces[name])
        return self._entries[name][box]

    def of_boxes(
        self, name: str, boxes: Sequence[Box]
    ) -> tuple[tuple[TensorPiece, ...], PiecePattern]:
        """Return the pieces of a tensor that overlap boxes, which are among the regions."""
        pieces: Sequence[tuple[Box, TensorEntry]] = self._pieces[name]
        if len(self._regions[name]) > len(boxes):
            pieces = [piece for piece in pieces if any(map(piece[0].intersect, boxes))]
        key = tuple(id(box) for box, _ in pieces)
        if key not in self._patterns:
            parts = [(box, AffineView.row_major(box.shape)) for box, _ in pieces]
            self._patterns[key] = PiecePattern(tuple(parts))
        pattern = self._patterns[key]
        placed = zip(pieces, pattern.parts, strict=True)
        return tuple(TensorPiece(entry, *part) for (_, entry), part in placed), pattern


def named_pieces(boxes: Mapping[str, Iterable[Box]]) -> dict[str, list[tuple[Box, str]]]:
    """Return boxes of tensors that are stored or held alone, each with its name in expressions."""
    return {name: [(box, f"{name} {box}") for box in boxes[name]] for name in boxes}
