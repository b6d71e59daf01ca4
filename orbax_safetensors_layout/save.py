"""The save pipeline, top to bottom: tree, plan, write, put together, publish. Start here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
from absl import logging

from orbax_safetensors_layout.errors import redact_urls
from orbax_safetensors_layout.format import MANIFEST, Manifest, parse_manifest
from orbax_safetensors_layout.mapping import Mapping as LeafMapping
from orbax_safetensors_layout.options import (
    MIB,
    ConvertOptions,
    Progress,
    WriteOptions,
    given_or_default,
)
from orbax_safetensors_layout.plan import ScatterPlan, WritePlan
from orbax_safetensors_layout.reading import DistributedStore
from orbax_safetensors_layout.runtime import (
    Fingerprint,
    ProcessGroup,
    Workers,
    frozen_heap,
    progress_callback,
)
from orbax_safetensors_layout.sharding import ProcessShards
from orbax_safetensors_layout.storage import Storage, open_storage
from orbax_safetensors_layout.writing import (
    CheckpointFolder,
    Completion,
    HostValues,
    PreparedTree,
    WriteStats,
    gather,
    given_companions,
    publication_of,
    publish,
    scatter,
    write_parts,
)

PathLike = str | os.PathLike[str]
_WRITING, _GATHERING = "writing shards", "putting files together"
_BUDGET_BYTES = 256 * MIB  # of a save that names none: copies from devices, and pieces


def save(
    path: PathLike,
    tree: Any,
    *,
    mapping: LeafMapping | None = None,
    config: PathLike | None = None,
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
        config: The folder of the model whose `config.json`, tokenizer and the like are put beside
            the files, as they are: without a `config.json`, `transformers` does not open a folder.
        options: How to write.
        overwrite: Replace a safetensors checkpoint that stands there.

    Raises:
        CheckpointExistsError: A safetensors checkpoint, or another file of a name in `config`,
            stands there, without `overwrite`.
        CheckpointNotFoundError: There is no such file in `config`.
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
        options = given_or_default(options, WriteOptions)
        with save_group(path, options) as group:
            documents = {}
            if config is not None and group.is_leader:
                documents = given_companions(config)
            prepared = PreparedSave.of(tree, options, mapping=mapping)
            prepared.publish(path, group=group, overwrite=overwrite, documents=documents)


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
    options = given_or_default(options, WriteOptions)
    shards = ProcessShards(process_index, process_count)
    parsed = PreparedTree.parse(abstract, options=options, shards=shards, mapping=mapping)
    return parsed.plan(mapping, options, shards)[0]


def save_group(
    path: PathLike, options: WriteOptions | ConvertOptions, purpose: str = "save"
) -> ProcessGroup:
    """The processes of this program, that save together.

    For a `with` block, which all enter in the same order, before anything can fail on one of them
    alone: an error in it reaches the others.

    Args:
        path: The folder that they save to.
        options: How long they wait for each other.
        purpose: What they do.
    """
    count = jax.process_count()
    store = DistributedStore.connect() if count > 1 else None
    name = redact_urls(os.fsdecode(path))
    if "://" not in name and "\0" not in name:
        name = os.path.realpath(os.path.expanduser(name))
    return ProcessGroup(
        name, jax.process_index(), count, store, options.timeout_seconds, purpose=purpose
    )


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
        parsed = PreparedTree.parse(
            tree, options=options, shards=shards, dtypes=dtypes, mapping=mapping
        )
        parsed.check_concrete()
        plan, scattered = parsed.plan(mapping, options, shards)
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

    def publish(
        self,
        path: PathLike,
        *,
        group: ProcessGroup,
        overwrite: bool,
        documents: Mapping[str, bytes] | None = None,
    ) -> None:
        """Writes everything, and lets it appear at a path when it is complete.

        Args:
            path: A folder, or the URL of one.
            group: The processes.
            overwrite: Replace a checkpoint that stands there.
            documents: More small files, by name; those of the leader count.

        Raises:
            CheckpointExistsError: One stands there, or another file of such a name, without
                `overwrite`.
            StorageError: A write failed.
            PeerError: Another process failed.
        """
        storage, target = open_storage(path, retries=self._options.retries)
        with storage:
            documents = documents or {}
            publication = publication_of(
                storage, target, overwrite=overwrite, documents=documents.keys()
            )
            write = functools.partial(self.write, group=group, storage=storage, documents=documents)
            publish(
                publication,
                write,
                group=group,
                storage=storage,
                overwrite=overwrite,
                documents=documents,
            )

    def write(
        self,
        folder: str,
        *,
        group: ProcessGroup,
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
        options = self._options
        with progress_callback(options.progress) as progress:
            run = _Run(
                CheckpointFolder(folder, storage, options),
                group,
                Workers(
                    options.writers,
                    "safetensors-write",
                    storage.interrupt,
                    functools.partial(group.check, "saving"),
                ),
                options.memory_budget_bytes or _BUDGET_BYTES,
                progress,
            )
            stats = self._write(run, documents or {})
        _record(stats)
        return stats

    def _write(self, run: _Run, documents: Mapping[str, bytes]) -> WriteStats:
        folder, group = run.folder, run.group
        save_id = uuid.uuid4().hex
        try:
            with run.step("agreeing on what is saved", self._agreement(), save_id) as told:
                if group.is_leader:
                    folder.begin(self._manifest_bytes(save_id), documents)
            self.plan = self.plan.stamped(told[0])
            with run.step(_WRITING):
                stats = self._write_shards(run)
            with run.step(_GATHERING):
                stats += self._put_together(run)
                if not group.is_leader:
                    folder.leave_digests(group.process_index)
        finally:
            run.pool.stop()
            folder.files.abort()
            self._values.release()
        with run.step("looking at what was written"):  # by all, before pieces are removed
            folder.storage.check_written(folder.path)
        with run.step("completing the folder"):
            if group.is_leader:
                folder.complete(self.plan)
        return stats

    def _write_shards(self, run: _Run) -> WriteStats:
        """Writes what comes from this process's own shards."""
        if self.plan.pieces is not None and self.plan.pieces.is_temporary:
            run.folder.make_pieces_folder()
        return write_parts(
            [*self.plan.writes()],
            self.plan.leaves,
            self._values,
            run.folder.files,
            run.pool,
            memory_budget_bytes=run.memory_budget_bytes,
            progress=run.progress,
            check=functools.partial(run.group.check, _WRITING),
        )

    def _put_together(self, run: _Run) -> WriteStats:
        """Completes the files that need what other processes have written, or a mapping."""
        storage, pieces_folder = self._pieces or (run.folder.storage, run.folder.path)
        work = Completion(
            self.plan,
            run.folder.files,
            run.pool,
            storage,
            pieces_folder,
            run.folder.storage.appends,
            run.memory_budget_bytes,
            run.progress,
            check=functools.partial(run.group.check, _GATHERING),
        )
        if self._scattered is not None:
            return scatter(work, self._scattered.parts, self._values)
        return gather(work) if self.plan.exchanges else WriteStats()

    def _agreement(self) -> Fingerprint | None:
        plan = self.plan
        if plan.process_count == 1:
            return None
        digest = hashlib.sha256(repr((plan.files, plan.stored)).encode())
        tensors = [leaf.tensor for leaf in plan.leaves]
        digest.update(repr(tensors).encode())
        local = self._values.local_names()
        description = f"{len(tensors)} tensors of {sum(t.nbytes for t in tensors):,} bytes"
        if local:
            description += f", of which {len(local)} are its own alone, as {local[:3]}"
        return Fingerprint(
            digest.hexdigest(),
            description,
            "All processes must save the same tree of global arrays; an array that each process"
            " made for itself (jnp.asarray, jax.random.key) is none: make it a numpy array, or give"
            " it a sharding over all processes.",
        )

    def _manifest_bytes(self, save_id: str) -> bytes | None:
        manifest = self._manifest
        if manifest is None:
            return None
        if manifest.pieces is not None:
            stored = self.plan.stamped(save_id).stored
            manifest = dataclasses.replace(manifest, pieces=stored)
        return manifest.to_json()


class _Run(NamedTuple):
    """What the steps of a save share.

    Attributes:
        folder: What is written.
        group: The processes.
        pool: Threads that write.
        memory_budget_bytes: Host bytes of values that are held at once.
        progress: Told of what is done.
    """

    folder: CheckpointFolder
    group: ProcessGroup
    pool: Workers
    memory_budget_bytes: int
    progress: Callable[[Progress], None] | None

    @contextlib.contextmanager
    def step(
        self, doing: str, agree: Fingerprint | None = None, tell: str = ""
    ) -> Iterator[list[str]]:
        """A step of all processes, that wait for each other after it and fail together.

        What the first process tells is in the list that the step yields, when it is over.
        """
        error: BaseException | None = None
        told: list[str] = []
        try:
            yield told
        except BaseException as problem:
            error = problem
            self.folder.storage.interrupt()
            self.pool.stop()
        told.append(self.group.barrier(doing, error, agree=agree, tell=tell))


def _record(stats: WriteStats) -> None:
    """Reports the save beside what loads report."""
    prefix = "/jax/orbax/write/safetensors/"
    jax.monitoring.record_scalar(prefix + "bytes_written", float(stats.bytes_written))
    logging.vlog(1, "Saved safetensors: %s", stats)
