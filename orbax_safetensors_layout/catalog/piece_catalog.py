"""Finds the pieces of tensors in their files, reading only the headers that are needed."""

from __future__ import annotations

import functools
import math
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from absl import logging

from orbax_safetensors_layout.errors import InvalidIndexError, InvalidManifestError, listed
from orbax_safetensors_layout.format import (
    DTYPES,
    MAIN_INDEX,
    MANIFEST,
    SAVE_ID,
    DType,
    Header,
    StoredPieces,
    StoredTensor,
    TensorEntry,
    absent_files,
    is_piece_file,
    piece_file_prefix,
    piece_name,
)
from orbax_safetensors_layout.geometry import Box

_MIXED = "Files of two saves may be mixed in the folder."

VisitHeaders = Callable[[Sequence[str], Callable[[str, Header], None]], None]
"""Calls a function, on any thread, with each of some files and its header."""


def check_save(save_id: str, file: str, header: Header) -> None:
    """Raises where a file of pieces belongs to another save than its manifest."""
    own_id = header.metadata.get(SAVE_ID)
    if own_id != save_id:
        raise InvalidManifestError(
            "a file of pieces belongs to another save than its manifest",
            file=file,
            expected=f"save {save_id}",
            found=f"save {own_id}" if own_id else "no save in its header",
            hint=_MIXED,
        )


def check_whole(file: str, header: Header) -> None:
    """Raises where a file of a folder without a manifest of pieces is one of pieces."""
    if SAVE_ID in header.metadata and is_piece_file(file):
        raise InvalidManifestError(
            "the file holds pieces of tensors, and no manifest beside it names them",
            file=file,
            expected=f"'{MANIFEST}' of the same save",
            hint="The copy of the checkpoint may be incomplete. A file by its own path has what is"
            " in it.",
        )


class ExtentDoubt(NamedTuple):
    """Doubt whether pieces are all of their tensors, whose shapes no file has."""

    error: InvalidIndexError
    is_likely: bool  # only one rank wrote, or the names of the files leave some out

    @classmethod
    def of(cls, stored: StoredPieces, path: str) -> Self | None:
        """Return the doubt about pieces in a folder; None where shapes are recorded."""
        if not stored.by_offsets:
            return None
        ranks, absent = stored.ranks(), absent_files(stored.files)
        is_one = len(ranks) == 1
        held = "those of one rank" if is_one else f"those of {len(ranks)} ranks up to {ranks[-1]}"
        hint = "Load with a tree that has all shapes: they are compared."
        if is_one:
            hint += f" Or, if one rank wrote all, add '{MAIN_INDEX}' that says which file has what."
        error = InvalidIndexError(
            "files of torch's DCP do not say how large tensors are, so parts may be missing",
            file=path,
            expected="the files of all ranks",
            found=f"{held}, without {listed(absent, 3)}" if absent else held,
            hint=hint,
        )
        return cls(error, is_one or bool(absent))

    @property
    def hint(self) -> str:
        """Hint for shapes that differ."""
        return f"But {self.error.message}: here are {self.error.found}."

    def refuse_or_warn(self) -> None:
        """Refuses files of which some are likely to be missing, and else warns."""
        if self.is_likely:
            raise self.error
        logging.warning("%s", self.error)


class _Piece(NamedTuple):
    """A box of a class of tensors, and what the pieces of all of them have in common."""

    box: Box
    shape: tuple[int, ...]
    elements: int
    file: int
    rank: int  # pieces of the same tensor before it in the file
    suffix: str  # of its name; none of a whole tensor


_Class = tuple[int, tuple[int, ...]]
"""Tensors of equal boxes: the number of the class, and their shape."""


class _FileStarts(NamedTuple):
    """The first bytes of the pieces in a file, of which a header would take 50 times the memory."""

    # For each class the number of its first piece, and the pieces of each of its tensors.
    first: dict[_Class, tuple[int, int]]
    starts: array[int]  # of each piece, by class and tensor; -1 where the file does not hold it


