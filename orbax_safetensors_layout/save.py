"""The save pipeline, top to bottom: tree, plan, write, put together, publish. Start here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
from absl import logging

from orbax_safetensors_layout.errors import (
    CheckpointExistsError,
    MappingError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.format.digests import DIGESTS, dump_digests, parse_digests
from orbax_safetensors_layout.format.headers import read_range
from orbax_safetensors_layout.format.index import INDEX_SUFFIX, MAIN_INDEX, SUFFIX
from orbax_safetensors_layout.format.layout import index_bytes
from orbax_safetensors_layout.format.manifest import MANIFEST, Manifest, parse_manifest
from orbax_safetensors_layout.format.nodes import ValueLeaf, leaf_names
from orbax_safetensors_layout.format.survey import is_safetensors_checkpoint
from orbax_safetensors_layout.mapping.rules import Mapping as LeafMapping
from orbax_safetensors_layout.options import MIB, Progress, WriteOptions
from orbax_safetensors_layout.plan.scatter import ScatterPlan, plan_scatter
from orbax_safetensors_layout.plan.shards import ProcessShards
from orbax_safetensors_layout.plan.writes import (
    PIECES_FOLDER,
    WritePlan,
    plan_mapped_writes,
    plan_writes,
)
from orbax_safetensors_layout.saved_tree import SavedTree
from orbax_safetensors_layout.storage.base import Storage, join
from orbax_safetensors_layout.storage.local_write import flush_folder
from orbax_safetensors_layout.storage.publish import (
    check_replaceable,
    claimed,
    partial_folder,
    publish_folder,
    restore_folder,
)
from orbax_safetensors_layout.storage.resolve import open_storage
from orbax_safetensors_layout.transfer._jax import DistributedStore
from orbax_safetensors_layout.transfer.coordination import Agreement, Group
from orbax_safetensors_layout.transfer.garbage import frozen_heap
from orbax_safetensors_layout.transfer.gather import gather
from orbax_safetensors_layout.transfer.host import HostValues
from orbax_safetensors_layout.transfer.progress import progress_callback
from orbax_safetensors_layout.transfer.scatter import scatter
from orbax_safetensors_layout.transfer.write import FileSet, WritePool, WriteStats, write_parts

PathLike = str | os.PathLike[str]
_WRITING, _GATHERING = "writing shards", "putting files together"
_ALIKE = (
    "All processes must save the same tree of global arrays; an array that each process made for"
    " itself (jnp.asarray, jax.random.key) is none: make it a numpy array, or give it a sharding"
    " over all processes."
)
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

    Every process of the program calls this with the same path on a file system that all share.
    Files appear at `path` all at once when they are complete.

    Args:
        path: A folder; it need not exist. Files in it that belong to no safetensors checkpoint
            (`config.json`, a tokenizer) stay.
        tree: Any pytree of `jax.Array`s (plain, or of typed PRNG keys), numpy arrays and scalars,
            and Python numbers, booleans and strings. A tensor is called by its dotted key path;
            a flat dict of Hugging Face names gives the files of Hugging Face.
        mapping: What the leaves are made of, as for `load`; the files get the tensors that it
            takes, and nothing else is written beside them. The tree then holds arrays only.
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
        with save_group(os.path.realpath(open_storage(path)[1]), options) as group:
            prepared = PreparedSave.of(tree, options, mapping=mapping)
            prepared.publish(path, group=group, overwrite=overwrite)


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
    parsed = SavedTree.parse(abstract, options=options, shards=shards)
    return _plan(parsed, mapping, options, shards)[0]


def _plan(
    tree: SavedTree, mapping: LeafMapping | None, options: WriteOptions, shards: ProcessShards
) -> tuple[WritePlan, ScatterPlan | None]:
    index, count = shards.process_index, shards.process_count
    if mapping is None:
        return (
            plan_writes(tree.leaves, options=options, process_index=index, process_count=count),
            None,
        )
    if options.layout != "hf" or options.dtype is not None:
        raise ValueError(
            "A save through a mapping has layout 'hf', and the dtypes of its leaves unless the"
            " mapping casts: leave out WriteOptions.layout and .dtype."
        )
    values = [name for name, leaf in leaf_names(tree.node) if isinstance(leaf, ValueLeaf)]
    if values:
        raise MappingError(
            f"a save through a mapping holds arrays only; these leaves are none: {values[:10]}",
            hint="Save the parameters alone.",
        )
    scattered = plan_scatter(tree.leaves, mapping)
    plan = plan_mapped_writes(
        tree.leaves,
        scattered.tensors,
        options=options,
        process_index=index,
        process_count=count,
    )
    return plan, scattered


def save_group(name: str, options: WriteOptions) -> Group:
    """The processes of this program, that save together.

    For a `with` block, which all enter in the same order: an error in it reaches the others.

    Args:
        name: The folder that they save to.
        options: How long they wait for each other.
    """
    count = jax.process_count()
    store = DistributedStore.connect() if count > 1 else None
    return Group(name, jax.process_index(), count, store, options.timeout_seconds)


class PreparedSave:
    """A tree on its way to files. `of` and `capture` are quick; `write` may run in another thread.

    Args:
        plan: What this process writes.
        values: The values of its leaves.
        manifest: What is written beside the tensors, if anything.
        options: How to write.
        scattered: What the files' tensors are made of, in a save through a mapping.
        pieces_folder: Where the pieces are that files are put together from, if they are there
            already; by default this save writes them, and removes them when it is done.
    """

    def __init__(
        self,
        plan: WritePlan,
        values: HostValues,
        manifest: Manifest | None,
        options: WriteOptions,
        *,
        scattered: ScatterPlan | None = None,
        pieces_folder: str | None = None,
    ) -> None:
        self.plan = plan
        self._values = values
        self._manifest = manifest
        self._options = options
        self._scattered = scattered
        self._pieces_folder = pieces_folder

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
        parsed = SavedTree.parse(tree, options=options, shards=shards, dtypes=dtypes)
        parsed.check_concrete()
        plan, scattered = _plan(parsed, mapping, options, shards)
        values = HostValues(parsed.values, plan.leaves)
        if scattered is not None:
            return cls(plan, values, None, options, scattered=scattered)
        if custom is not None:  # checked, and copied, now: the caller may change it
            data = Manifest("hf", custom=custom).to_json()
            custom = parse_manifest(data, file=MANIFEST).custom
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

    def publish(self, path: PathLike, *, group: Group, overwrite: bool) -> None:
        """Writes everything beside `path`, and puts it there when it is complete; see `save`."""
        storage, target = open_storage(path)
        target = os.path.realpath(target)
        with storage:
            partial = partial_folder(target)
            error: BaseException | None = None
            claim = contextlib.ExitStack()
            try:
                self._publish(partial, target, group, storage, overwrite, claim)
            except BaseException as problem:
                error = problem
                group.leave()
                if group.is_leader:
                    group.await_others()
            claim.close()
            group.meet("publishing the checkpoint", error)

    def _publish(
        self,
        partial: str,
        target: str,
        group: Group,
        storage: Storage,
        overwrite: bool,
        claim: contextlib.ExitStack,
    ) -> None:
        error: BaseException | None = None
        try:
            if group.is_leader:
                claim.enter_context(claimed(f"{partial}.lock"))
                claim.callback(_remove_quietly, storage, partial)
                restore_folder(target, partial)
                _check_target(target, overwrite)
                check_replaceable(target)
                storage.remove(partial)
                storage.make_folder(partial)
        except BaseException as problem:
            error = problem
        group.meet("preparing the folder", error)
        self.write(partial, group=group, storage=storage)
        if group.is_leader:
            publish_folder(partial, target, is_replaced=is_checkpoint_file)

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
        budget = options.memory_budget_bytes or _BUDGET_BYTES
        files = FileSet(storage, folder, durable=options.fsync, digest=options.digests)
        pool = WritePool(options.writers)
        stats = WriteStats()
        error: BaseException | None = None
        agree = self._agreement() if self.plan.process_count > 1 else None
        save_id = group.meet("agreeing on what is saved", agree=agree, tell=uuid.uuid4().hex)
        plan = self.plan.stamped(save_id or "")
        try:
            try:
                if plan.pieces is not None:
                    storage.make_folder(os.path.dirname(join(folder, plan.pieces.name)))
                stats += write_parts(
                    [*plan.writes()],
                    plan.leaves,
                    self._values,
                    files,
                    pool,
                    memory_budget_bytes=budget,
                    progress=progress,
                    check=functools.partial(group.check, _WRITING),
                )
            except BaseException as problem:
                error = problem
                pool.stop()
            group.meet(_WRITING, error)
            try:
                pieces = self._pieces_folder or folder
                if self._scattered is not None:
                    stats += scatter(
                        plan,
                        self._scattered.parts,
                        files,
                        pool,
                        self._values,
                        storage,
                        pieces,
                        memory_budget_bytes=budget,
                    )
                elif plan.exchanges:
                    stats += gather(
                        plan,
                        files,
                        pool,
                        storage,
                        pieces,
                        memory_budget_bytes=budget,
                        progress=progress,
                        check=functools.partial(group.check, _GATHERING),
                    )
                if group.is_leader:
                    written = self._documents(plan)
                    files.digests |= {name: zlib.crc32(data) for name, data in written.items()}
                    self._write_documents(storage, folder, {**documents, **written})
                elif options.digests:
                    own = {_own_digests(group.process_index): dump_digests(files.digests)}
                    self._write_documents(storage, folder, own)
            except BaseException as problem:
                error = problem
                pool.stop()
            group.meet(_GATHERING, error)
        finally:
            pool.stop()
            files.abort()
            self._values.release()
        try:
            if plan.exchanges and group.is_leader and self._pieces_folder is None:
                storage.remove(join(folder, PIECES_FOLDER))
            if options.digests and group.is_leader:
                self._write_digests(storage, folder, files.digests, plan)
            if options.fsync and group.is_leader:
                flush_folder(folder)
        except BaseException as problem:
            error = problem
        group.meet("completing the folder", error)
        return stats

    def _agreement(self) -> Agreement:
        plan = self.plan
        digest = hashlib.sha256(repr((plan.files, plan.stored)).encode())
        tensors = [leaf.tensor for leaf in plan.leaves]
        digest.update(repr(tensors).encode())
        local = self._values.local_names()
        description = f"{len(tensors)} tensors of {sum(t.nbytes for t in tensors):,} bytes"
        if local:
            description += f", of which {len(local)} are its own alone, as {local[:3]}"
        return Agreement(digest.hexdigest(), description, _ALIKE)

    def _documents(self, plan: WritePlan) -> dict[str, bytes]:
        """The manifest, and for several files the index."""
        documents = {}
        if self._manifest is not None:
            pieces = None if self._manifest.pieces is None else plan.stored
            documents[MANIFEST] = dataclasses.replace(self._manifest, pieces=pieces).to_json()
        if len(plan.files) > 1:
            files = [(name, tensors) for name, _, tensors in plan.files]
            documents[MAIN_INDEX] = index_bytes(files)
        return documents

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

    def _write_digests(
        self, storage: Storage, folder: str, digests: Mapping[str, int], plan: WritePlan
    ) -> None:
        """The digests of all processes in one file; each but the first has left its own."""
        found = dict(digests)
        for process in range(1, plan.process_count):
            file = join(folder, _own_digests(process))
            data = read_range(storage, file, 0, storage.size(file))
            found |= parse_digests(data, file=file)
            storage.remove(file)
        kept = {n: value for n, value in found.items() if not n.startswith(f"{PIECES_FOLDER}/")}
        self._write_documents(storage, folder, {DIGESTS: dump_digests(kept)})


def _own_digests(process: int) -> str:
    return f"{DIGESTS}.{process}"


def _remove_quietly(storage: Storage, path: str) -> None:
    with contextlib.suppress(SafetensorsLayoutError):  # what failed before is what counts
        storage.remove(path)


def _check_target(target: str, overwrite: bool) -> None:
    if target.endswith(SUFFIX):
        raise SafetensorsLayoutError(
            "a checkpoint is saved as a folder",
            file=target,
            hint=f"Give the folder; the file in it is called 'model{SUFFIX}'.",
        )
    if os.path.exists(target) and not os.path.isdir(target):
        raise CheckpointExistsError("the path is a file", file=target, expected="a folder")
    if is_safetensors_checkpoint(target) and not overwrite:
        raise CheckpointExistsError(
            "a safetensors checkpoint stands there already",
            file=target,
            hint="Pass overwrite=True to replace it.",
        )


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name belongs to a safetensors checkpoint."""
    return name.endswith((SUFFIX, INDEX_SUFFIX)) or name in (MANIFEST, DIGESTS)


def _record(stats: WriteStats) -> None:
    """Reports the save beside what loads report."""
    prefix = "/jax/orbax/write/safetensors/"
    jax.monitoring.record_scalar(prefix + "bytes_written", float(stats.bytes_written))
    logging.vlog(1, "Saved safetensors: %s", stats)
