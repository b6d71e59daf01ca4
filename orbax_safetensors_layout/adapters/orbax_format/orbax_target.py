"""Checkpoints in Orbax's own format, as a target of conversions."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from orbax_safetensors_layout.conversion import (
    FINISHED,
    CheckpointReader,
    LeafRegion,
    SourceArray,
    TargetArray,
    Topology,
    arrays_in,
)
from orbax_safetensors_layout.errors import (
    SafetensorsLayoutError,
    StorageError,
    UnsupportedDtypeError,
)
from orbax_safetensors_layout.geometry import Box, cut
from orbax_safetensors_layout.options import ConvertOptions, is_floating
from orbax_safetensors_layout.pytree import dotted_name, prng
from orbax_safetensors_layout.storage import FULL

from .._orbax import ITEM_METADATA
from .tensorstore_io import (
    ArrayFormat,
    Written,
    context,
    save_written,
)

_WRITTEN = "written"
_MOST_NAME_BYTES = 255  # of a file
_INT64 = range(-(1 << 63), 1 << 63)


class OrbaxTarget:
    """A tree that Orbax restores, its arrays in chunks that are shards of a target topology.

    Args:
        tree: The tree: `TargetArray`s for the leaves, keys, numbers and strings.
        leaves: The arrays that are streamed.
        shards: Of each, by name, the shape of a shard.
        array_format: How Orbax stores arrays.
        item: The item's name in a step; None for a checkpoint that is the tree alone.
        custom: Custom metadata.
        most_chunk_bytes: Shards of more bytes are stored in several chunks.

    Raises:
        UnsupportedDtypeError: Orbax stores no arrays of some dtype; names all leaves.
        SafetensorsLayoutError: Orbax stores no arrays without elements; names all leaves.
    """

    def __init__(
        self,
        tree: Any,
        leaves: Sequence[TargetArray],
        shards: Mapping[str, tuple[int, ...]],
        array_format: ArrayFormat,
        *,
        item: str | None,
        custom: Any,
        most_chunk_bytes: int,
    ) -> None:
        self.leaves = leaves
        self._tree = tree
        self._shards = shards
        self._format = array_format
        self._item = item
        self._custom = custom
        self._most_chunk_bytes = most_chunk_bytes
        self._context = context(array_format)
        self._chunks: dict[object, tuple[int, ...] | None] = {}
        self._written = ""
        self._process = 0
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._refuse_empty()
        self._refuse_names()
        self._refuse_dtypes()

    def _refuse_empty(self) -> None:
        empty = [leaf.name for leaf in self.leaves if 0 in leaf.shape]
        if empty:
            raise SafetensorsLayoutError(
                f"Orbax stores no arrays without elements: {empty[:10]}", tensor=empty[0]
            )

    def _refuse_names(self) -> None:
        """Without a database each array is a folder of its name."""
        if self._format.use_ocdbt:
            return
        refused = [leaf.name for leaf in self.leaves if not _is_folder_name(leaf.name)]
        if refused:
            raise SafetensorsLayoutError(
                f"arrays can not have folders of these names: {refused[:10]}",
                tensor=refused[0],
                hint="Store them in OCDBT databases, without use_ocdbt=False (--no-ocdbt).",
            )

    def _refuse_dtypes(self) -> None:
        refused = [leaf for leaf in self.leaves if self._chunk(leaf) is None]
        if refused:
            dtypes = sorted({str(leaf.dtype) for leaf in refused})
            raise UnsupportedDtypeError(
                f"Orbax stores no arrays of dtype {dtypes}: {[leaf.name for leaf in refused[:10]]}",
                tensor=refused[0].name,
                hint="Decode them with a mapping, or leave them out.",
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
        """TensorStore's specification of a leaf, as Orbax makes it."""
        shard = self._shards[leaf.name]
        nbytes = int(np.prod(shard, dtype=np.int64)) * leaf.dtype.itemsize
        return self._format.spec(
            folder,
            leaf.name,
            leaf.shape,
            shard,
            leaf.dtype,
            process=process,
            most_chunk_bytes=self._most_chunk_bytes if nbytes > self._most_chunk_bytes else None,
            context=self._context,
        )

    def regions(self, leaf: TargetArray, most_bytes: int) -> list[LeafRegion]:
        """Whole chunks."""
        chunk = self._chunk(leaf)
        assert chunk is not None
        boxes = cut(leaf.shape, leaf.dtype.itemsize, most_bytes, chunk=chunk)
        return [LeafRegion(leaf, box) for box in boxes]

    def describe(self) -> object:
        """What Orbax is told."""
        leaves, structure = jax.tree.flatten(self._tree)
        values = [leaf for leaf in leaves if not isinstance(leaf, TargetArray)]
        shards = sorted(self._shards.items())
        return self._format, self._item, self._custom, shards, str(structure), values

    def open(self, folder: str, process: int) -> None:
        """Begins, or continues, to write arrays."""
        self._written, self._process = os.path.join(folder, _WRITTEN), process
        os.makedirs(self._written, exist_ok=True)

    def write(self, regions: Sequence[LeafRegion], values: Sequence[np.ndarray]) -> None:
        """Writes whole chunks, and waits until they are on the disk."""
        self._open_stores([region.leaf for region in regions])
        pairs = zip(regions, values, strict=True)
        writes = [self._stores[leaf.name][box.slices].write(v) for (leaf, box), v in pairs]
        for region, written in zip(regions, writes, strict=True):
            self._wait(written, region.leaf)

    def _open_stores(self, leaves: Sequence[TargetArray]) -> None:
        with self._lock:
            missing = {leaf.name: leaf for leaf in leaves if leaf.name not in self._stores}
            opening = {}
            for name, leaf in missing.items():
                spec = ts.Spec(self._spec(leaf, self._written, self._process))
                opening[name] = ts.open(spec, create=True, open=True, context=self._context)
            for name, store in opening.items():
                self._stores[name] = self._wait(store, missing[name])

    def _wait(self, done: Any, leaf: TargetArray) -> Any:
        try:
            return done.result()
        except ValueError as error:  # TensorStore's
            text = str(error).split("\n")[0]
            raise StorageError(
                "writing chunks failed",
                file=self._written,
                tensor=leaf.name,
                found=text,
                hint=FULL if os.strerror(errno.ENOSPC) in text else None,
            ) from error

    def flush(self) -> None:
        """Lets go of the arrays of a group; each write has waited for itself."""
        self._stores.clear()

    def close(self) -> None:
        """Lets go of all."""
        self._stores.clear()

    def commit(self, folder: str) -> None:
        """Lets Orbax make a checkpoint of what is written."""
        save_written(
            os.path.join(folder, FINISHED),
            jax.tree.map(self._saved, self._tree),
            self._written,
            self._format,
            item=self._item,
            custom=self._custom,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )

    def _saved(self, leaf: Any) -> Any:
        return Written(leaf.name, leaf.dtype) if isinstance(leaf, TargetArray) else leaf


