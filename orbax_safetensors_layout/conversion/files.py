"""A target of safetensors files, in layout `hf` or `sharded`."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.format import (
    DTYPES,
    MAIN_INDEX,
    MANIFEST,
    NARROW_INTEGERS,
    NO_SAVE_ID,
    ONE_A_BYTE,
    SAVE_ID,
    DType,
    FileLayout,
    Manifest,
    NewTensor,
    index_bytes,
    lay_out,
    piece_name,
    split,
)
from orbax_safetensors_layout.geometry import Box, pack_bits, within
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.plan import LeafWrite, plan_writes
from orbax_safetensors_layout.storage import ResumableFile, flush_folder, storage_errors
from orbax_safetensors_layout.writing import row_blocks

from .readable_arrays import LeafRegion, TargetLeaf
from .target import FINISHED


class _Place(NamedTuple):
    """Where a box of a tensor stands, row-major."""

    file: str
    start: int


class _Piece(NamedTuple):
    """A box of a tensor, as a tensor of a file."""

    tensor: NewTensor
    name: str
    box: Box


class FilesTarget:
    """Files with a row-major box of a tensor at each of some places.

    Args:
        leaves: The arrays, in the order of `tensors`.
        tensors: Their dtypes in the files.
        options: Layout, size of files, metadata.
        written: How `sharded` tensors are shared out among processes of the target's topology;
            empty in layout `hf`.
        processes: How many processes that topology has.
        save_id: What tells the files of pieces of this conversion from those of others.
        manifest: What stands beside the files, if anything; its pieces are filled in.
        documents: More files, by name.
    """

    def __init__(
        self,
        leaves: Sequence[TargetLeaf],
        tensors: Sequence[NewTensor],
        options: WriteOptions,
        *,
        written: Sequence[LeafWrite] = (),
        processes: int = 1,
        save_id: str = NO_SAVE_ID,
        manifest: Manifest | None = None,
        documents: Mapping[str, bytes] | None = None,
    ) -> None:
        self.leaves = leaves
        self._options = options
        self._save_id = save_id
        self._documents: dict[str, bytes] = dict(documents or {})
        self._layouts: dict[str, FileLayout] = {}
        self._places: dict[str, dict[Box, list[_Place]]] = {leaf.name: {} for leaf in leaves}
        self._outer: dict[tuple[str, Box], Box] = {}  # of each region the box that it is of
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        if options.layout == "hf":
            self._whole_tensors(tensors)
        else:
            assert manifest is not None
            manifest = self._pieces(written, processes, manifest)
        if manifest is not None:
            self._documents[MANIFEST] = manifest.to_json()

    def _whole_tensors(self, tensors: Sequence[NewTensor]) -> None:
        files = split(tensors, self._options.max_file_bytes)
        for name, members in files:
            layout = lay_out(name, members, {"format": "pt", **self._options.metadata})
            self._layouts[name] = layout
            for entry in layout.tensors:
                box = Box.whole(entry.shape)
                self._places[entry.name][box] = [_Place(name, entry.start)]
        if len(files) > 1:
            self._documents[MAIN_INDEX] = index_bytes(files)

    def _pieces(self, written: Sequence[LeafWrite], processes: int, manifest: Manifest) -> Manifest:
        plan = plan_writes(written, options=self._options, process_count=processes)
        stored = plan.stamped(self._save_id).stored
        assert stored is not None
        members: list[dict[str, _Piece]] = [{} for _ in stored.files]
        for name, (code, shape, _) in stored.tensors.items():
            for box in stored.boxes(name):
                tensor = NewTensor(piece_name(name, shape, box), DTYPES[code], box.box.shape)
                members[box.file][tensor.name] = _Piece(tensor, name, box.box)
        metadata = {"format": "pt", **self._options.metadata, SAVE_ID: NO_SAVE_ID}
        for file, pieces in zip(stored.files, members, strict=True):
            layout = lay_out(file, [piece.tensor for piece in pieces.values()], metadata)
            self._layouts[file] = layout.stamped(self._save_id)
            for entry in layout.tensors:
                _, name, whole = pieces[entry.name]
                self._places[name].setdefault(whole, []).append(_Place(file, entry.start))
        return dataclasses.replace(manifest, layout="sharded", pieces=stored)

    def regions(self, leaf: TargetLeaf, most_bytes: int) -> list[LeafRegion]:
        """Rows of each box."""
        dtype = self._dtypes[leaf.name]
        group = 8 if dtype.packed else 1
        regions = []
        for outer in self._places[leaf.name]:
            for rows in row_blocks(outer.shape, 8 * leaf.dtype.itemsize, most_bytes, group):
                regions.append(LeafRegion(leaf, within(rows, outer.start)))
                self._outer[leaf.name, regions[-1].box] = outer
        return regions

    def describe(self) -> object:
        """The files, to the byte, but for the values."""
        headers = [(name, layout.header) for name, layout in self._layouts.items()]
        return self._options.layout, headers, self._documents

    def open(self, folder: str, process: int) -> FilesWriter:
        """Begins, or continues, to write; the files have their full size at once."""
        finished = os.path.join(folder, FINISHED)
        with storage_errors("can not make the folder", finished):
            os.makedirs(finished, exist_ok=True)
        return FilesWriter(finished, self)

    def places(self, region: LeafRegion) -> list[_Place]:
        """Where the first byte of a region, one of `regions`, goes."""
        leaf, box = region
        outer = self._outer[leaf.name, box]
        first = sum(
            (at - low) * math.prod(outer.shape[axis + 1 :])
            for axis, (at, low) in enumerate(zip(box.start, outer.start, strict=True))
        )
        begin = first * self._dtypes[leaf.name].bits // 8
        return [_Place(file, start + begin) for file, start in self._places[leaf.name][outer]]

    def layout(self, file: str) -> FileLayout:
        """How a file is laid out."""
        return self._layouts[file]

    def encoded(self, region: LeafRegion, values: np.ndarray) -> np.ndarray:
        """Values as they stand in the file."""
        return _encoded(values, self._dtypes[region.leaf.name])

    def commit(self, folder: str) -> None:
        """Writes headers and what stands beside the files."""
        finished = os.path.join(folder, FINISHED)
        for name, layout in self._layouts.items():
            file = ResumableFile(os.path.join(finished, name), layout.size)
            try:
                file.write_at(0, [memoryview(bytearray(layout.header))])
                file.flush()
            finally:
                file.close()
        with storage_errors("can not complete the folder", finished):
            for name, data in self._documents.items():
                with open(os.path.join(finished, name), "wb") as document:
                    document.write(data)
                    document.flush()
                    os.fsync(document.fileno())
        flush_folder(finished)


class FilesWriter:
    """Writes regions into files that several processes share.

    Args:
        folder: The folder of the files.
        target: Says where regions go.
    """

    def __init__(self, folder: str, target: FilesTarget) -> None:
        self._folder = folder
        self._target = target
        self._files: dict[str, ResumableFile] = {}
        self._written: set[str] = set()
        self._lock = threading.Lock()

    def write(self, regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> None:
        """Writes regions, each to all of its places."""
        for region, value in zip(regions, values, strict=True):
            data = self._target.encoded(region, value)
            for name, start in self._target.places(region):
                self._file(name).write_at(start, [data])

    def _file(self, name: str) -> ResumableFile:
        with self._lock:
            self._written.add(name)
            file = self._files.get(name)
            if file is None:
                path = os.path.join(self._folder, name)
                file = self._files[name] = ResumableFile(path, self._target.layout(name).size)
            return file

    def flush(self) -> None:
        """Waits until what was written since the last call is on the disk."""
        with self._lock:
            names, self._written = self._written, set()
        for name in names:
            self._files[name].flush()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()


def _encoded(values: np.ndarray, dtype: DType) -> np.ndarray:
    if values.dtype.name in NARROW_INTEGERS:
        values = values.astype(dtype.numpy)
    flat = values.reshape(-1).view(np.uint8)
    return pack_bits(flat, dtype.bits) if dtype.packed else flat


def values_dtype(leaf: LeafWrite) -> np.dtype:
    """Dtype of the values that are encoded for a file."""
    one_a_byte = ONE_A_BYTE.get(leaf.values.name)
    if one_a_byte is not None and one_a_byte.code == leaf.tensor.dtype.code:
        return leaf.values
    return leaf.tensor.dtype.numpy
