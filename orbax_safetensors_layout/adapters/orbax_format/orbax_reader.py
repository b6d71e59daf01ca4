"""Reads checkpoints that Orbax saved: Orbax restores the tree, our type handlers open arrays."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import tensorstore as ts

from orbax_safetensors_layout.conversion import (
    ReadableArrays,
    SourceArray,
    rerooted,
)
from orbax_safetensors_layout.errors import CheckpointNotFoundError, FormatError, StorageError
from orbax_safetensors_layout.format import TensorKind
from orbax_safetensors_layout.geometry import Box, cut
from orbax_safetensors_layout.options import MIB
from orbax_safetensors_layout.pytree import ValueBox, dotted_name, prng
from orbax_safetensors_layout.reading import VerifyingReader
from orbax_safetensors_layout.storage import FULL

_handlers: Any = ocp.type_handlers
_ArrayHandler: Any = ocp.type_handlers.ArrayHandler
_NumpyHandler: Any = ocp.type_handlers.NumpyHandler
_MOST_KEY_BYTES = MIB
_KEY_WORDS = (2, 4)  # uint32 words of a key: threefry, and rbg
_UNOPENED = object()
_MOST_TEXT = 500  # characters of an error of others


class OrbaxReader:
    """One item that Orbax saved; without `on_error`, one error names all unreadable arrays."""

    kind = "orbax"
    is_recorded = True
    metadata: Mapping[str, str] = {}

    verifying: VerifyingReader | None = None

    def __init__(self, path: str, on_error: Callable[[StorageError], None] | None = None) -> None:
        self.path = path
        self._stores: dict[str, Any] = {}  # of TensorStore, by Orbax's names
        problems: dict[str, Exception] = {}
        handler = _opening_handler(self._stores, problems)
        folder = ocp_v1.path.Path(os.path.abspath(path))
        try:
            tree = handler.restore(folder, args=ocp.args.PyTreeRestore())
            self.custom = handler.metadata(folder).custom_metadata
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointNotFoundError(
                "Orbax finds no tree", file=path, found=_first_line(error)
            ) from error
        except (KeyError, TypeError, AttributeError, NotImplementedError) as error:
            raise FormatError(
                "Orbax cannot read its own metadata", file=path, found=repr(error)
            ) from error
        self.tree = rerooted(jax.tree.map(_source_leaf, tree, is_leaf=_is_box))
        errors = [
            storage_error("the array cannot be opened", path, name, problem)
            for name, problem in sorted(problems.items())
        ]
        if on_error is not None:
            for problem in errors:
                on_error(problem)
        elif errors:
            raise StorageError.collect(errors, "arrays cannot be opened")

    def identity(self) -> str:
        """Digest of the names, sizes and times of all files."""
        files = []
        for root, _, names in os.walk(self.path):
            for name in names:
                file = os.path.join(root, name)
                status = os.stat(file)
                files.append((os.path.relpath(file, self.path), status.st_size, status.st_mtime_ns))
        return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()

    def readable(self, arrays: Sequence[SourceArray]) -> ReadableArrays | None:
        return None  # whole chunks are decoded

    def blocks(self, array: SourceArray, most_bytes: int) -> Iterator[Box]:
        return cut(array.shape, array.dtype.itemsize, most_bytes, chunk=self.chunk(array))

    def read(self, blocks: Sequence[tuple[SourceArray, Box]]) -> list[np.ndarray]:
        reads = [self._stores[array.stored][box.slices].read() for array, box in blocks]
        arrays = []
        for (array, box), values in zip(blocks, reads, strict=True):
            try:
                arrays.append(np.ascontiguousarray(values.result()).reshape(box.shape))
            except ValueError as error:  # TensorStore's
                text = f"reading {list(box.start)} to {list(box.stop)} failed"
                raise storage_error(text, self.path, array.name, error) from error
        return arrays

    def chunk(self, array: SourceArray) -> tuple[int, ...]:
        store = self._stores[array.stored]
        shape = store.chunk_layout.read_chunk.shape or ()  # None without dimensions
        return tuple(n or extent for n, extent in zip(shape, store.shape, strict=True))

    def chunk_count(self, array: SourceArray) -> int:
        """The number of chunks that an array is stored in."""
        chunk = self.chunk(array)
        return math.prod(-(-n // max(1, step)) for n, step in zip(array.shape, chunk, strict=True))

    def close(self) -> None:
        self._stores.clear()


class _Opening:
    """Opens arrays in place of restoring them; for a type handler of Orbax to inherit."""

    def __init__(self, stores: dict[str, Any], problems: dict[str, Exception]) -> None:
        super().__init__()
        self._stores = stores
        self._problems = problems

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> list[Any]:
        return list(await asyncio.gather(*map(self._open, infos)))

    async def metadata(self, infos: Sequence[Any]) -> list[None]:
        return [None for _ in infos]  # no array is opened for the metadata of the tree alone

    async def _open(self, info: Any) -> Any:
        is_jax = isinstance(self, _ArrayHandler)
        try:
            spec = _handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
            store = await ts.open(ts.Spec(spec), open=True, context=info.ts_context)
            impl = await _key_impl(info) if is_jax and _may_be_keys(store) else None
        except Exception as problem:  # of many types; the others are opened nevertheless
            self._problems[info.name] = problem
            return _UNOPENED
        self._stores[info.name] = store
        kind: TensorKind = "key" if impl is not None else "jax" if is_jax else "numpy"
        dtype = np.dtype(store.dtype.numpy_dtype)
        return SourceArray(info.name, info.name, tuple(store.shape), dtype, kind, impl)


class _OpeningJax(_Opening, _ArrayHandler): ...


class _OpeningNumpy(_Opening, _NumpyHandler): ...


def _opening_handler(stores: dict[str, Any], problems: dict[str, Exception]) -> Any:
    """Return a handler of Orbax that opens arrays in place of restoring them."""
    opening = {
        jax.Array: _OpeningJax(stores, problems),
        np.ndarray: _OpeningNumpy(stores, problems),
    }
    return ocp.PyTreeCheckpointHandler(type_handler_registry=type_handler_registry(opening))


def stored_names(path: str | os.PathLike[str]) -> set[str]:
    """Return the dotted names of the leaves of an item that Orbax saved; opens no array."""
    saved = _opening_handler({}, {}).metadata(ocp_v1.path.Path(path)).tree
    leaves = jax.tree_util.tree_flatten_with_path(saved, is_leaf=lambda leaf: leaf is None)[0]
    return {dotted_name(key_path) for key_path, _ in leaves}


def _may_be_keys(store: Any) -> bool:
    return (
        store.dtype.numpy_dtype == np.uint32
        and store.rank > 0
        and store.shape[-1] in _KEY_WORDS
        and store.size * 4 <= _MOST_KEY_BYTES
    )


async def _key_impl(info: Any) -> str | None:
    """The implementation of the typed keys that Orbax makes of an array; None for others."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    args = _handlers.ArrayRestoreArgs(sharding=here)
    (restored,) = await _handlers.get_type_handler(jax.Array).deserialize([info], [args])
    return str(jax.random.key_impl(restored)) if prng.is_key(restored) else None


