"""Checkpoints in Orbax's own format, as a target of conversions."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from orbax_safetensors_layout.adapters.streaming import (
    ArrayFormat,
    Written,
    context,
    save_written,
)
from orbax_safetensors_layout.conversion.boxes import chunk_blocks
from orbax_safetensors_layout.conversion.leaves import Leaf, Region
from orbax_safetensors_layout.conversion.source import SourceArray
from orbax_safetensors_layout.errors import (
    SafetensorsLayoutError,
    StorageError,
    UnsupportedDtypeError,
)

_WRITTEN, _FINISHED = "written", "finished"


class OrbaxTarget:
    """A tree that Orbax restores, its arrays in chunks that are shards of a target topology.

    Args:
        tree: The tree: `SourceArray`s for the leaves, keys, numbers and strings.
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
        leaves: Sequence[Leaf],
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
        self._process = 0
        self._refuse_empty()
        self._refuse_dtypes()

    def _refuse_empty(self) -> None:
        empty = [leaf.name for leaf in self.leaves if 0 in leaf.shape]
        if empty:
            raise SafetensorsLayoutError(
                f"Orbax stores no arrays without elements: {empty[:10]}", tensor=empty[0]
            )

    def _refuse_dtypes(self) -> None:
        refused = {
            dtype for dtype in {leaf.dtype for leaf in self.leaves} if not self._holds(dtype)
        }
        names = [leaf.name for leaf in self.leaves if leaf.dtype in refused]
        if names:
            raise UnsupportedDtypeError(
                f"Orbax stores no arrays of dtype {sorted(map(str, refused))}: {names[:10]}",
                tensor=names[0],
                hint="Decode them with a mapping, or leave them out.",
            )

    def _holds(self, dtype: np.dtype) -> bool:
        leaf = Leaf("probe", (1,), dtype, "")
        try:
            spec = self.spec(leaf, "/", 0, (1,)) | {"kvstore": "memory://"}
            ts.open(ts.Spec(spec), create=True).result()
        except (ValueError, TypeError):
            return False
        return True

    def spec(
        self, leaf: Leaf, folder: str, process: int, shard: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """TensorStore's specification of a leaf, as Orbax makes it."""
        shard = self._shards[leaf.name] if shard is None else shard
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

    def regions(self, leaf: Leaf, most_bytes: int) -> list[Region]:
        """Whole chunks."""
        chunk: Any = ts.Spec(self.spec(leaf, "/", 0)).chunk_layout.write_chunk.shape
        boxes = chunk_blocks(leaf.shape, chunk, leaf.dtype.itemsize, most_bytes)
        return [Region(leaf, box) for box in boxes]

    def describe(self) -> object:
        """What Orbax is told."""
        return self._format, self._item, self._custom, sorted(self._shards.items()), str(self._tree)

    def open(self, folder: str, process: int) -> OrbaxWriter:
        """Begins, or continues, to write arrays."""
        written = os.path.join(folder, _WRITTEN)
        os.makedirs(written, exist_ok=True)
        self._process = process
        return OrbaxWriter(self, written, process, self._context)

    def commit(self, folder: str) -> str:
        """Lets Orbax make a checkpoint of what is written."""
        finished = os.path.join(folder, _FINISHED)
        save_written(
            finished,
            jax.tree.map(self._saved, self._tree),
            os.path.join(folder, _WRITTEN),
            self._format,
            item=self._item,
            custom=self._custom,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        return finished

    def _saved(self, leaf: Any) -> Any:
        return Written(leaf.name, leaf.dtype) if isinstance(leaf, SourceArray) else leaf


class OrbaxWriter:
    """Writes regions with TensorStore.

    Args:
        target: Says how.
        folder: Where the arrays are written.
        process: The process.
        ts_context: TensorStore's context.
    """

    def __init__(self, target: OrbaxTarget, folder: str, process: int, ts_context: Any) -> None:
        self._target = target
        self._folder = folder
        self._process = process
        self._context = ts_context
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()

    def write(self, region: Region, values: np.ndarray) -> None:
        """Writes whole chunks, and waits until they are on the disk."""
        leaf, box = region
        try:
            self._store(leaf)[box.slices].write(values).result()
        except ValueError as error:  # TensorStore's
            raise StorageError(
                "writing chunks failed",
                file=self._folder,
                tensor=leaf.name,
                found=str(error).split("\n")[0],
            ) from error

    def _store(self, leaf: Leaf) -> Any:
        with self._lock:
            store = self._stores.get(leaf.name)
            if store is None:
                spec = ts.Spec(self._target.spec(leaf, self._folder, self._process))
                store = ts.open(spec, create=True, open=True, context=self._context).result()
                self._stores[leaf.name] = store
            return store

    def flush(self) -> None:
        """Lets go of the arrays of a group; each write has waited for itself."""
        self._stores.clear()

    def close(self) -> None:
        """Lets go of all."""
        self._stores.clear()