class PieceCatalog:
    """The places of the pieces of tensors, in files whose headers `visit` shows.

    `dtypes` are those of tensors whose sub-byte elements are stored one a byte.
    """

    def __init__(
        self,
        stored: StoredPieces,
        files: Sequence[str],
        visit: VisitHeaders,
        dtypes: Mapping[str, DType],
    ) -> None:
        self.stored = stored
        self._dtypes = dtypes
        self._files = tuple(files)
        self._visit = visit
        self._process = 0
        self._own_file: int | None = None
        self._lock = threading.Lock()
        self._classes: dict[_Class, tuple[_Piece, ...]] = {}
        self._chosen: dict[tuple[object, ...], tuple[_Piece, ...]] = {}
        self._choices: dict[int, bool] = {}
        self._used: set[int] = set()
        self._number_of: dict[str, int] = {}  # among the tensors of its class
        self._by_class: dict[_Class, list[str]] = {}
        for name, (_, shape, number) in stored.tensors.items():
            names = self._by_class.setdefault((number, shape), [])
            self._number_of[name] = len(names)
            names.append(name)
        self._starts: dict[int, _FileStarts] = {}

    def prefer(self, process: int) -> None:
        """Sets the process: of files with the same box it reads one that it opens anyway.

        Else it reads its own, and if it has none, not the one that all others read.
        """
        prefix = piece_file_prefix(process)
        with self._lock:
            self._process, self._own_file = process, None
            self._chosen, self._used = {}, set()
            for number, file in enumerate(self.stored.files):
                if file.rpartition("/")[2].startswith(prefix):
                    self._own_file = number

    def whole(self, name: str) -> TensorEntry:
        """Return the entry of a whole tensor; its `file` is the first that has a piece of it."""
        tensor = self.stored.tensors[name]
        dtype = self._dtypes.get(name) or DTYPES[tensor.dtype]
        nbytes = math.prod(tensor.shape) * dtype.bits // 8
        file = self._files[self.stored.boxes(name)[0].file]
        return TensorEntry(name, dtype, tensor.shape, file, 0, nbytes)

    def files_of(self, name: str) -> tuple[str, ...]:
        """Return the paths of the files that hold a piece of a tensor."""
        numbers = sorted({stored.file for stored in self.stored.boxes(name)})
        return tuple(self._files[number] for number in numbers)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes that a tensor is stored in, each once."""
        return tuple(dict.fromkeys(piece.box for piece in self._pieces(self.stored.tensors[name])))

    def find(
        self, regions: Mapping[str, Sequence[Box]]
    ) -> dict[str, tuple[tuple[Box, TensorEntry], ...]]:
        """Return the pieces that regions of tensors are made of; see `Catalog.locate`."""
        # Boxes in one file first: the others are then read from files that are open.
        in_order = sorted(regions, key=self._has_choice)
        chosen = {name: self._choose(name, tuple(regions[name])) for name in in_order}
        distinct = {id(pieces): pieces for pieces in chosen.values()}.values()
        self._read({piece.file for pieces in distinct for piece in pieces})
        return {
            name: tuple((piece.box, self._entry(name, piece)) for piece in chosen[name])
            for name in regions
        }

    def _pieces(self, tensor: StoredTensor) -> tuple[_Piece, ...]:
        """Return the boxes of a tensor's class; the same objects for all its tensors."""
        key = tensor.number, tensor.shape
        if key not in self._classes:
            ranks: Counter[int] = Counter()
            pieces = []
            for start, stop, file in self.stored.classes[tensor.number]:
                box = Box(start, stop)
                suffix = "" if self.stored.by_offsets else piece_name("", tensor.shape, box)
                pieces.append(_Piece(box, box.shape, box.size, file, ranks[file], suffix))
                ranks[file] += 1
            self._classes[key] = tuple(pieces)
        return self._classes[key]

    def _choose(self, name: str, regions: tuple[Box, ...]) -> tuple[_Piece, ...]:
        """Return the boxes that overlap regions, of equal ones that in the nearest file."""
        tensor = self.stored.tensors[name]
        key = (tensor.number, tensor.shape, regions)
        with self._lock:
            if key in self._chosen:
                return self._chosen[key]
            chosen: dict[Box, _Piece] = {}
            for piece in self._pieces(tensor):
                if not any(piece.box.intersect(region) for region in regions):
                    continue
                rival = chosen.get(piece.box)
                if rival is None or self._cost(piece.file) < self._cost(rival.file):
                    chosen[piece.box] = piece
            self._used.update(piece.file for piece in chosen.values())
            self._chosen[key] = tuple(chosen.values())
            return self._chosen[key]

    def _cost(self, file: int) -> tuple[bool, bool, int]:
        turn = (file - self._process) % len(self._files)
        return file not in self._used, file != self._own_file, turn

    def _has_choice(self, name: str) -> bool:
        number = self.stored.tensors[name].number
        if number not in self._choices:
            boxes = self.stored.classes[number]
            self._choices[number] = len({stored.box for stored in boxes}) < len(boxes)
        return self._choices[number]

    def _read(self, numbers: Iterable[int]) -> None:
        """Reads the headers of files, by number, that have not been read."""
        lacking = {self._files[n]: n for n in sorted(numbers) if n not in self._starts}

        def keep(file: str, header: Header) -> None:
            if self.stored.save_id is not None:
                check_save(self.stored.save_id, file, header)
            number = lacking[file]
            self._starts[number] = self._starts_in(self._by_file.get(number, {}), header)

        self._visit([*lacking], keep)

    @functools.cached_property
    def _by_file(self) -> dict[int, dict[_Class, list[_Piece]]]:
        """The pieces of each class by the number of their file."""
        by_file: dict[int, dict[_Class, list[_Piece]]] = {}
        for key, names in self._by_class.items():
            for piece in self._pieces(self.stored.tensors[names[0]]):
                by_file.setdefault(piece.file, {}).setdefault(key, []).append(piece)
        return by_file

    def _starts_in(self, by_class: Mapping[_Class, list[_Piece]], header: Header) -> _FileStarts:
        first: dict[_Class, tuple[int, int]] = {}
        starts = array("q")
        for key, pieces in by_class.items():
            first[key] = len(starts), len(pieces)
            for name in self._by_class[key]:
                code = self.stored.tensors[name].dtype
                for piece in pieces:
                    entry = header.tensors.get(self._name(name, piece))
                    fits = entry and entry.shape == piece.shape and entry.dtype.code == code
                    starts.append(entry.start if entry and fits else -1)
        return _FileStarts(first, starts)

    def _entry(self, name: str, piece: _Piece) -> TensorEntry:
        tensor, (first, starts) = self.stored.tensors[name], self._starts[piece.file]
        begin, count = first[tensor.number, tensor.shape]
        start = starts[begin + self._number_of[name] * count + piece.rank]
        if start < 0:
            raise self._absent(name, piece)
        dtype = self._dtypes.get(name) or DTYPES[tensor.dtype]
        stop = start + piece.elements * dtype.bits // 8
        return TensorEntry(
            self._name(name, piece), dtype, piece.shape, self._files[piece.file], start, stop
        )

    def _name(self, name: str, piece: _Piece) -> str:
        if piece.suffix or self.stored.by_offsets or "@" not in name:
            return name + piece.suffix
        return piece_name(name, piece.shape, piece.box)

    def _absent(self, name: str, piece: _Piece) -> InvalidManifestError:
        file, held = self._files[piece.file], "none"

        def look(_: str, header: Header) -> None:
            nonlocal held
            entry = header.tensors.get(self._name(name, piece))
            if entry is not None:
                held = f"{entry.dtype.code} {list(entry.shape)}"

        self._visit([file], look)
        return InvalidManifestError(
            "a file does not hold the piece that the manifest says",
            file=file,
            tensor=self._name(name, piece),
            expected=f"{self.stored.tensors[name].dtype} {list(piece.shape)}",
            found=held,
            hint=_MIXED,
        )
