"""Writes arrays with TensorStore as Orbax would; then Orbax saves a tree that adopts them."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import tensorstore as ts
from orbax.checkpoint import future

from orbax_safetensors_layout.conversion import (
    FINISHED,
    CheckpointReader,
    LeafRegion,
    SourceArray,
    TargetArray,
    Topology,
    arrays_in,
)
from orbax_safetensors_layout.errors import SafetensorsLayoutError, UnsupportedDtypeError, listed
from orbax_safetensors_layout.format import ByteRange, RangeChecksums
from orbax_safetensors_layout.geometry import Box, cut
from orbax_safetensors_layout.options import ConvertOptions, is_floating
from orbax_safetensors_layout.pytree import dotted_name
from orbax_safetensors_layout.storage import flush_tree, link_tree, storage_errors

from .._orbax import ITEM_METADATA
from .orbax_reader import storage_error, type_handler_registry

_handlers: Any = ocp.type_handlers
_NumpyHandler: Any = ocp.type_handlers.NumpyHandler
_WRITTEN = "written"
_MOST_NAME_BYTES = 255  # of a file
_INT64 = range(-(1 << 63), 1 << 63)


class OrbaxTarget:
    """A tree that Orbax restores, its arrays in chunks that are shards of `topology`, or whole."""

    def __init__(
        self,
        tree: Any,
        source: CheckpointReader,
        arrays: Mapping[str, SourceArray],
        topology: Topology | None,
        options: ConvertOptions,
        *,
        most_chunk_bytes: int,  # a chunk of a single element may have more
    ) -> None:
        streamed = [array for array in arrays_in(tree) if array.key_impl is None]
        self._shards = {array.name: array.shape for array in streamed}
        if topology is not None:
            self._shards = {array.name: topology.shard(array) for array in streamed}
            topology.raise_misfits()
        _refuse_values(tree)
        self.written: RangeChecksums | None = None
        self.leaves: Sequence[TargetArray] = [
            dataclasses.replace(array, dtype=options.dtype)
            if options.dtype is not None and is_floating(array.dtype)
            else array
            for array in streamed
        ]
        self._tree = jax.tree.map(lambda leaf: _with_keys(leaf, source, arrays), tree)
        paths = jax.tree_util.tree_flatten_with_path(tree)[0]
        self._orbaxs_names = {
            leaf.name: dotted_name(path) for path, leaf in paths if isinstance(leaf, TargetArray)
        }
        self._use_ocdbt = options.use_ocdbt
        self._zarr_options = {
            "use_zarr3": options.use_zarr3,
            "use_compression": options.use_compression,
        }
        self._custom = source.custom
        self._most_chunk_bytes = most_chunk_bytes
        self._context = _handlers.get_ts_context(use_ocdbt=options.use_ocdbt)
        self._chunks: dict[object, tuple[int, ...] | None] = {}
        self._written = ""
        self._process = 0
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._refuse_leaves()

    def _refuse_leaves(self) -> None:
        empty = [leaf.name for leaf in self.leaves if 0 in leaf.shape]
        if empty:
            raise SafetensorsLayoutError(
                f"Orbax stores no empty arrays: {listed(map(repr, empty))}", tensor=empty[0]
            )
        names = [name for name in self._orbaxs_names.values() if not _is_folder_name(name)]
        if names and not self._use_ocdbt:  # each array is a folder of its name
            raise SafetensorsLayoutError(
                f"arrays cannot have folders of these names: {listed(map(repr, names))}",
                tensor=names[0],
                hint="Store them in OCDBT databases, without use_ocdbt=False (--no-ocdbt).",
            )
        refused = [leaf for leaf in self.leaves if self._chunk(leaf) is None]
        if refused:
            dtypes = sorted({str(leaf.dtype) for leaf in refused})
            names = [repr(leaf.name) for leaf in refused]
            raise UnsupportedDtypeError(
                f"Orbax stores no arrays of dtype {listed(dtypes)}: {listed(names)}",
                tensor=refused[0].name,
                hint="Decode them with a mapping, or leave them out by its ignore=[...].",
            )

    def _chunk(self, leaf: TargetArray) -> tuple[int, ...] | None:
        """Shape of a chunk, as TensorStore has it; None for a dtype that it does not store."""
        key = (leaf.shape, self._shards[leaf.name], leaf.dtype)
        if key not in self._chunks:
            try:
                spec = ts.Spec(self._spec(leaf, "/", 0) | {"kvstore": "memory://"})
                store: Any = ts.open(spec, create=True).result()
                self._chunks[key] = tuple(store.chunk_layout.read_chunk.shape or ())
            except (ValueError, TypeError):
                self._chunks[key] = None
        return self._chunks[key]

    def _spec(self, leaf: TargetArray, folder: str, process: int) -> dict[str, Any]:
        """TensorStore's specification of a leaf that a process writes, as Orbax makes it."""
        shard, most_bytes = self._shards[leaf.name], self._most_chunk_bytes
        nbytes = math.prod(shard) * leaf.dtype.itemsize
        info = _handlers.ParamInfo(
            name=self.stored_name(leaf),
            parent_dir=ocp_v1.path.Path(folder),
            is_ocdbt_checkpoint=self._use_ocdbt,
            ts_context=self._context,
            **self._zarr_options,
        )
        spec: dict[str, Any] = _handlers.get_json_tspec_write(
            info,
            use_ocdbt=self._use_ocdbt,
            global_shape=leaf.shape,
            local_shape=shard,
            dtype=leaf.dtype,
            # A database beside that of what Orbax writes itself; a save merges all.
            process_index=f"converted{process}" if self._use_ocdbt else None,
            arg=ocp.SaveArgs(chunk_byte_size=most_bytes if nbytes > most_bytes else None),
        )
        return spec

    def stored_name(self, leaf: TargetArray) -> str:
        return self._orbaxs_names[leaf.name]  # which has the levels of boxes

    def regions(self, leaf: TargetArray, most_bytes: int) -> list[LeafRegion]:
        chunk = self._chunk(leaf)
        assert chunk is not None
        boxes = cut(leaf.shape, leaf.dtype.itemsize, most_bytes, chunk=chunk)
        return [LeafRegion(leaf, box) for box in boxes]

    def describe(self) -> object:
        leaves, treedef = jax.tree.flatten(self._tree)
        values = [leaf for leaf in leaves if not isinstance(leaf, TargetArray)]
        shards = sorted(self._shards.items())
        flags = (self._use_ocdbt, *self._zarr_options.values())
        return flags, self._custom, shards, str(treedef), values

    def open(self, folder: str, process: int) -> None:
        self._written, self._process = os.path.join(folder, _WRITTEN), process
        with storage_errors("cannot make the folder", self._written):
            os.makedirs(self._written, exist_ok=True)

    def write(self, regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> None:
        self._open_stores([region.leaf for region in regions])
        pairs = zip(regions, values, strict=True)
        writes = [self._stores[leaf.name][box.slices].write(v) for (leaf, box), v in pairs]
        for region, written in zip(regions, writes, strict=True):
            self._wait(written, region.leaf)

    def _open_stores(self, leaves: Sequence[TargetArray]) -> None:
        with self._lock:
            missing = {leaf.name: leaf for leaf in leaves if leaf.name not in self._stores}
            specs = [self._spec(leaf, self._written, self._process) for leaf in missing.values()]
            flags = {"create": True, "open": True, "context": self._context}
            opening = [ts.open(ts.Spec(spec), **flags) for spec in specs]
            for store, leaf in zip(opening, missing.values(), strict=True):
                self._stores[leaf.name] = self._wait(store, leaf)

    def _wait(self, done: Any, leaf: TargetArray) -> Any:
        try:
            return done.result()
        except ValueError as error:  # TensorStore's
            raise storage_error("writing chunks failed", self._written, leaf.name, error) from error

    def flush(self) -> None:
        self._stores.clear()  # each write has waited for itself

    close = flush

    def commit(self, folder: str, written: Sequence[ByteRange]) -> None:
        alone = ocp.options.MultiprocessingOptions()  # on this process
        if jax.process_count() > 1:
            process = jax.process_index()
            alone = ocp.options.MultiprocessingOptions(
                primary_host=process, active_processes={process}
            )
        handler: Any = ocp.PyTreeCheckpointHandler(
            type_handler_registry=type_handler_registry(
                {TargetArray: _Adopting(self._written, self._orbaxs_names)}
            ),
            multiprocessing_options=alone,
            use_ocdbt=self._use_ocdbt,
            **self._zarr_options,
        )
        args = ocp.args.PyTreeSave(item=self._tree, custom_metadata=self._custom)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            checkpointer.save(os.path.join(folder, FINISHED), args=args, force=True)
        flush_tree(os.path.join(folder, FINISHED))  # TensorStore flushes chunks, Orbax no metadata


class _Adopting(_NumpyHandler):
    """Adopts files that are already written, in place of writing arrays."""

    def __init__(self, written: str, names: Mapping[str, str]) -> None:
        super().__init__()
        self._written = written
        self._names = names

    async def serialize(
        self, values: Sequence[TargetArray], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        names = [self._names[value.name] for value in values]
        orbaxs_names = [info.name for info in infos]
        if names != orbaxs_names:
            raise SafetensorsLayoutError(
                "the names that Orbax gives the arrays are not those that they were written under",
                file=self._written,
                expected=listed(names, 3),
                found=listed(orbaxs_names, 3),
            )
        return [future.CommitFutureAwaitingContractedSignals(self._link(infos[0]), name="adopt")]

    async def _link(self, info: Any) -> None:
        folder = os.fspath(info.parent_dir)
        for name in os.listdir(self._written):
            link_tree(os.path.join(self._written, name), os.path.join(folder, name))


def _refuse_values(tree: Any) -> None:
    """Refuses numbers that Orbax does not hold, and keys that one process cannot save alone."""
    problems = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, int) and leaf not in _INT64:
            problems.append(f"{dotted_name(path)} is an integer of more than 64 bits")
        if isinstance(leaf, TargetArray) and leaf.key_impl and jax.process_count() > 1:
            problems.append(
                f"{dotted_name(path)} is typed PRNG keys, which one process alone can convert"
            )
    if problems:
        raise SafetensorsLayoutError(f"Orbax cannot hold these leaves: {listed(problems)}")


def _with_keys(leaf: Any, source: CheckpointReader, arrays: Mapping[str, SourceArray]) -> Any:
    """Typed PRNG keys as such: they are few, and Orbax saves them itself."""
    if not isinstance(leaf, TargetArray) or leaf.key_impl is None:
        return leaf
    assert isinstance(leaf.made_of, str)
    (data,) = source.read([(arrays[leaf.made_of], Box.whole(leaf.shape))])
    return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=leaf.key_impl)


def _is_folder_name(name: str) -> bool:
    """Whether Orbax and TensorStore find an array of that name again, in a folder of its own."""
    parts = name.split("/")
    if "\\" in name or parts[0] == ITEM_METADATA or not {"", ".", ".."}.isdisjoint(parts):
        return False
    return all(len(part.encode()) <= _MOST_NAME_BYTES for part in parts)
