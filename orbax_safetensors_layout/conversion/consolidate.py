"""Assembles a checkpoint of layout `sharded` into layout `hf`, streaming, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
import os

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import InvalidArgumentError, SafetensorsLayoutError
from orbax_safetensors_layout.format import (
    DTYPES,
    Container,
    DType,
    Manifest,
    NewTensor,
    Node,
    StoredPieces,
    TensorLeaf,
    storage_dtype,
)
from orbax_safetensors_layout.options import PathLike, WriteOptions, given_or_default
from orbax_safetensors_layout.plan import plan_consolidation
from orbax_safetensors_layout.reading import VerifyingReader
from orbax_safetensors_layout.runtime import frozen_heap
from orbax_safetensors_layout.save import PreparedSave, save_group
from orbax_safetensors_layout.sharding import ProcessShards
from orbax_safetensors_layout.storage import LocalStorage, finish_interrupted
from orbax_safetensors_layout.writing import HostValues, read_sidecar_files


def consolidate(
    path: PathLike,
    target: PathLike | None = None,
    *,
    options: WriteOptions | None = None,
    overwrite: bool = False,
) -> None:
    """Makes files that `safetensors` and `transformers` open from a checkpoint stored in pieces.

    The result has the bytes that a save in layout `hf` would have written. Memory is bounded by
    `options.memory_budget_bytes`, whatever the checkpoint's size. Several processes of one program
    share the files out among them; no device is needed. Checksums of the pieces are checked while
    these are read, and the files then get their own. A checkpoint that a save or an earlier call
    has left in whole tensors already stays as it is, if there is no `target`.

    Args:
        path: A checkpoint saved with `WriteOptions(layout="sharded")`.
        target: The folder to write, which gets the `config.json`, tokenizer and the like of `path`,
            too; by default `path` itself, whose pieces are then replaced when all is complete.
        options: How to write; `layout` and `dtype` do not count, and `metadata` is the saved one.
        overwrite: Replace an existing checkpoint at `target`.

    Raises:
        SafetensorsLayoutError: `path` was never stored in pieces.
        CheckpointExistsError: `target` has a checkpoint, or another file of these names, and
            `overwrite` is not set.
        CheckpointNotFoundError: `path` has no checkpoint.
        FormatError: A file is malformed, or not what its checksum says.
        StorageError: A read or write failed.

    Examples:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> import orbax_safetensors_layout as osl
        >>> folder = tempfile.mkdtemp()
        >>> tree = {"weight": np.arange(4.0, dtype=np.float32)}
        >>> osl.save(folder, tree, options=osl.WriteOptions(layout="sharded"))
        >>> consolidate(folder)
        >>> safetensors.numpy.load_file(f"{folder}/model.safetensors")
        {'weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    options = given_or_default(options, WriteOptions)
    if options.quantize is not None:
        raise InvalidArgumentError("consolidate writes what was saved: leave out quantize.")
    with (
        save_group(path if target is None else target, options) as group,
        frozen_heap(),
        Catalog.open(path, retries=options.retries) as catalog,
    ):
        is_local = isinstance(catalog.storage, LocalStorage)
        manifest = catalog.manifest()
        if manifest is None or manifest.pieces is None:
            if target is None and manifest is not None:  # by a call that may have been killed
                with group.together("removing what an interrupted call has left"):
                    if group.is_leader and is_local:
                        finish_interrupted(os.path.realpath(catalog.path))
                return
            raise SafetensorsLayoutError(
                "the checkpoint is not stored in pieces of this package",
                file=path,
                expected='layout "sharded"',
                hint="It needs no consolidation."
                if catalog.layout == "hf"
                else "osl.convert(path, target, format='hf') puts pieces of torch's DCP together.",
            )
        verifying = VerifyingReader.open(catalog.storage, catalog.path)
        options = dataclasses.replace(
            options,
            layout="hf",
            dtype=None,
            metadata=manifest.metadata,
            digests=options.digests or verifying is not None,
        )
        prepared = _prepared(catalog, manifest, manifest.pieces, options, verifying)
        sidecar_files = {}
        if target is None:  # the files beside the pieces stay
            target, overwrite = catalog.path if is_local else path, True
        elif group.is_leader:
            sidecar_files = read_sidecar_files(catalog.path, storage=catalog.storage)
        prepared.commit(target, group=group, overwrite=overwrite, sidecar_files=sidecar_files)


def _prepared(
    catalog: Catalog,
    manifest: Manifest,
    pieces: StoredPieces,
    options: WriteOptions,
    verifying: VerifyingReader | None,
) -> PreparedSave:
    """Plans this process's share of the files that the pieces become."""
    entries = catalog.all_entries()
    packed = {  # tensors whose sub-byte elements are stored one a byte
        name: dtype
        for name, entry in entries.items()
        if entry.dtype.one_a_byte
        and (dtype := storage_dtype(entry.dtype.numpy, math.prod(entry.shape))).packed
    }
    shards = ProcessShards()
    plan = plan_consolidation(
        [
            NewTensor(name, packed.get(name) or DTYPES[entry.dtype.code], entry.shape)
            for name, entry in entries.items()
        ],
        pieces,
        options=options,
        process_index=shards.process_index,
        process_count=shards.process_count,
    )
    tree = None if manifest.tree is None else _with_dtypes(manifest.tree, packed)
    whole = dataclasses.replace(manifest, layout="hf", tree=tree, pieces=None)
    place = catalog.storage, catalog.path
    return PreparedSave(plan, HostValues([], ()), whole, options, pieces=place, verifying=verifying)


def _with_dtypes(node: Node, packed: dict[str, DType]) -> Node:
    """Return the tree without the dtypes of tensors that are packed now."""
    if isinstance(node, Container):
        children = tuple(_with_dtypes(child, packed) for child in node.children)
        return dataclasses.replace(node, children=children)
    if isinstance(node, TensorLeaf) and node.tensor in packed:
        return node._replace(dtype=None)
    return node
