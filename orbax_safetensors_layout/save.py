"""The save pipeline: prepare the tree, plan, write shards, assemble files, commit. Start here."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
from absl import logging

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import listed, redact_urls
from orbax_safetensors_layout.format import DIGESTS, MANIFEST, Manifest, parse_manifest
from orbax_safetensors_layout.mapping import Mapping as LeafMapping, described_rule
from orbax_safetensors_layout.options import (
    ConvertOptions,
    OnProgress,
    PathLike,
    ReadOptions,
    WriteOptions,
    given_or_default,
)
from orbax_safetensors_layout.plan import MappedTensors, WritePlan, array_sources, leaf_sources
from orbax_safetensors_layout.reading import DistributedStore, VerifyingReader
from orbax_safetensors_layout.runtime import (
    Fingerprint,
    ProcessGroup,
    frozen_heap,
    progress_callback,
)
from orbax_safetensors_layout.sharding import ProcessShards
from orbax_safetensors_layout.storage import Storage, local_path, open_storage
from orbax_safetensors_layout.writing import (
    CheckpointFolder,
    HostValues,
    PreparedTree,
    SavedTensor,
    assemble_files,
    card_file,
    commit_when_complete,
    configured_files,
    described_files,
    model_files,
    write_mapped,
    write_parts,
)


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
            takes, and nothing else is written beside them. It makes every leaf, all of them
            arrays, or drops it (`mapping.drop`). A tensor has the dtype of its leaves, unless the
            mapping casts or `WriteOptions.dtype` says otherwise.
        options: How to write.
        overwrite: Replace an existing safetensors checkpoint.

    Raises:
        CheckpointExistsError: The folder has a safetensors checkpoint, or another file of a name
            in `WriteOptions.model`, and `overwrite` is not set.
        CheckpointNotFoundError: There is no such file in `WriteOptions.model`.
        SafetensorsLayoutError: Leaves that cannot be saved; before anything is written.
        MappingError: The mapping does not invert, or does not fit; before anything is written.
        StorageError: A write failed; `path` is unchanged.
        PeerError: Another process failed.

    Examples:
        >>> import tempfile, numpy as np, safetensors.numpy
        >>> folder = tempfile.mkdtemp()
        >>> save(folder, {"layer": {"weight": np.arange(4.0, dtype=np.float32)}})
        >>> safetensors.numpy.load_file(f"{folder}/model.safetensors")
        {'layer.weight': array([0., 1., 2., 3.], dtype=float32)}
    """
    options = given_or_default(options, WriteOptions)
    with frozen_heap(), save_group(path, options) as group:
        prepared = PreparedSave.of(tree, options, mapping=mapping)
        sidecar_files = prepared.sidecar_files(path) if group.is_leader else {}
        prepared.commit(path, group=group, overwrite=overwrite, sidecar_files=sidecar_files)


def plan_save(
    abstract: Any,
    *,
    mapping: LeafMapping | None = None,
    options: WriteOptions | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
) -> WritePlan:
    """Plans what `save` would write of a tree of arrays or of `jax.ShapeDtypeStruct`s.

    The processes are as for `plan_load`; shardings may be over an `AbstractMesh`, too.

    Raises:
        SafetensorsLayoutError: Leaves that cannot be saved.
    """
    options = given_or_default(options, WriteOptions)
    shards = ProcessShards(process_index, process_count)
    parsed = PreparedTree.parse(abstract, options=options, shards=shards, mapping=mapping)
    return parsed.plan(mapping, options, shards)[0]


