"""Brings a published version to arrays, or to a local folder."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
from absl import logging

from orbax_safetensors_layout.catalog import Catalog, is_safetensors_checkpoint
from orbax_safetensors_layout.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    InvalidArgumentError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.format import (
    MAIN_INDEX,
    NewTensor,
    index_bytes,
    parse_index,
    parse_version,
    version_text,
)
from orbax_safetensors_layout.load import LoadRequest, load_requested
from orbax_safetensors_layout.mapping import Mapping
from orbax_safetensors_layout.options import (
    MIB,
    PathLike,
    ReadOptions,
    WriteOptions,
    given_or_default,
)
from orbax_safetensors_layout.runtime import ProcessGroup, Workers
from orbax_safetensors_layout.save import save_group
from orbax_safetensors_layout.storage import (
    FileWriter,
    LocalStorage,
    finish_interrupted,
    join,
    local_path,
    new_file,
    open_storage,
    read_file,
    write_file,
)
from orbax_safetensors_layout.writing import commit_when_complete, read_sidecar_files

from .versions import PublishedVersions, VersionChain, versioned

_BLOCK_BYTES = 8 * MIB
_THREADS = 4


class Pulled(NamedTuple):
    """A version that was pulled, and the tree of its arrays if one was asked for."""

    version: int
    tree: Any = None


def pull(
    folder: PathLike,
    into: Any = None,
    *,
    version: int | None = None,
    base: PathLike | None = None,
    mapping: Mapping | None = None,
    options: ReadOptions | None = None,
) -> Pulled:
    """Brings a version that `publish` wrote, by default the newest, to arrays or to a folder.

    It is the newest whole version up to this one, with the differences after it applied; each
    tensor that they change is held against the checksum of what was published. A folder that has
    one of these versions already takes the differences alone.

    Args:
        folder: Of all versions; or its URL.
        into: As for `load`, a tree for the arrays or nothing: each process reads what its own
            shards need, and of tensors that changed the whole. Or a local folder, which gets the
            version's files, all at once when they are complete; one process of a host calls this.
        version: Its number; 0 is the model itself. None takes the newest; processes that load
            arrays then wait for each other, to take the same.
        base: The model that is version 0, as a folder or URL, where `publish` was given one.
        mapping: For arrays, as for `load`.
        options: How to read.

    Raises:
        CheckpointNotFoundError: There is no such version, or one that it needs is missing.
        CheckpointExistsError: The local folder has another checkpoint, not a version.
        FormatError: A version is damaged, or follows another model; the folder is as it was.
    """
    options = given_or_default(options, ReadOptions)
    if options.verify:
        raise InvalidArgumentError("pull verifies what it applies: leave out ReadOptions.verify.")
    storage, path = open_storage(folder, retries=options.retries, cache=options.cache_folder)
    with storage:
        versions = PublishedVersions(storage, path)
        is_folder = isinstance(into, str | os.PathLike)
        if is_folder and mapping is not None:
            raise InvalidArgumentError("A folder gets tensors as they are: leave out mapping.")
        if is_folder or version is not None or jax.process_count() == 1:
            number = versions.newest(version)
        else:
            with save_group(folder, WriteOptions(), "pull") as group:
                number = versions.agreed(group)
        if not number and base is None:
            hint = "Wait for one, or give base=."
            raise CheckpointNotFoundError("no version was published yet", file=path, hint=hint)
        chain = versions.chain(number)
        if is_folder:
            _pull_folder(versions, chain, base, os.fspath(into))
            return Pulled(number)
        catalog = versions.catalog(chain, base)
        return Pulled(number, load_requested(catalog, LoadRequest(into, mapping, None, options)))


def _pull_folder(
    versions: PublishedVersions, chain: VersionChain, base: PathLike | None, into: str
) -> None:
    """Brings a local folder to a version: from the one that it has, or else from a whole one."""
    folder = local_path(into)
    if folder is None:
        raise InvalidArgumentError(f"pull takes a local folder, or a tree; not {into!r}.")
    folder = os.path.realpath(folder)
    finish_interrupted(folder)
    held = _held_version(folder)
    if held == chain.number:
        return
    differences = None if held is None else chain.since(held)
    if differences is not None:
        try:
            with LocalStorage() as storage, Catalog.open(folder, storage=storage) as own:
                _write_version(versioned(own, differences), chain.number, folder)
                return
        except FormatError as error:
            logging.warning("%s is pulled anew, from version %d: %s", folder, chain.whole, error)
    catalog = versions.catalog(chain, base)
    try:
        _write_version(catalog, chain.number, folder)
    finally:
        if not chain.whole:
            catalog.close()


def _held_version(folder: str) -> int | None:
    """Return the version that a local folder has; None if it has none, and no checkpoint."""
    with LocalStorage() as storage:
        if storage.is_file(file := join(folder, MAIN_INDEX)):
            try:
                index = parse_index(read_file(storage, file, "the index"), file=file)
            except FormatError as error:
                raise _foreign(folder, str(error)) from error
            if (number := parse_version(index.metadata.get("version"))) is not None:
                return number
        if is_safetensors_checkpoint(folder, storage=storage):
            raise _foreign(folder, "another checkpoint")
    return None


def _foreign(folder: str, found: str) -> SafetensorsLayoutError:
    return CheckpointExistsError(
        "the folder has a checkpoint that was not pulled",
        file=folder,
        expected="a version, or no checkpoint",
        found=found,
        hint="Give another folder; that of a model is what base= takes.",
    )


def _write_version(catalog: Catalog, number: int, folder: str) -> None:
    """Writes a version's files into a local folder, in place of an earlier one."""
    if catalog.layout != "hf":
        raise FormatError(
            "versions have whole tensors",
            file=catalog.path,
            expected="layout 'hf'",
            found=f"layout {catalog.layout!r}",
            hint="Put the tensors together first, with osl.consolidate.",
        )
    root = os.path.dirname(catalog.path) if catalog.files == (catalog.path,) else catalog.path
    names = {file: file.removeprefix(f"{root.rstrip('/')}/") for file in catalog.files}
    files: dict[str, list[NewTensor]] = {name: [] for name in names.values()}
    for entry in catalog.all_entries().values():
        files[names[entry.file]].append(NewTensor(entry.name, entry.dtype, entry.shape))
    sidecar_files = read_sidecar_files(root, storage=catalog.storage)
    metadata = {"version": version_text(number)}
    with (
        LocalStorage() as storage,
        commit_when_complete(
            storage,
            folder,
            group=ProcessGroup.alone(),
            overwrite=True,
            sidecar_files=sidecar_files,
        ) as place,
    ):
        new = place.folder
        for name, data in sidecar_files.items():
            write_file(storage, join(new, name), data, durable=True)
        with Workers(_THREADS, "safetensors-pull", catalog.storage.interrupt) as workers:
            for file in catalog.files:
                size = catalog.storage.size(file)
                storage.make_folder(os.path.dirname(join(new, names[file])))
                with new_file(storage, join(new, names[file]), size, durable=True) as writer:
                    for start in range(0, size, _BLOCK_BYTES):
                        stop = min(start + _BLOCK_BYTES, size)
                        workers.submit(_copy, catalog, file, start, stop, writer)
                    workers.join()
        write_file(
            storage, join(new, MAIN_INDEX), index_bytes([*files.items()], metadata), durable=True
        )
        storage.flush_folder(new)


def _copy(catalog: Catalog, file: str, start: int, stop: int, writer: FileWriter) -> None:
    block = memoryview(bytearray(stop - start))
    catalog.storage.read_into(file, start, [block])
    writer.write_at(start, [block])