def orbax_target(
    tree: Any,
    source: CheckpointReader,
    arrays: Mapping[str, SourceArray],
    topology: Topology | None,
    options: ConvertOptions,
    *,
    most_chunk_bytes: int,
    item: str | None,
) -> OrbaxTarget:
    """A target in Orbax's own format.

    Args:
        tree: Its tree.
        source: The source, for typed PRNG keys and custom metadata.
        arrays: Its arrays by name.
        topology: What arrays are cut for; None leaves each in one chunk, as far as memory allows.
        options: The dtype and the format.
        most_chunk_bytes: What a chunk may hold, unless a single element is more.
        item: The item's name in a step; None for a checkpoint that is the tree alone.

    Raises:
        SafetensorsLayoutError: Leaves that Orbax does not hold; names all.
        MismatchError: Arrays cannot be sharded as their rules say; names all.
    """
    streamed = [array for array in arrays_in(tree) if array.key_impl is None]
    whole = {array.name: array.shape for array in streamed}
    shards = whole if topology is None else {a.name: topology.shard(a) for a in streamed}
    if topology is not None:
        topology.raise_misfits()
    _refuse_values(tree)
    return OrbaxTarget(
        jax.tree.map(lambda leaf: _with_keys(leaf, source, arrays), tree),
        [dataclasses.replace(array, dtype=_dtype(array, options)) for array in streamed],
        shards,
        ArrayFormat(
            use_ocdbt=options.use_ocdbt,
            use_zarr3=options.use_zarr3,
            use_compression=options.use_compression,
        ),
        item=item,
        custom=source.custom,
        most_chunk_bytes=most_chunk_bytes,
    )


def _dtype(array: TargetArray, options: ConvertOptions) -> np.dtype:
    floating = is_floating(array.dtype)
    found: np.dtype = options.dtype if options.dtype is not None and floating else array.dtype
    return found


def _refuse_values(tree: Any) -> None:
    """Refuses numbers that Orbax does not hold, and keys that one process cannot save alone."""
    problems = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, int) and leaf not in _INT64:
            problems.append(f"{dotted_name(path)} is an integer of more than 64 bits")
        if isinstance(leaf, TargetArray) and leaf.key_impl and jax.process_count() > 1:
            problems.append(f"{dotted_name(path)} is typed PRNG keys; convert in one process")
    if problems:
        raise SafetensorsLayoutError(f"Orbax can not hold these leaves: {'; '.join(problems)}")


def _with_keys(leaf: Any, source: CheckpointReader, arrays: Mapping[str, SourceArray]) -> Any:
    """Typed PRNG keys as such: they are few, and Orbax saves them itself."""
    if not isinstance(leaf, TargetArray) or leaf.key_impl is None:
        return leaf
    assert isinstance(leaf.made_of, str)
    (data,) = source.read([(arrays[leaf.made_of], Box.whole(leaf.shape))])
    return prng.wrap(jax.numpy.asarray(data), leaf.key_impl)


def _is_folder_name(name: str) -> bool:
    """Whether Orbax and TensorStore find an array of that name again, in a folder of its own."""
    parts = name.split("/")
    return (
        "\\" not in name
        and parts[:1] != [ITEM_METADATA]
        and all(
            part not in ("", ".", "..") and len(part.encode()) <= _MOST_NAME_BYTES for part in parts
        )
    )