def save_group(
    path: PathLike, options: WriteOptions | ConvertOptions | ReadOptions, purpose: str = "save"
) -> ProcessGroup:
    """Returns the group of this program's processes, which save or convert together.

    All enter it as a `with` block in the same order, before anything can fail on one of them alone.
    """
    count = jax.process_count()
    store = DistributedStore.connect() if count > 1 else None
    name = redact_urls(os.fsdecode(path))
    if "\0" not in name and (local := local_path(name)) is not None:
        name = os.path.abspath(local)  # a link may lead elsewhere on each host
    return ProcessGroup(
        name, jax.process_index(), count, store, options.timeout_seconds, purpose=purpose
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedSave:
    """A tree on its way to files. `of` and `capture` are quick; `write` may run in another thread.

    After `values.wait_captured` the caller may overwrite, donate or delete the arrays.
    """

    plan: WritePlan  # what this process writes
    values: HostValues
    manifest: Manifest | None
    options: WriteOptions
    mapped: MappedTensors | None = None  # what the files' tensors are made of, through a mapping
    mapping: LeafMapping | None = None
    card: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # the model card, by name
    # Storage and folder of the pieces that files are assembled from, if they exist already; else
    # this save writes them, and removes them when it is complete.
    pieces: tuple[Storage, str] | None = None
    verifying: VerifyingReader | None = None  # reads these pieces, if they have checksums

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
        """Plans a save, with a JSON value `custom`; for `dtypes` see `PreparedTree.parse`."""
        shards = ProcessShards()
        prepared = PreparedTree.parse(
            tree, options=options, shards=shards, dtypes=dtypes, mapping=mapping
        )
        prepared.check_concrete()
        plan, mapped = prepared.plan(mapping, options, shards)
        values = HostValues(prepared.values, plan.leaves)
        if custom is not None:  # checked, and copied, now: the caller may change it
            custom = parse_manifest(Manifest("hf", custom=custom).to_json(), file=MANIFEST).custom
        manifest: Manifest | None = None
        if mapped is None:
            manifest = prepared.manifest(plan, options, custom)
        elif custom is not None:
            manifest = Manifest("hf", custom=custom)
        card = {} if options.card is None else card_file(options.card)
        return cls(plan, values, manifest, options, mapped=mapped, mapping=mapping, card=card)

    def sidecar_files(self, target: PathLike) -> dict[str, bytes]:
        """Returns the side files of `WriteOptions`, as what is written makes them."""
        model, quantize = self.options.model, self.options.quantize
        files: dict[str, bytes] = {}
        if model is not None:
            own = model_files(model, code=self.options.code)
            files = described_files(own, self._tensors())
        files |= self.card
        if quantize is None or self.mapped is None:
            return files
        configured = functools.partial(quantize.configured, weights=self.mapped.plain)
        return configured_files(files, target, configured)

    def _tensors(self) -> dict[str, SavedTensor]:
        """Return what is in the files; of quantised weights what they are decoded to."""
        if self.mapped is not None:
            exprs, dtype = self.mapped.expressions, None
            if self.options.quantize is not None:
                exprs, dtype = self.mapped.plain, self.options.dtype
            return {name: SavedTensor.of(expr, dtype, expr) for name, expr in exprs.items()}
        tensors = (leaf.tensor for leaf in self.plan.leaves)
        return {t.name: SavedTensor(t.shape, t.dtype.numpy, t.name) for t in tensors}

    def capture(self) -> None:
        """Copies this process's shards to the host, as far as the memory budget allows."""
        parts = [part for file in self.plan.writes() for part in file.parts]
        if self.mapped is not None and self.plan.stored is None:
            held = self.mapped.held
            taken = {n for expr in self.mapped.expressions.values() for n in expr.sources()}
            parts = [
                self.values.box(place)
                for place in held.values()
                if self.plan.leaves[place[0]].tensor.name in taken
            ]
        self.values.capture(parts, self.options.memory_budget_bytes)

    def commit(
        self,
        path: PathLike,
        *,
        group: ProcessGroup,
        overwrite: bool,
        sidecar_files: Mapping[str, bytes],
    ) -> None:
        """Writes everything; the checkpoint appears at `path` when it is complete."""
        storage, target = open_storage(path, retries=self.options.retries)
        with (
            storage,
            commit_when_complete(
                storage,
                target,
                group=group,
                overwrite=overwrite,
                sidecar_files=sidecar_files,
                stem=self.options.stem,
                shared=[MANIFEST] * (self.manifest is not None) + [DIGESTS] * self.options.digests,
            ) as folder,
        ):
            self.write(
                folder.folder, group=group, storage=folder.storage, sidecar_files=sidecar_files
            )

    def write(
        self,
        path: str,
        *,
        group: ProcessGroup,
        storage: Storage,
        sidecar_files: Mapping[str, bytes],
    ) -> None:
        """Writes everything into the folder `path`, and waits until all processes have."""
        folder = CheckpointFolder(path, storage, group, self.options)
        try:
            with progress_callback(self.options.progress) as progress:
                save_id = folder.begin(self.manifest, sidecar_files, self.fingerprint())
                plan = self.plan.stamped(save_id)
                with folder.step("writing shards"):
                    write_parts(folder, plan, self.values, progress)
                with folder.step("putting files together"):
                    if plan.exchanges:
                        self._assemble(folder, plan, progress)
                    elif self.mapped is not None:
                        write_mapped(folder, self.mapped, self.values, progress)
                    folder.leave_digests()
        finally:
            folder.close()
            self.values.close()
        folder.complete(plan)
        nbytes = folder.bytes_written
        # Beside what loads report.
        jax.monitoring.record_scalar("/jax/orbax/write/safetensors/bytes_written", float(nbytes))
        logging.vlog(1, "Saved safetensors: %d bytes", nbytes)

    def _assemble(self, folder: CheckpointFolder, plan: WritePlan, progress: OnProgress) -> None:
        """Writes this process's files from the pieces of all processes."""
        assert plan.stored is not None
        pieces = Catalog.of_pieces(*self.pieces or (folder.storage, folder.path), plan.stored)
        if self.mapped is None:
            sources = array_sources(pieces, None)
        else:
            sources = leaf_sources(pieces, self.mapped.expressions)
        assemble_files(folder, plan, self.verifying or pieces.storage, sources, progress)
        if self.verifying is not None:
            share = slice(plan.process_index, None, plan.process_count)
            self.verifying.check(files=pieces.files, share=share)

    def fingerprint(self) -> Fingerprint | None:
        """Return what all processes must have to save; None of a single one."""
        plan = self.plan
        if plan.process_count == 1:
            return None
        digest = hashlib.sha256(repr((plan.files, plan.stored)).encode())
        tensors = [leaf.tensor for leaf in plan.leaves]
        parts = () if self.mapping is None else self.mapping.chain()
        rules = [described_rule(rule) for part in parts for rule in part.rules]
        digest.update(repr((tensors, rules)).encode())
        local = self.values.local_names
        description = f"{len(tensors)} tensors of {sum(t.nbytes for t in tensors):,} bytes"
        if local:
            description += f", of which {len(local)} are its own: {listed(map(repr, local), 3)}"
        return Fingerprint(
            digest.hexdigest(),
            description,
            "All processes must save the same tree of global arrays, through the same mapping. An"
            " array that each process made for itself (jnp.asarray, jax.random.key) is not global:"
            " make it a numpy array, or give it a sharding over all processes.",
        )
