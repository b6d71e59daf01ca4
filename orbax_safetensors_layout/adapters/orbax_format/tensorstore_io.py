"""Orbax's own reading and writing of trees, with arrays that are streamed past it.

Orbax is given type handlers in place of its own for arrays. A restore then opens each array with
TensorStore and reads nothing; a save takes arrays that TensorStore has written already, with the
specifications that Orbax makes for them. All else, names, metadata, scalars, the merge of OCDBT
databases and the commit, is Orbax's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import tensorstore as ts
from orbax.checkpoint import future

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.pytree import prng
from orbax_safetensors_layout.storage import link_tree

_handlers: Any = ocp.type_handlers
_ArrayHandler: Any = ocp.type_handlers.ArrayHandler
_NumpyHandler: Any = ocp.type_handlers.NumpyHandler
_MOST_KEY_BYTES = 1 << 20
_KEY_WORDS = (2, 4)  # uint32 words of a key: threefry, and rbg


@dataclasses.dataclass(frozen=True, slots=True)
class OpenArray:
    """An array of an Orbax checkpoint, open for reading.

    Attributes:
        name: Orbax's name of it.
        store: The open TensorStore; None where it cannot be opened.
        is_jax: Whether it was a `jax.Array`.
        keys: Typed PRNG keys, if it is an array of these.
        problem: Why it cannot be opened.
    """

    name: str
    store: Any
    is_jax: bool
    keys: jax.Array | None = None
    problem: Exception | None = None

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape of what is decoded at once."""
        shape = self.store.chunk_layout.read_chunk.shape or ()  # None without dimensions
        return tuple(n or extent for n, extent in zip(shape, self.store.shape, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """Represents an array that is written already, in a tree.

    Attributes:
        name: Its dotted name.
        dtype: Its dtype.
    """

    name: str
    dtype: np.dtype


class _Opening:
    """Opens arrays in place of restoring them; for a type handler of Orbax to inherit."""

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> list[OpenArray]:
        """Opens arrays."""
        return list(await asyncio.gather(*map(self._open, infos)))

    async def metadata(self, infos: Sequence[Any]) -> list[None]:
        """Nothing: no array is opened for the metadata of the tree alone."""
        return [None for _ in infos]

    async def _open(self, info: Any) -> OpenArray:
        is_jax = isinstance(self, _ArrayHandler)
        try:
            spec = _handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
            store = await ts.open(ts.Spec(spec), open=True, context=info.ts_context)
            keys = await _keys(info) if is_jax and _may_be_keys(store) else None
        except Exception as problem:  # of many types; the others are opened nevertheless
            return OpenArray(info.name, None, is_jax, problem=problem)
        return OpenArray(info.name, store, is_jax, keys)


class _OpeningJax(_Opening, _ArrayHandler):
    """Opens what were `jax.Array`s."""


class _OpeningNumpy(_Opening, _NumpyHandler):
    """Opens what were numpy arrays."""


def _may_be_keys(store: Any) -> bool:
    return (
        store.dtype.numpy_dtype == np.uint32
        and store.rank > 0
        and store.shape[-1] in _KEY_WORDS
        and store.size * 4 <= _MOST_KEY_BYTES
    )


async def _keys(info: Any) -> jax.Array | None:
    """Keys, if Orbax makes such of an array."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    args = _handlers.ArrayRestoreArgs(sharding=here)
    (found,) = await _handlers.get_type_handler(jax.Array).deserialize([info], [args])
    return found if prng.is_key(found) else None


def open_tree(folder: str) -> Any:
    """The tree of an item that Orbax saved, with `OpenArray`s in place of arrays.

    Args:
        folder: The item's folder.
    """
    return _opening_handler().restore(_path(folder), args=ocp.args.PyTreeRestore())


def custom_metadata(folder: str) -> Any:
    """The custom metadata of an item that Orbax saved."""
    return _opening_handler().metadata(_path(folder)).custom_metadata


def _opening_handler() -> Any:
    opening = _registry({jax.Array: _OpeningJax(), np.ndarray: _OpeningNumpy()})
    return ocp.PyTreeCheckpointHandler(type_handler_registry=opening)


def _registry(handlers: dict[Any, Any]) -> Any:
    """Some handlers, and for all other types those that Orbax has."""
    others = [kind for kind in _handlers.supported_types() if kind not in handlers]
    return _handlers.create_type_handler_registry(
        *handlers.items(), *((kind, _handlers.get_type_handler(kind)) for kind in others)
    )


def _path(folder: str) -> Any:
    return ocp_v1.path.Path(folder)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFormat:
    """How Orbax stores arrays.

    Attributes:
        use_ocdbt: In OCDBT databases, not in a file a chunk.
        use_zarr3: In version 3 of zarr, not in 2.
        use_compression: Compressed with zstd.
    """

    use_ocdbt: bool = True
    use_zarr3: bool = True
    use_compression: bool = True

    def spec(
        self,
        folder: str,
        name: str,
        shape: tuple[int, ...],
        shard: tuple[int, ...],
        dtype: np.dtype,
        *,
        process: int,
        most_chunk_bytes: int | None,
        context: Any,
    ) -> dict[str, Any]:
        """TensorStore's specification of an array, as Orbax makes it.

        Args:
            folder: The item's folder.
            name: The array's name.
            shape: Its shape.
            shard: Shape of a shard; chunks are shards, or parts of these.
            dtype: Its dtype.
            process: The process that writes.
            most_chunk_bytes: Largest chunk; None for a whole shard.
            context: TensorStore's context.
        """
        info = _handlers.ParamInfo(
            name=name,
            parent_dir=_path(folder),
            is_ocdbt_checkpoint=self.use_ocdbt,
            use_zarr3=self.use_zarr3,
            use_compression=self.use_compression,
            ts_context=context,
        )
        found: dict[str, Any] = _handlers.get_json_tspec_write(
            info,
            use_ocdbt=self.use_ocdbt,
            global_shape=shape,
            local_shape=shard,
            dtype=dtype,
            # A database beside that of what Orbax writes itself; a save merges all.
            process_index=f"converted{process}" if self.use_ocdbt else None,
            arg=ocp.SaveArgs(chunk_byte_size=most_chunk_bytes),
        )
        return found

    def handler(self, handlers: dict[Any, Any], primary: int, count: int) -> Any:
        """Orbax's handler of trees, for one process."""
        return ocp.PyTreeCheckpointHandler(
            use_ocdbt=self.use_ocdbt,
            use_zarr3=self.use_zarr3,
            use_compression=self.use_compression,
            type_handler_registry=_registry(handlers),
            multiprocessing_options=_alone(primary, count),
        )


def context(array_format: ArrayFormat) -> Any:
    """A context of TensorStore, as Orbax makes it."""
    return _handlers.get_ts_context(use_ocdbt=array_format.use_ocdbt)


class _Adopting(_NumpyHandler):
    """Takes files that are written already in place of writing arrays."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self._written = written

    async def serialize(
        self, values: Sequence[Written], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        """Links what is written into the checkpoint's folder."""
        names = [value.name for value in values]
        found = [info.name for info in infos]
        if names != found:
            raise SafetensorsLayoutError(
                "Orbax calls arrays otherwise than they were written",
                file=self._written,
                expected=names[:3],
                found=found[:3],
            )
        return [future.CommitFutureAwaitingContractedSignals(self._link(infos[0]), name="adopt")]

    async def _link(self, info: Any) -> None:
        folder = os.fspath(info.parent_dir)
        for name in os.listdir(self._written):
            link_tree(os.path.join(self._written, name), os.path.join(folder, name))


def save_written(
    target: str,
    tree: Any,
    written: str,
    array_format: ArrayFormat,
    *,
    item: str | None,
    custom: Any,
    process_index: int,
    process_count: int,
) -> None:
    """Saves a tree through Orbax, on one process.

    Args:
        target: The checkpoint's folder.
        tree: The tree, with `Written` in place of arrays.
        written: The folder that these were written to.
        array_format: How.
        item: The item's name in a step; None for a checkpoint that is the tree alone.
        custom: Custom metadata.
        process_index: This process.
        process_count: How many there are.
    """
    handler = array_format.handler({Written: _Adopting(written)}, process_index, process_count)
    args: Any = ocp.args.PyTreeSave(item=tree, custom_metadata=custom)
    if item is not None:
        handler = ocp.CompositeCheckpointHandler(**{item: handler})
        args = ocp.args.Composite(**{item: args})
    options = _alone(process_index, process_count)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        checkpointer.save(target, args=args, force=True)


def _alone(process: int, count: int) -> Any:
    if count == 1:
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
