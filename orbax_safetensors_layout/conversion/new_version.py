"""Publishes a model that changes, version after version, as differences to the one before."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Iterator, Mapping as Dict
from typing import Any, NamedTuple

import numpy as np

from orbax_safetensors_layout.catalog import Catalog, read_header
from orbax_safetensors_layout.errors import (
    CheckpointExistsError,
    InvalidArgumentError,
    MappingError,
    MismatchError,
    UnsupportedDtypeError,
    listed,
)
from orbax_safetensors_layout.format import (
    CHECKSUM,
    DTYPES,
    HISTORY,
    MAIN_INDEX,
    SUFFIX,
    DifferenceFormat,
    DType,
    Manifest,
    NewTensor,
    TensorLeaf,
    checksum,
    encoded_difference,
    index_bytes,
    lay_out,
    leaves,
    version_folder,
    version_text,
)
from orbax_safetensors_layout.mapping import LiveTensors, Mapping, unapplied
from orbax_safetensors_layout.options import (
    GIB,
    PathLike,
    WriteOptions,
    given_or_default,
    require,
)
from orbax_safetensors_layout.runtime import Budget, ProcessGroup, Workers, frozen_heap
from orbax_safetensors_layout.save import PreparedSave, save_group
from orbax_safetensors_layout.storage import (
    LocalStorage,
    Storage,
    finish_interrupted,
    join,
    new_file,
    open_storage,
    write_file,
)
from orbax_safetensors_layout.writing import commit_when_complete

from .updated_arrays import as_stored, bytes_of, check_shared, gathered
from .versions import PublishedVersions, VersionChain

_COMPARED_BYTES = 2 * GIB
_WHOLE = "Publish versions whole, with whole_every=1."


def publish(
    folder: PathLike,
    tree: Any,
    *,
    mapping: Mapping | None = None,
    base: PathLike | None = None,
    whole_every: int = 10,
    options: WriteOptions | None = None,
) -> int:
    """Writes the next version of a model, as differences to the one before; returns its number.

    Every process of the program calls this with the same arguments. A version is a folder
    `weight_v000001` and so on, which appears when it is complete; docs/publishing.md has the
    format, which is that of slime and SGLang. What did not change by a bit is not written. Each
    process compares and writes about its share of the tensors, for which tensors that several
    processes hold are gathered, one mapping rule's at a time.

    Args:
        folder: Of all versions; or its URL.
        tree: The model, as for `save`: arrays alone, with a mapping `jax.Array`s.
        mapping: What the leaves are made of, as for `load`.
        base: The model that whoever pulls has from the start, as a folder or URL, which counts as
            version 0: the first version is then differences to it. Without one it is whole.
        whole_every: Each version of such a number is whole. A reader takes the newest whole one
            and the differences after it.
        options: How to write. Whole versions have side files of `WriteOptions.model`.

    Raises:
        MismatchError: The tree has other tensors than the version before, or Python values.
        FormatError: A version before this one is damaged.
        CheckpointExistsError: Another program publishes into the folder, or was stopped.
        StorageError: Another one does so at this moment; or a read or write failed.
        PeerError: Another process failed.
    """
    options = given_or_default(options, WriteOptions)
    _check_arguments(whole_every, options)
    with frozen_heap(), save_group(folder, options, "publish") as group:
        storage, path = open_storage(folder, retries=options.retries)
        published = PublishedVersions(storage, path, base, retries=options.retries)
        with storage, _alone(), published as versions:
            before = versions.agreed(group)
            if group.is_leader and isinstance(storage, LocalStorage):
                finish_interrupted(os.path.realpath(versions.path(before)))
            number = before + 1
            prepared = PreparedSave.of(tree, options, mapping=mapping)
            tensors = _tensors(prepared)
            _check_arrays(prepared)
            if whole_every > 1:
                _check_comparable(tree, mapping, tensors)
            if number % whole_every == 0 or not (before or base is not None):
                metadata = {"version": version_text(number), HISTORY: uuid.uuid4().hex}
                plan = dataclasses.replace(prepared.plan, index_metadata=metadata)
                whole = dataclasses.replace(prepared, plan=plan)
                target = join(os.fsdecode(folder), version_folder(number))
                sidecar_files = whole.sidecar_files(target) if group.is_leader else {}
                whole.commit(target, group=group, overwrite=False, sidecar_files=sidecar_files)
                return number
            group.barrier("agreeing on what is published", agree=prepared.fingerprint())
            with group.together("looking at the version before"):
                chain = versions.chain(before)
            group.barrier("agreeing on the version before", agree=chain.fingerprint())
            catalog = versions.catalog(chain)
            _check_before(prepared, tensors, catalog)
            check_shared(prepared.values.named())
            values = _values(tree, mapping, prepared)
            _publish_differences(versions, chain, catalog, tensors, values, group, options)
    return number


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    try:
        yield
    except CheckpointExistsError as error:
        error.hint = (
            "Another program publishes this version, or was stopped while it did: if none does,"
            " remove the folder, and publish again."
        )
        raise


def _check_arguments(whole_every: int, options: WriteOptions) -> None:
    require(
        type(whole_every) is int and whole_every > 0,
        "whole_every",
        "a positive integer",
        whole_every,
    )
    usual = dataclasses.replace(options, layout="hf", file_stem="model", quantize=None, dtype=None)
    if options != usual:
        raise InvalidArgumentError(
            "Versions hold whole tensors as they are in the tree, in files of the usual names:"
            " leave out WriteOptions.layout, file_stem, quantize and dtype; cast in the mapping."
        )


def _check_arrays(prepared: PreparedSave) -> None:
    values = {} if prepared.manifest is None else prepared.manifest.values()
    if values:
        raise MismatchError(
            f"{len(values)} leaves are Python values: {listed(map(repr, values))}",
            tensor=next(iter(values)),
            expected="arrays alone, since differences are of tensors",
            found=type(next(iter(values.values()))).__name__,
            hint="Leave it out of the tree, or make it a numpy array.",
        )


def _check_comparable(tree: Any, mapping: Mapping | None, tensors: Dict[str, NewTensor]) -> None:
    """Raises for what no differences can be of, also where the first version is whole."""
    odd = [name for name, tensor in tensors.items() if tensor.dtype.bits % 8]
    if odd:
        raise UnsupportedDtypeError(
            "differences are of whole bytes",
            tensor=odd[0],
            expected="a dtype of 8 bits or more, or of 4 that is stored one a byte",
            found=tensors[odd[0]].dtype.code,
            hint=f"Or cast it. {_WHOLE}",
        )
    if mapping is not None:
        try:
            parts = unapplied(mapping, tree)
        except MappingError as error:
            error.hint = f"{error.hint or ''} {_WHOLE}".strip()
            raise
        for part in parts:
            _check_devices(part)


def _check_devices(part: LiveTensors) -> None:
    """Raises if leaves that are computed with together are on different devices."""
    names = [name for group in part.saves for name in group.sources]
    first = part.arrays[names[0]].sharding.device_set if names else set()
    for name in names[1:]:
        devices = part.arrays[name].sharding.device_set
        if devices != first:
            raise MismatchError(
                "leaves that are parts of the same tensors are on different devices",
                tensor=name,
                expected=f"those of {names[0]!r}, {len(first)} devices",
                found=f"{len(devices)} devices",
                hint=f"Put them on the same devices. Or: {_WHOLE}",
            )


def _tensors(prepared: PreparedSave) -> dict[str, NewTensor]:
    """Return the tensors of a tree by name."""
    if prepared.mapped is None:
        return {leaf.tensor.name: leaf.tensor for leaf in prepared.plan.leaves}
    return {tensor.name: tensor for _, _, members in prepared.plan.files for tensor in members}


def _check_before(prepared: PreparedSave, tensors: Dict[str, NewTensor], catalog: Catalog) -> None:
    """Raises if the tensors of a tree are others than those of the version before."""
    entries = catalog.all_entries()
    if names := sorted(tensors.keys() ^ entries.keys()):
        raise MismatchError(
            "the tree has other tensors than the version before",
            file=catalog.path,
            tensor=names[0],
            expected=f"its {len(entries)} tensors",
            found=f"{len(tensors)} tensors, of which some are in one alone: {listed(names)}",
            hint=_WHOLE,
        )
    problems = [
        MismatchError(
            "a tensor is another one than in the version before",
            file=entry.file,
            tensor=name,
            expected=f"{entry.dtype.code} of shape {entry.shape}",
            found=f"{tensors[name].dtype.code} of shape {tensors[name].shape}",
        )
        for name, entry in entries.items()
        if (entry.dtype.code, entry.shape) != (tensors[name].dtype.code, tensors[name].shape)
    ]
    if not problems:  # of equal bits that are read as something else
        own = _meanings(prepared.manifest, {n: t.dtype for n, t in tensors.items()})
        before = _meanings(catalog.manifest(), {n: e.dtype for n, e in entries.items()})
        problems = [
            MismatchError(
                "a leaf is of another type than in the version before",
                file=catalog.path,
                tensor=name,
                expected=before[name],
                found=own[name],
            )
            for name in tensors
            if own[name] != before[name]
        ]
    if problems:
        raise MismatchError.collect(problems, "tensors differ", hint=_WHOLE)


def _meanings(manifest: Manifest | None, dtypes: Dict[str, DType]) -> dict[str, str]:
    """Return what tensors are read as: numbers of a dtype, or PRNG keys."""
    meanings = {name: dtype.numpy.name for name, dtype in dtypes.items()}
    if manifest is not None:
        meanings |= {name: dtype.numpy.name for name, dtype in manifest.dtypes().items()}
        named = () if manifest.tree is None else leaves(manifest.tree)
        keys = (leaf for leaf in named if isinstance(leaf, TensorLeaf) and leaf.key_impl)
        meanings |= {leaf.tensor: f"PRNG keys of {leaf.key_impl}" for leaf in keys}
    return meanings


def _values(tree: Any, mapping: Mapping | None, prepared: PreparedSave) -> Iterator[Dict[str, Any]]:
    """Yield tensors by name, those of a few leaves at a time; the same on all processes."""
    if mapping is not None:
        for tensors in unapplied(mapping, tree):
            yield tensors.values()
        return
    for name, value in prepared.values.named():
        yield {name: value}


class _Changed(NamedTuple):
    """A tensor that changed."""

    data: bytes  # its difference, encoded
    checksum: str  # of what it is now


def _publish_differences(
    versions: PublishedVersions,
    before: VersionChain,
    catalog: Catalog,
    tensors: Dict[str, NewTensor],
    values: Iterator[Dict[str, Any]],
    group: ProcessGroup,
    options: WriteOptions,
) -> None:
    """Compares tensors with those of the version before, and writes those that differ."""
    number = before.number + 1
    kind = DifferenceFormat(before.number, "xor", CHECKSUM, before.identity)
    owners = _owners(tensors, group.process_count)
    changed: dict[str, _Changed] = {}
    entries = catalog.all_entries()
    budget = Budget(options.memory_budget_bytes or _COMPARED_BYTES)  # of tensors, new and old

    def compare(name: str, new: np.ndarray) -> None:
        entry = entries[name]
        old = np.empty(entry.nbytes, np.uint8)
        if entry.nbytes:
            catalog.storage.read_into(entry.file, entry.start, [old.data])
        data = encoded_difference(old, new)
        if data is not None:
            changed[name] = _Changed(data, checksum(kind.checksum, new))
        budget.release(2 * new.nbytes)

    with commit_when_complete(
        versions.storage, versions.path(number), group=group, overwrite=False, sidecar_files={}
    ) as place:
        storage, folder = place.storage, place.folder
        with (
            group.together("comparing tensors"),
            Workers(options.writers, "safetensors-publish", storage.interrupt) as workers,
        ):
            error: Exception | None = None
            for members in values:
                for name, value in members.items():
                    host = gathered(value, group)
                    if owners[name] != group.process_index or error is not None:
                        continue
                    try:
                        new = bytes_of(np.ascontiguousarray(as_stored(host)))
                        budget.reserve(2 * new.nbytes, workers.progress)
                        workers.submit(compare, name, new)
                    except Exception as problem:
                        if group.process_count == 1:
                            raise
                        error = problem  # the others wait for this process in the next gathers
            if error is not None:
                raise error
            workers.join()
        with group.together("writing differences"):
            share = f"{group.process_index + 1:05}-of-{group.process_count:05}"
            _write(storage, folder, f"model-{share}{SUFFIX}", changed, options)
        with group.together("looking at what was written"):
            storage.check_written(folder)
        with group.together("completing the version"):
            if group.is_leader:
                index = index_bytes(_written(storage, folder), kind.metadata(number))
                write_file(storage, join(folder, MAIN_INDEX), index, durable=options.fsync)
                if options.fsync:
                    storage.flush_folder(folder)


def _owners(tensors: Dict[str, NewTensor], processes: int) -> dict[str, int]:
    """Share tensors out to processes, about as many bytes to each."""
    loads = [0] * processes
    owners: dict[str, int] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += tensors[name].nbytes
    return owners


def _write(
    storage: Storage, folder: str, name: str, changed: Dict[str, _Changed], options: WriteOptions
) -> None:
    """Writes a process's file; none if nothing of its share changed."""
    if not changed:
        return
    dtype: DType = DTYPES["U8"]
    tensors = [NewTensor(name, dtype, (len(tensor.data),)) for name, tensor in changed.items()]
    checksums = {name: tensor.checksum for name, tensor in changed.items()}
    layout = lay_out(name, tensors, checksums)
    with new_file(storage, join(folder, name), layout.size, durable=options.fsync) as file:
        file.write_at(0, [memoryview(bytearray(layout.header))])
        for entry in layout.tensors:
            file.write_at(entry.start, [memoryview(bytearray(changed[entry.name].data))])


def _written(storage: Storage, folder: str) -> list[tuple[str, list[NewTensor]]]:
    """Return the files that all processes have written, and their tensors."""
    files = []
    for name in storage.list(folder):
        if name.endswith(SUFFIX):
            header = read_header(storage, join(folder, name))
            entries = header.tensors.values()
            files.append((name, [NewTensor(e.name, e.dtype, e.shape) for e in entries]))
    return files
