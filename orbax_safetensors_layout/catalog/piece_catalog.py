"""Finds the pieces of tensors in their files, fetching only the headers that are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from orbax_safetensors_layout.errors import InvalidManifestError
from orbax_safetensors_layout.format import (
    DTYPES,
    SAVE_ID,
    DType,
    Header,
    StoredBox,
    StoredPieces,
    TensorEntry,
    piece_file_prefix,
    piece_name,
)
from orbax_safetensors_layout.geometry import Box

MIXED = "Files of two saves may be mixed in the folder."

FetchHeaders = Callable[[Sequence[str]], Mapping[str, Header]]


def check_save(save_id: str, file: str, header: Header) -> None:
    """Checks that a file of pieces and its manifest are of the same save.

    Raises:
        InvalidManifestError: They are not.
    """
    found = header.metadata.get(SAVE_ID)
    if found != save_id:
        raise InvalidManifestError(
            "a file of pieces is of another save than its manifest",
            file=file,
            expected=f"save {save_id}",
            found=f"save {found}" if found else "no save in its header",
            hint=MIXED,
        )


class PieceCatalog:
    """The places of the pieces of tensors.

    Args:
        stored: The boxes and files.
        files: Path of each of `stored.files`.
        fetch: Returns the headers of some of them.
        dtypes: Dtypes of tensors whose sub-byte elements are stored one a byte.
    """

    def __init__(
        self,
        stored: StoredPieces,
        files: Sequence[str],
        fetch: FetchHeaders,
        dtypes: Mapping[str, DType] = MappingProxyType({}),
    ) -> None:
        self.stored = stored
        self._dtypes = dtypes
        self._files = tuple(files)
        self._fetch = fetch
        self._process = 0
        self._own_file: int | None = None
        self._lock = threading.Lock()
        self._chosen: dict[tuple[int, tuple[Box, ...]], tuple[StoredBox, ...]] = {}
        self._choices: dict[int, bool] = {}
        self._used: set[int] = set()

    def prefer(self, process: int) -> None:
        """Sets the process: of files with the same box it reads one that it opens anyway.

        Else it reads its own, and if it has none, not the one that all others read.
        """
        self._process = process
        prefix = piece_file_prefix(process)
        for number, file in enumerate(self.stored.files):
            if file.rpartition("/")[2].startswith(prefix):
                self._own_file = number

    def whole(self, name: str) -> TensorEntry:
        """Return the entry of a whole tensor; its `file` is the first that has a piece of it."""
        tensor = self.stored.tensors[name]
        dtype = self._dtypes.get(name) or DTYPES[tensor.dtype]
        nbytes = Box.whole(tensor.shape).size * dtype.bits // 8
        file = self._files[self.stored.boxes(name)[0].file]
        return TensorEntry(name, dtype, tensor.shape, file, 0, nbytes)

    def files_of(self, name: str) -> tuple[str, ...]:
        """Return the paths of the files that hold a piece of a tensor."""
        numbers = sorted({stored.file for stored in self.stored.boxes(name)})
        return tuple(self._files[number] for number in numbers)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the boxes that a tensor is stored in, each once."""
        return tuple(dict.fromkeys(stored.box for stored in self.stored.boxes(name)))

    def find(
        self, wanted: Mapping[str, Sequence[Box]]
    ) -> dict[str, tuple[tuple[Box, TensorEntry], ...]]:
        """Return the pieces that regions of tensors are made of; see `Catalog.locate`."""
        # Boxes in one file first: the others are then read from files that are open.
        in_order = sorted(wanted, key=self._has_choice)
        found = {name: self._choose(name, tuple(wanted[name])) for name in in_order}
        chosen = {name: found[name] for name in wanted}
        numbers = sorted({stored.file for boxes in chosen.values() for stored in boxes})
        headers = self._fetch([self._files[number] for number in numbers])
        if self.stored.save_id is not None:
            for file, header in headers.items():
                check_save(self.stored.save_id, file, header)
        return {
            name: tuple((stored.box, self._entry(name, stored, headers)) for stored in boxes)
            for name, boxes in chosen.items()
        }

    def _choose(self, name: str, boxes: tuple[Box, ...]) -> tuple[StoredBox, ...]:
        key = (self.stored.tensors[name].number, boxes)
        with self._lock:
            found = self._chosen.get(key)
            if found is None:
                found = self._chosen[key] = self._nearest(self.stored.boxes(name), boxes)
        return found

    def _nearest(self, stored: Sequence[StoredBox], boxes: Sequence[Box]) -> tuple[StoredBox, ...]:
        """Return one of equal boxes each, in the nearest file."""
        best: dict[Box, StoredBox] = {}
        for candidate in stored:
            box = candidate.box
            if not any(box.intersect(wanted) for wanted in boxes):
                continue
            rival = best.get(box)
            if rival is None or self._cost(candidate.file) < self._cost(rival.file):
                best[box] = candidate
        self._used.update(found.file for found in best.values())
        return tuple(best.values())

    def _cost(self, file: int) -> tuple[bool, bool, int]:
        turn = (file - self._process) % len(self._files)
        return file not in self._used, file != self._own_file, turn

    def _has_choice(self, name: str) -> bool:
        number = self.stored.tensors[name].number
        found = self._choices.get(number)
        if found is None:
            boxes = self.stored.classes[number]
            found = self._choices[number] = len({stored.box for stored in boxes}) < len(boxes)
        return found

    def _entry(self, name: str, stored: StoredBox, headers: Mapping[str, Header]) -> TensorEntry:
        tensor = self.stored.tensors[name]
        file = self._files[stored.file]
        entry = headers[file].tensors.get(piece_name(name, tensor.shape, stored))
        found = "none" if entry is None else f"{entry.dtype.code} {list(entry.shape)}"
        expected = f"{tensor.dtype} {list(stored.box.shape)}"
        if entry is None or found != expected:
            raise InvalidManifestError(
                "a file does not hold the piece that the manifest says",
                file=file,
                tensor=piece_name(name, tensor.shape, stored),
                expected=expected,
                found=found,
                hint=MIXED,
            )
        dtype = self._dtypes.get(name)
        return entry if dtype is None else entry._replace(dtype=dtype)
