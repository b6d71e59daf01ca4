"""The save pipeline, top to bottom: tree, plan, write, put together, publish. Start here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
from absl import logging

from orbax_safetensors_layout.errors import MappingError
from orbax_safetensors_layout.format.digests import DIGESTS, dump_digests, parse_digests
from orbax_safetensors_layout.format.headers import read_range
from orbax_safetensors_layout.format.index import MAIN_INDEX
from orbax_safetensors_layout.format.layout import index_bytes
from orbax_safetensors_layout.format.manifest import MANIFEST, Manifest, parse_manifest
from orbax_safetensors_layout.format.nodes import ValueLeaf, leaf_names
from orbax_safetensors_layout.mapping.rules import Mapping as LeafMapping
from orbax_safetensors_layout.mapping.rules import check_mapping
from orbax_safetensors_layout.options import Progress, WriteOptions
from orbax_safetensors_layout.plan.scatter import ScatterPlan, plan_scatter
from orbax_safetensors_layout.plan.shards import ProcessShards
from orbax_safetensors_layout.plan.writes import (
    PIECES_FOLDER,
    WritePlan,
    plan_mapped_writes,
    plan_writes,
)
from orbax_safetensors_layout.publishing import publication_of, publish
from orbax_safetensors_layout.saved_tree import SavedTree
from orbax_safetensors_layout.storage.base import Storage, join
from orbax_safetensors_layout.storage.resolve import open_storage
from orbax_safetensors_layout.transfer._jax import DistributedStore
from orbax_safetensors_layout.transfer.coordination import Agreement, Group
from orbax_safetensors_layout.transfer.garbage import frozen_heap
from orbax_safetensors_layout.transfer.gather import gather
from orbax_safetensors_layout.transfer.host import HostValues
from orbax_safetensors_layout.transfer.progress import progress_callback
from orbax_safetensors_layout.transfer.scatter import scatter
from orbax_safetensors_layout.transfer.write import FileSet, WritePool, WriteStats, write_parts
from orbax_safetensors_layout.units import MIB

PathLike = str | os.PathLike[str]
_WRITING, _GATHERING = "writing shards", "putting files together"
_BUDGET_BYTES = 256 * MIB  # of a save that names none: copies from devices, and pieces


def save(
    path: PathLike,
    tree: Any,
    *,
    mapping: LeafMapping | None = None,
    options: WriteOptions | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a tree as safetensors; each process writes its share and nothing is gathered.

    Every process of the program calls this with the same path on a file system that all share, or
    in a bucket. On a file system the files appear at `path` all at once when they are complete; in
    a bucket in an order in which no part of them passes for a checkpoint (docs/storage.md).

    Args:
        path: A folder, or the URL of one; it need not exist. Files in it that belong to no
            safetensors checkpoint (`config.json`, a tokenizer) stay.
        tree: Any pytree of `jax.Array`s (plain, or of typed PRNG keys), numpy arrays and scalars,
            and Python numbers, booleans and strings. A tensor is called by its dotted key path;
            a flat dict of Hugging Face names gives the files of Hugging Face.
        mapping: What the leaves are made of, as for `load`; the files get the tensors that it
            takes, and nothing else is written beside them. The tree then holds arrays only. A
            tensor has the dtype of its leaves, unless the mapping casts or `WriteOptions.dtype`
            says otherwise.
        options: How to write.
        overwrite: Replace a safetensors checkpoint that stands there.

    Raises:
        CheckpointExistsError: A safetensors checkpoint stands there, without `overwrite`.
        SafetensorsLayoutError: Leaves that can not be saved; before anything is written.
        MappingError: The mapping does not invert, or does not fit; before anything is written.
        StorageError: A write failed. What stood at `path` is as it was.
        PeerError: Another process failed.

    Example:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> folder = tempfile.mkdtemp()
        >>> save(folder, {"layer": {"weight": np.arange(4.0, dtype=np.float32)}})
        >>> safetensors.numpy.load_file(f"{folder}/model.safetensors")
        {'layer.weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    with frozen_heap(len(jax.tree.leaves(tree))):
        options = options or WriteOptions()
        storage, target = open_storage(path, retries=options.retries)
        publication = publication_of(storage, target, overwrite=overwrite)
        with storage, save_group(publication.target, options) as group:
            prepared = PreparedSave.of(tree, options, mapping=mapping)
            write = functools.partial(prepared.write, group=group, storage=storage)
            publish(publication, write, group=group, storage=storage, overwrite=overwrite)


def plan_save(
    abstract: Any,
    *,
    mapping: LeafMapping | None = None,
    options: WriteOptions | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> WritePlan:
    """What `save` would write.

    Args:
        abstract: The tree, of arrays or of `jax.ShapeDtypeStruct`s with shardings; these may be
            over an `AbstractMesh`, as for `plan_load`.
        mapping: As for `save`.
        options: As for `save`.
        process_index: The process whose plan is wanted; by default this one.
        process_count: For an `AbstractMesh`: the number of processes.

    Raises:
        SafetensorsLayoutError: Leaves that can not be saved.
    """
    options = options or WriteOptions()
    shards = ProcessShards(process_index, process_count)
    parsed = _parse(abstract, mapping, options, shards)
    return _plan(parsed, mapping, options, shards)[0]


def _parse(
    tree: Any,
    mapping: LeafMapping | None,
    options: WriteOptions,
    shards: ProcessShards,
    dtypes: Sequence[Any] | None = None,
) -> SavedTree:
    """The tree. Of a save through a mapping only the tensors get the dtype of the options."""
    if mapping is not None:
        check_mapping(mapping)
        if any(dtype is not None for dtype in dtypes or ()):
            raise ValueError(
                "A save through a mapping has no dtypes of single leaves: leave out save_args, and"
                " give WriteOptions.dtype, or a mapping that casts."
            )
        options = dataclasses.replace(options, dtype=None)
    return SavedTree.parse(tree, options=options, shards=shards, dtypes=dtypes)


def _plan(
    tree: SavedTree, mapping: LeafMapping | None, options: WriteOptions, shards: ProcessShards
) -> tuple[WritePlan, ScatterPlan | None]:
    index, count = shards.process_index, shards.process_count
    if mapping is None:
        return (
            plan_writes(tree.leaves, options=options, process_index=index, process_count=count),
            None,
        )
    if options.layout != "hf":
        raise ValueError("A save through a mapping has layout 'hf': leave out WriteOptions.layout.")
    values = [name for name, leaf in leaf_names(tree.node) if isinstance(leaf, ValueLeaf)]
    if values:
        raise MappingError(
            f"a save through a mapping holds arrays only; these leaves are none: {values[:10]}",
            hint="Save the parameters alone.",
        )
    scattered = plan_scatter(tree.leaves, mapping, options.dtype)
    plan = plan_mapped_writes(
        tree.leaves,
        scattered.tensors,
        options=options,
        process_index=index,
        process_count=count,
    )
    return plan, scattered


def save_group(name: str, options: WriteOptions, purpose: str = "save") -> Group:
    """The processes of this program, that save together.

    For a `with` block, which all enter in the same order: an error in it reaches the others.

    Args:
        name: The folder that they save to.
        options: How long they wait for each other.
        purpose: What they do.
    """
    count = jax.process_count()
    store = DistributedStore.connect() if count > 1 else None
    return Group(name, jax.process_index(), count, store, options.timeout_seconds, purpose=purpose)


class PreparedSave:
    """A tree on its way to files. `of` and `capture` are quick; `write` may run in another thread.

    Args:
        plan: What this process writes.
        values: The values of its leaves.
        manifest: What is written beside the tensors, if anything.
        options: How to write.
        scattered: What the files' tensors are made of, in a save through a mapping.
        pieces: Where the pieces are that files are put together from, a storage and a folder, if
            they are there already; by default this save writes them, and removes them when it is
            done.
    """

    def __init__(
        self,
        plan: WritePlan,
        values: HostValues,
        manifest: Manifest | None,
        options: WriteOptions,
        *,
        scattered: ScatterPlan | None = None,
        pieces: tuple[Storage, str] | None = None,
    ) -> None:
        self.plan = plan
        self._values = values
        self._manifest = manifest
        self._options = options
        self._scattered = scattered
        self._pieces = pieces

    @classmethod
    def of(
        cls,
        tree: Any,
        options: WriteOptions,
        *,
        mapping: LeafMapping | None = None,
        custom: object = None,
        dtypes: Sequence[Any] | None = None,
    ) -> Self:
        """Plans a save.

        Args:
            tree: As for `save`.
            options: How to write.
            mapping: As for `save`.
            custom: A JSON value to keep beside the tensors.
            dtypes: For each of `jax.tree.leaves(tree)` the dtype to write an array in, whatever
                the options say; None for the usual.

        Raises:
            ValueError: The tree is an empty container.
            SafetensorsLayoutError: Leaves that can not be saved.
        """
        shards = ProcessShards()
        parsed = _parse(tree, mapping, options, shards, dtypes)
        parsed.check_concrete()
        plan, scattered = _plan(parsed, mapping, options, shards)
        values = HostValues(parsed.values, plan.leaves)
        manifest: Manifest | None = None
        if custom is not None:  # checked, and copied, now: the caller may change it
            data = Manifest("hf", custom=custom).to_json()
            manifest = parse_manifest(data, file=MANIFEST)
            custom = manifest.custom
        if scattered is not None:
            return cls(plan, values, manifest, options, scattered=scattered)
        stored = plan.stored if options.layout == "sharded" else None
        manifest = Manifest(
            layout=options.layout,
            tree=parsed.node,
            shardings=parsed.shardings,
            metadata=dict(options.metadata),
            custom=custom,
            pieces=stored,
        )
        return cls(plan, values, manifest, options)

    def capture(self) -> None:
        """Brings what this process writes to the host, as far as the memory budget allows."""
        parts = [part for file in self.plan.writes() for part in file.parts]
        if self._scattered is not None and self.plan.stored is None:
            wanted = {(p.leaf, p.held) for made in self._scattered.parts.values() for p in made}
            parts = [self._values.box_part(leaf, held) for leaf, held in sorted(wanted)]
        self._values.capture(parts, self._options.memory_budget_bytes)

    def wait_captured(self, timeout_seconds: float | None = None) -> bool:
        """Waits until `write`, in another thread, has brought over what `capture` left out.

        The caller may then overwrite, donate or delete the arrays.

        Returns:
            Whether it has.
        """
        return self._values.wait_captured(timeout_seconds)

    def write(
        self,
        folder: str,
        *,
        group: Group,
        storage: Storage,
        documents: Mapping[str, bytes] | None = None,
    ) -> WriteStats:
        """Writes everything into a folder that exists, and waits until all processes have.

        Args:
            folder: The folder.
            group: The processes.
            storage: Where the folder is.
            documents: More small files, by name.

        Raises:
            StorageError: A write failed.
            PeerError: Another process failed.
        """
        with progress_callback(self._options.progress) as progress:
            stats = self._write(folder, group, storage, progress, documents or {})
        _record(stats)
        return stats

    def _write(
        self,
        folder: str,
        group: Group,
        storage: Storage,
        progress: Callable[[Progress], None] | None,
        documents: Mapping[str, bytes],
    ) -> WriteStats:
        options = self._options
        files = FileSet(storage, folder, durable=options.fsync, digest=options.digests)
        check = functools.partial(group.check, "saving")
        pool = WritePool(self._options.writers, storage.interrupt, check)
        step = functools.partial(_step, group, storage, pool)
        stats = WriteStats()
        agree = self._agreement() if self.plan.process_count > 1 else None
        save_id = uuid.uuid4().hex
        try:
            with step("agreeing on what is saved", agree, save_id) as told:
                # Where files appear one by one this comes first, and the index last; see
                # `publishing.appearance_rank`.
                if group.is_leader:
                    manifest = self._manifest_file(save_id)
                    self._write_documents(storage, folder, {**manifest, **documents})
                    files.digests |= {name: zlib.crc32(data) for name, data in manifest.items()}
            self.plan = self.plan.stamped(told[0])
            with step(_WRITING):
                stats += self._write_shards(folder, group, storage, files, pool, progress)
            with step(_GATHERING):
                stats += self._put_together(folder, group, storage, files, pool, progress)
                if options.digests and not group.is_leader:
                    storage.make_folder(join(folder, PIECES_FOLDER))
                    own = {_own_digests(group.process_index): dump_digests(files.digests)}
                    self._write_documents(storage, folder, own)
        finally:
            pool.stop()
            files.abort()
            self._values.release()
        with step("looking at what was written"):  # by all, before pieces are removed
            storage.check_written(folder)
        with step("completing the folder"):
            if group.is_leader:
                self._complete(folder, storage, files.digests)
        return stats

    @property
    def _budget_bytes(self) -> int:
        return self._options.memory_budget_bytes or _BUDGET_BYTES

    def _write_shards(
        self,
        folder: str,
        group: Group,
        storage: Storage,
        files: FileSet,
        pool: WritePool,
        progress: Callable[[Progress], None] | None,
    ) -> WriteStats:
        """Writes what comes from this process's own shards."""
        if self.plan.pieces is not None:
            storage.make_folder(os.path.dirname(join(folder, self.plan.pieces.name)))
        return write_parts(
            [*self.plan.writes()],
            self.plan.leaves,
            self._values,
            files,
            pool,
            memory_budget_bytes=self._budget_bytes,
            progress=progress,
            check=functools.partial(group.check, _WRITING),
        )

    def _put_together(
        self,
        folder: str,
        group: Group,
        storage: Storage,
        files: FileSet,
        pool: WritePool,
        progress: Callable[[Progress], None] | None,
    ) -> WriteStats:
        """Completes the files that need what other processes have written, or a mapping."""
        pieces_storage, pieces_folder = self._pieces or (storage, folder)
        if self._scattered is not None:
            return scatter(
                self.plan,
                self._scattered.parts,
                files,
                pool,
                self._values,
                pieces_storage,
                pieces_folder,
                memory_budget_bytes=self._budget_bytes,
                progress=progress,
                check=functools.partial(group.check, _GATHERING),
            )
        if not self.plan.exchanges:
            return WriteStats()
        return gather(
            self.plan,
            files,
            pool,
            pieces_storage,
            pieces_folder,
            in_order=storage.appends,
            memory_budget_bytes=self._budget_bytes,
            progress=progress,
            check=functools.partial(group.check, _GATHERING),
        )

    def _complete(self, folder: str, storage: Storage, digests: Mapping[str, int]) -> None:
        """Writes what makes many files one checkpoint, and removes what was only needed before."""
        documents = {}
        if len(self.plan.files) > 1:
            files = [(name, tensors) for name, _, tensors in self.plan.files]
            documents[MAIN_INDEX] = index_bytes(files)
        if self._options.digests:
            found = {name: zlib.crc32(data) for name, data in documents.items()}
            found |= {**digests, **self._others_digests(storage, folder)}
            documents[DIGESTS] = dump_digests(found)
        self._write_documents(storage, folder, documents)
        own_pieces = self.plan.exchanges and self._pieces is None
        if own_pieces or (self._options.digests and self.plan.process_count > 1):
            storage.remove(join(folder, PIECES_FOLDER))
        if self._options.fsync:
            storage.flush_folder(folder)

    def _agreement(self) -> Agreement:
        plan = self.plan
        digest = hashlib.sha256(repr((plan.files, plan.stored)).encode())
        tensors = [leaf.tensor for leaf in plan.leaves]
        digest.update(repr(tensors).encode())
        local = self._values.local_names()
        description = f"{len(tensors)} tensors of {sum(t.nbytes for t in tensors):,} bytes"
        if local:
            description += f", of which {len(local)} are its own alone, as {local[:3]}"
        return Agreement(
            digest.hexdigest(),
            description,
            "All processes must save the same tree of global arrays; an array that each process"
            " made for itself (jnp.asarray, jax.random.key) is none: make it a numpy array, or give"
            " it a sharding over all processes.",
        )

    def _manifest_file(self, save_id: str) -> dict[str, bytes]:
        manifest = self._manifest
        if manifest is None:
            return {}
        if manifest.pieces is not None:
            stored = self.plan.stamped(save_id).stored
            manifest = dataclasses.replace(manifest, pieces=stored)
        return {MANIFEST: manifest.to_json()}

    def _others_digests(self, storage: Storage, folder: str) -> dict[str, int]:
        """What the other processes have left, each of its own files."""
        found: dict[str, int] = {}
        for process in range(1, self.plan.process_count):
            file = join(folder, _own_digests(process))
            data = read_range(storage, file, 0, storage.size(file))
            found |= parse_digests(data, file=file)
        return found

    def _write_documents(
        self, storage: Storage, folder: str, documents: Mapping[str, bytes]
    ) -> None:
        for name, data in documents.items():
            file = storage.create(join(folder, name), len(data), durable=self._options.fsync)
            try:
                file.write_at(0, [memoryview(bytearray(data))])
                file.finish()
            except BaseException:
                file.abort()
                raise


def _own_digests(process: int) -> str:
    return f"{PIECES_FOLDER}/{DIGESTS}.{process}"


@contextlib.contextmanager
def _step(
    group: Group,
    storage: Storage,
    pool: WritePool,
    doing: str,
    agree: Agreement | None = None,
    tell: str = "",
) -> Iterator[list[str]]:
    """A step of a save: all processes wait for each other after it, and fail together.

    What the first process tells is in the list that the step yields, when it is over.
    """
    error: BaseException | None = None
    told: list[str] = []
    try:
        yield told
    except BaseException as problem:
        error = problem
        storage.interrupt()
        pool.stop()
    told.append(group.meet(doing, error, agree=agree, tell=tell))


def _record(stats: WriteStats) -> None:
    """Reports the save beside what loads report."""
    prefix = "/jax/orbax/write/safetensors/"
    jax.monitoring.record_scalar(prefix + "bytes_written", float(stats.bytes_written))
    logging.vlog(1, "Saved safetensors: %s", stats)
