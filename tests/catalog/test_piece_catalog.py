"""Pieces that several files hold are taken from files that are opened anyway."""

from __future__ import annotations

import time
import tracemalloc

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


def test_many_files_take_time_and_memory_in_proportion():
    """A row of one tensor in each file, and of many tensors, of classes of their own, one each."""
    count = 1500
    files = tuple(f"{piece_file_prefix(n)}{count:05}.safetensors" for n in range(count))
    rows = tuple(StoredBox((n,), (n + 1,), n) for n in range(count))
    alone = [(StoredBox((0,), (8,), n),) for n in range(count)]
    tensors = {"rows": StoredTensor("U8", (count,), 0)}
    tensors |= {f"alone.{n}": StoredTensor("U8", (8,), n + 1) for n in range(count)}

    def visit(names, look):
        for name in names:
            number = int(name.split("-")[1]) - 1
            row, other = piece_name("rows", (count,), rows[number]), f"alone.{number}"
            entries = {
                row: TensorEntry(row, DTYPES["U8"], (1,), name, 0, 1),
                other: TensorEntry(other, DTYPES["U8"], (8,), name, 1, 9),
            }
            look(name, Header(entries, {}))

    catalog = PieceCatalog(StoredPieces(files, (rows, *alone), tensors), files, visit, {})
    began = time.process_time()
    tracemalloc.start()
    found = catalog.find({"rows": (Box((0,), (count,)),), "alone.7": WHOLE})
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - began < 3  # 0.2 s; 7 s where each file looks at all classes
    assert held_bytes < 8 << 20  # 3 MB; 20 MB with a number for each tensor in each file
    assert [entry.file for _, entry in found["rows"]] == [*files]
    ((_, entry),) = found["alone.7"]
    assert (entry.file, entry.start, entry.stop) == (files[7], 1, 9)
