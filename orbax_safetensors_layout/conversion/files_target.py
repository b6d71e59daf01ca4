"""A target of safetensors files, in layout `hf` or `sharded`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.format import (
    MANIFEST,
    NO_SAVE_ID,
    ONE_A_BYTE,
    ByteRange,
    DType,
    RangeChecksums,
    ranges_by_file,
)
from orbax_safetensors_layout.geometry import Box, row_blocks
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.plan import plan_all_writes
from orbax_safetensors_layout.reading import file_crc32
from orbax_safetensors_layout.sharding import ProcessShards
from orbax_safetensors_layout.storage import (
    LocalStorage,
    ResumableFile,
    flush_folder,
    storage_errors,
)
from orbax_safetensors_layout.writing import (
    PreparedTree,
    stored_bytes,
    with_digests,
    write_small_files,
)

from .checkpoint_reader import CheckpointReader
from .target import FINISHED, LeafRegion, TargetArray
from .target_tree import Topology, arrays_in, stand_ins


class _FileOffset(NamedTuple):
    file: str
    start: int  # first byte of a row-major box of a tensor


class FilesTarget:
    """Files with a row-major box of a tensor at each of some places.

    Layout `sharded` has a piece for each shard of `topology`, and a file for each process. It
    always records the tree, layout `hf` if `is_tree`. `identity` is a digest of what is converted.
    """

    def __init__(
        self,
        tree: Any,
        source: CheckpointReader,
        options: WriteOptions,
        topology: Topology | None,
        *,
        is_tree: bool,
        identity: str,
        sidecar_files: Mapping[str, bytes],
    ) -> None:
        processes = 1 if topology is None else topology.mesh.processes
        is_recorded = is_tree or options.layout == "sharded"
        prepared = PreparedTree.parse(
            stand_ins(tree, topology),
            options=options,
            shards=ProcessShards(0, processes),
            is_recorded=is_recorded,
        )
        plan = plan_all_writes(prepared.leaves, options=options, process_count=processes)
        plan = plan.stamped(identity[: len(NO_SAVE_ID)])
        arrays = {array.name: array for array in arrays_in(tree)}
        names = [written.tensor.name for written in prepared.leaves]
        self.leaves: Sequence[TargetArray] = [
            arrays[written.tensor.name].valued(_values_dtype(written.values, written.tensor.dtype))
            for written in prepared.leaves
        ]
        self._layout = options.layout
        self._layouts = {file.name: file.layout for file in plan.own}
        self._dtypes = {written.tensor.name: written.tensor.dtype for written in prepared.leaves}
        self._boxes: dict[str, dict[Box, list[_FileOffset]]] = {name: {} for name in names}
        for file in plan.own:
            for part in file.parts:
                places = self._boxes[names[part.leaf]].setdefault(part.tile.box, [])
                places.append(_FileOffset(file.name, part.start))
        self._places: dict[tuple[str, Box], list[_FileOffset]] = {}  # of regions
        self._small_files = {**sidecar_files, **plan.index()}
        if is_recorded:
            manifest = prepared.manifest(plan, options, source.custom)
            self._small_files[MANIFEST] = manifest.to_json()
        self.written = None if source.verifying is None else RangeChecksums()
        self._finished = ""
        self._files: dict[str, ResumableFile] = {}
        self._written: set[str] = set()  # files, since the last flush
        self._lock = threading.Lock()

    def stored_name(self, leaf: TargetArray) -> str:
        return leaf.name

    def regions(self, leaf: TargetArray, most_bytes: int) -> list[LeafRegion]:
        """Return rows of each box."""
        dtype = self._dtypes[leaf.name]
        regions = []
        for outer, places in self._boxes[leaf.name].items():
            begin = 0  # bytes of the rows before
            for rows in row_blocks(outer.shape, 8 * leaf.dtype.itemsize, most_bytes, dtype.group):
                box = rows.shifted(outer.start)
                regions.append(LeafRegion(leaf, box))
                self._places[leaf.name, box] = [
                    _FileOffset(f, start + begin) for f, start in places
                ]
                begin += rows.size * dtype.bits // 8
        return regions

    def describe(self) -> object:
        """Return headers to the byte, and digests of small files."""
        headers = [(name, layout.header) for name, layout in self._layouts.items()]
        files = {name: hashlib.sha256(data).hexdigest() for name, data in self._small_files.items()}
        return self._layout, headers, files

    def open(self, folder: str, process: int) -> None:
        self._finished = os.path.join(folder, FINISHED)
        with storage_errors("cannot make the folder", self._finished):
            os.makedirs(self._finished, exist_ok=True)

    def write(self, regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> None:
        for region, value in zip(regions, values, strict=True):
            dtype = self._dtypes[region.leaf.name]
            data = stored_bytes(value, dtype)
            for name, start in self._places[region.leaf.name, region.box]:
                self._file(name).write_at(start, [data])
                if self.written is not None:
                    self.written.add(name, start, [data])

    def _file(self, name: str) -> ResumableFile:
        with self._lock:
            self._written.add(name)
            if name not in self._files:
                path = os.path.join(self._finished, name)
                self._files[name] = ResumableFile(path, self._layouts[name].size)
            return self._files[name]

    def flush(self) -> None:
        with self._lock:
            names, self._written = self._written, set()
        for name in names:
            self._files[name].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def commit(self, folder: str, written: Sequence[ByteRange]) -> None:
        """Writes headers and small files."""
        for name, layout in self._layouts.items():
            path = os.path.join(self._finished, name)
            with contextlib.closing(ResumableFile(path, layout.size)) as file:
                file.write_at(0, [memoryview(bytearray(layout.header))])
                file.flush()
        files = self._small_files
        with LocalStorage() as storage:
            if self.written is not None:
                ranges = ranges_by_file(written)
                digests = {
                    name: file_crc32(storage, os.path.join(self._finished, name), ranges[name])
                    for name in self._layouts
                }
                files = with_digests(files, digests)
            write_small_files(storage, self._finished, files, durable=True)
        flush_folder(self._finished)


@functools.lru_cache
def _values_dtype(values: np.dtype, stored: DType) -> np.dtype:
    one_a_byte = ONE_A_BYTE.get(values.name)
    if one_a_byte is not None and one_a_byte.code == stored.code:
        return values
    return stored.numpy
