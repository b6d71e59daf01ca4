"""Pieces that several files hold are taken from files that are opened anyway."""

from __future__ import annotations

from orbax_safetensors_layout.catalog.piece_catalog import PieceCatalog
from orbax_safetensors_layout.format import (
    DTYPES,
    Header,
    StoredBox,
    StoredPieces,
    StoredTensor,
    TensorEntry,
    piece_file_prefix,
    piece_name,
)
from orbax_safetensors_layout.geometry import Box

FILES = tuple(f"{piece_file_prefix(n)}00004.safetensors" for n in range(4))
STORED = StoredPieces(
    FILES,
    (
        tuple(StoredBox((0,), (8,), file) for file in range(4)),  # in every file
        tuple(StoredBox((2 * n,), (2 * n + 2,), n) for n in range(4)),  # each part in one
    ),
    {"bias": StoredTensor("U8", (8,), 0), "kernel": StoredTensor("U8", (8,), 1)},
)


def opened(process: int, boxes: dict[str, tuple[Box, ...]]) -> set[int]:
    """The files whose headers are fetched."""
    files: list[str] = []

    def visit(names, look):
        for name in names:
            files.append(name)
            look(name, header(name))

    def header(file):
        number, entries = FILES.index(file), {}
        for name, tensor in STORED.tensors.items():
            for stored in STORED.boxes(name):
                if stored.file == number:
                    key = piece_name(name, tensor.shape, stored)
                    shape = stored.box.shape
                    entries[key] = TensorEntry(key, DTYPES["U8"], shape, file, 0, shape[0])
        return Header(entries, {})

    catalog = PieceCatalog(STORED, FILES, visit, {})
    catalog.prefer(process)
    pieces = catalog.find(boxes)
    assert list(pieces) == list(boxes)
    return {FILES.index(file) for file in files}


WHOLE = (Box((0,), (8,)),)


def test_the_own_file_comes_first():
    assert opened(2, {"bias": WHOLE}) == {2}
    assert opened(2, {"bias": WHOLE, "kernel": WHOLE}) == {0, 1, 2, 3}
    assert opened(2, {"bias": WHOLE, "kernel": (Box((4,), (6,)),)}) == {2}


def test_a_process_without_a_file_takes_one_that_it_opens_anyway():
    """Whichever tensor is asked for first."""
    part = (Box((2,), (4,)),)
    assert opened(7, {"bias": WHOLE, "kernel": part}) == {1}
    assert opened(7, {"kernel": part, "bias": WHOLE}) == {1}


def test_processes_without_files_do_not_all_open_the_same():
    assert [opened(process, {"bias": WHOLE}) for process in (4, 5, 6, 7)] == [{0}, {1}, {2}, {3}]
