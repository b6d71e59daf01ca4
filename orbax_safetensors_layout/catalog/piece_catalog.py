"""Finds the pieces of tensors in their files, fetching only the headers that are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

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

_MIXED = "Files of two saves may be mixed in the folder."

FetchHeaders = Callable[[Sequence[str]], Mapping[str, Header]]


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


class PieceCatalog:
    """The places of the pieces of tensors, in files whose headers `fetch` returns.

    `dtypes` are those of tensors whose sub-byte elements are stored one a byte.
    """

    def __init__(
        self,
        stored: StoredPieces,
        files: Sequence[str],
        fetch: FetchHeaders,
        dtypes: Mapping[str, DType],
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
        self, regions: Mapping[str, Sequence[Box]]
    ) -> dict[str, tuple[tuple[Box, TensorEntry], ...]]:
        """Return the pieces that regions of tensors are made of; see `Catalog.locate`."""
        # Boxes in one file first: the others are then read from files that are open.
        in_order = sorted(regions, key=self._has_choice)
        chosen = {name: self._choose(name, tuple(regions[name])) for name in in_order}
        numbers = sorted({stored.file for boxes in chosen.values() for stored in boxes})
        headers = self._fetch([self._files[number] for number in numbers])
        if self.stored.save_id is not None:
            for file, header in headers.items():
                check_save(self.stored.save_id, file, header)
        return {
            name: tuple((stored.box, self._entry(name, stored, headers)) for stored in chosen[name])
            for name in regions
        }

    def _choose(self, name: str, regions: tuple[Box, ...]) -> tuple[StoredBox, ...]:
        """Return the boxes that overlap regions, of equal ones that in the nearest file."""
        key = (self.stored.tensors[name].number, regions)
        with self._lock:
            if key in self._chosen:
                return self._chosen[key]
            chosen: dict[Box, StoredBox] = {}
            for stored in self.stored.boxes(name):
                box = stored.box
                if not any(box.intersect(region) for region in regions):
                    continue
                rival = chosen.get(box)
                if rival is None or self._cost(stored.file) < self._cost(rival.file):
                    chosen[box] = stored
            self._used.update(stored.file for stored in chosen.values())
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

    def _entry(self, name: str, stored: StoredBox, headers: Mapping[str, Header]) -> TensorEntry:
        tensor = self.stored.tensors[name]
        file = self._files[stored.file]
        piece = piece_name(name, tensor.shape, stored)
        entry = headers[file].tensors.get(piece)
        actual = "none" if entry is None else f"{entry.dtype.code} {list(entry.shape)}"
        expected = f"{tensor.dtype} {list(stored.box.shape)}"
        if entry is None or actual != expected:
            raise InvalidManifestError(
                "a file does not hold the piece that the manifest says",
                file=file,
                tensor=piece,
                expected=expected,
                found=actual,
                hint=_MIXED,
            )
        dtype = self._dtypes.get(name)
        return entry if dtype is None else entry._replace(dtype=dtype)