def type_handler_registry(handlers: dict[Any, Any]) -> Any:
    """These handlers, by types, and for all other types those that Orbax has."""
    others = [kind for kind in _handlers.supported_types() if kind not in handlers]
    return _handlers.create_type_handler_registry(
        *handlers.items(), *((kind, _handlers.get_type_handler(kind)) for kind in others)
    )


def _is_box(node: Any) -> bool:
    """Whether a node is a box around a leaf, or around such a box: Orbax stores boxes as dicts."""
    if not (isinstance(node, dict) and node.keys() == {"value"}):
        return False
    return jax.tree_util.all_leaves([node["value"]]) or _is_box(node["value"])


def _source_leaf(leaf: Any) -> Any:
    if _is_box(leaf):
        return ValueBox(_source_leaf(leaf["value"]))
    if leaf is _UNOPENED:
        return None
    return leaf.item() if isinstance(leaf, np.generic) else leaf


def storage_error(text: str, path: str, tensor: str, cause: object) -> StorageError:
    """The error for a `cause` in TensorStore, with the first line of its text."""
    hint = FULL if os.strerror(errno.ENOSPC) in str(cause) else None
    return StorageError(text, file=path, tensor=tensor, found=_first_line(cause), hint=hint)


def _first_line(error: object) -> str:
    return str(error).split("\n")[0][:_MOST_TEXT]
