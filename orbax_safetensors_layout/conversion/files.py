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
    MANIFEST,
    NARROW_INTEGERS,
    ONE_A_BYTE,
    FileLayout,
    Manifest,
)
from orbax_safetensors_layout.geometry import Box, pack_bits, row_blocks
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.plan import LeafWrite, plan_all_writes
from orbax_safetensors_layout.storage import (
    LocalStorage,
    ResumableFile,
    flush_folder,
    storage_errors,
)
from orbax_safetensors_layout.writing import write_small_files

from .target import FINISHED, LeafRegion, TargetLeaf


class _Place(NamedTuple):
    """File and first byte of a row-major box of a tensor."""

    file: str
    start: int


class FilesTarget:
    """Files with a row-major box of a tensor at each of some places.

    Args:
        leaves: The arrays, in the order of `written`.
        written: Their tensors; layout `sharded` shares them out among processes of the target's
            topology.
        options: Layout, size of files, metadata.
        processes: How many processes that topology has.
        save_id: Tells the files of pieces of this conversion from those of others.
        manifest: The manifest, if the checkpoint has one; layout and pieces are filled in.
        sidecar_files: Side files, by name.
    """

    def __init__(
        self,
        leaves: Sequence[TargetLeaf],
        written: Sequence[LeafWrite],
        options: WriteOptions,
        *,
        processes: int,
        save_id: str,
        manifest: Manifest | None,
        sidecar_files: Mapping[str, bytes],
    ) -> None:
        plan = plan_all_writes(written, options=options, process_count=processes).stamped(save_id)
        self.leaves = leaves
        self._layout = options.layout
        self._layouts = {file.name: file.layout for file in plan.own}
        self._dtypes = {leaf.tensor.name: leaf.tensor.dtype for leaf in written}
        self._places: dict[str, dict[Box, list[_Place]]] = {leaf.name: {} for leaf in leaves}
        for file in plan.own:
            for part in file.parts:
                places = self._places[written[part.leaf].tensor.name]
                places.setdefault(part.tile.box, []).append(_Place(file.name, part.start))
        self._outer: dict[tuple[str, Box], Box] = {}  # of each region the box that it is of
        self._small_files = {**sidecar_files, **plan.index()}
        if manifest is not None:
            manifest = dataclasses.replace(manifest, layout=options.layout, pieces=plan.stored)
            self._small_files[MANIFEST] = manifest.to_json()

    def regions(self, leaf: TargetLeaf, most_bytes: int) -> list[LeafRegion]:
        """Rows of each box."""
        dtype = self._dtypes[leaf.name]
        group = 8 if dtype.packed else 1
        regions = []
        for outer in self._places[leaf.name]:
            for rows in row_blocks(outer.shape, 8 * leaf.dtype.itemsize, most_bytes, group):
                regions.append(LeafRegion(leaf, rows.shifted(outer.start)))
                self._outer[leaf.name, regions[-1].box] = outer
        return regions

    def describe(self) -> object:
        """Return headers and small files to the byte."""
        headers = [(name, layout.header) for name, layout in self._layouts.items()]
        return self._layout, headers, self._small_files

    def open(self, folder: str, process: int) -> FilesWriter:
        """Begins, or continues, to write; files have their full size at once."""
        finished = os.path.join(folder, FINISHED)
        with storage_errors("cannot make the folder", finished):
            os.makedirs(finished, exist_ok=True)
        return FilesWriter(finished, self)

    def places(self, region: LeafRegion) -> list[_Place]:
        """Return where the first byte of a region, one of `regions`, is written."""
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
        """Return values as the bytes of the file."""
        dtype = self._dtypes[region.leaf.name]
        if values.dtype.name in NARROW_INTEGERS:
            values = values.astype(dtype.numpy)
        flat = values.reshape(-1).view(np.uint8)
        return pack_bits(flat, dtype.bits) if dtype.packed else flat

    def commit(self, folder: str) -> None:
        """Writes headers and small files."""
        finished = os.path.join(folder, FINISHED)
        for name, layout in self._layouts.items():
            file = ResumableFile(os.path.join(finished, name), layout.size)
            try:
                file.write_at(0, [memoryview(bytearray(layout.header))])
                file.flush()
            finally:
                file.close()
        with LocalStorage() as storage:
            write_small_files(storage, finished, self._small_files, durable=True)
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


def values_dtype(leaf: LeafWrite) -> np.dtype:
    """Return the dtype of the values that are encoded for a file."""
    one_a_byte = ONE_A_BYTE.get(leaf.values.name)
    if one_a_byte is not None and one_a_byte.code == leaf.tensor.dtype.code:
        return leaf.values
    return leaf.tensor.dtype.numpy
