"""Brings a published version to arrays, or to a local folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping as Dict
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from orbax_safetensors_layout.catalog import Catalog, is_safetensors_checkpoint
from orbax_safetensors_layout.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    InvalidArgumentError,
    PeerError,
    SafetensorsLayoutError,
    listed,
)
from orbax_safetensors_layout.format import (
    DIGESTS,
    MAIN_INDEX,
    MANIFEST,
    NewTensor,
    folder_version,
    index_bytes,
    parse_index,
    parse_version,
    version_text,
)
from orbax_safetensors_layout.load import LoadRequest, load_requested
from orbax_safetensors_layout.mapping import Mapping, TensorSpecs, fingerprint
from orbax_safetensors_layout.options import (
    MIB,
    PathLike,
    ReadOptions,
    given_or_default,
    require,
)
from orbax_safetensors_layout.pytree import named_leaves
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
from orbax_safetensors_layout.writing import (
    check_target,
    commit_when_complete,
    read_sidecar_files,
    write_small_files,
)

from .updated_arrays import are_published, updated
from .versioned_storage import check_whole, versioned
from .versions import PublishedVersions, VersionChain

_IDENTITY, _SIDECAR_FILES = "pulled", "pulled_files"  # in the index of a folder that was pulled
_NOT_HELD = (
    "Version %d is loaded anew: the arrays were pulled by another mapping or other names, or cast"
)
_BLOCK_BYTES = 8 * MIB
_THREADS = 4


class Pulled(NamedTuple):
    """A version that was pulled, and the tree of its arrays if one was asked for."""

    version: int
    tree: Any = None
    identity: str | None = None  # of the version; of two histories no two are equal
    # A digest of the mapping, and of the leaves' names, dtypes and shapes; empty if they were cast.
    form: str | None = None


def pull(
    folder: PathLike,
    into: Any = None,
    *,
    version: int | None = None,
    base: PathLike | None = None,
    mapping: Mapping | None = None,
    options: ReadOptions | None = None,
    donate: bool = False,
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
            Or what an earlier call returned: then the differences since are applied to its arrays,
            on the host, and leaves that they do not change stay as they are; nothing else is read.
            Arrays that are not what was published, or whose mapping does not save or is not that
            of the earlier call, and those before the last whole version are loaded anew.
        version: Its number; 0 is the model itself. None takes the newest; processes that load
            arrays then wait for each other, to take the same.
        base: The model that is version 0, as a folder or URL, where `publish` was given one.
        mapping: For arrays, as for `load`.
        options: How to read.
        donate: Give up the arrays of an earlier call, each as soon as its successor is there. After
            an error those that are left are of no use, but as the abstract tree of another call.

    Raises:
        CheckpointNotFoundError: There is no such version, or one that it needs is missing.
        CheckpointExistsError: The local folder has another checkpoint, not one that was pulled.
        InvalidArgumentError: The local folder is that of the versions, or of one.
        FormatError: A version is damaged, or follows another model; the folder is as it was.
    """
    options = given_or_default(options, ReadOptions)
    if options.verify:
        raise InvalidArgumentError("pull verifies what it applies: leave out ReadOptions.verify.")
    is_number = isinstance(version, int | np.integer) and type(version) is not bool
    require(
        version is None or (is_number and version >= 0),
        "version",
        "None or the number of a version",
        version,
    )
    access: Any = {"retries": options.retries, "cache": options.cache_folder}
    storage, path = open_storage(folder, **access)
    with storage, PublishedVersions(storage, path, base, **access) as versions:
        is_folder = isinstance(into, str | os.PathLike)
        held = into if isinstance(into, Pulled) else None
        if held is not None and held.tree is None:
            raise InvalidArgumentError("That version was pulled into a folder: give the folder.")
        if is_folder and mapping is not None:
            raise InvalidArgumentError("A folder gets tensors as they are: leave out mapping.")
        if is_folder:
            return _pull_folder(versions, version, os.fspath(into))
        chain: VersionChain | None = None
        if version is None or held is not None:
            with save_group(folder, options, "pull") as group:
                version = versions.agreed(group) if version is None else version
                with group.together("looking at the version"):
                    known = held and (held.version, held.identity)
                    chain = versions.chain(_number(versions, version), known)
                if held is not None:
                    new = _updated(held, chain, mapping, versions, group=group, donate=donate)
                    if new is not None:
                        return new
                    into, chain = held.tree, None

        published = TensorSpecs({})

        def open_version() -> Catalog:
            nonlocal chain, published
            if chain is None:
                chain = versions.chain(_number(versions, version))
            catalog = versions.catalog(chain)
            published = _specs(catalog)
            return catalog

        tree = load_requested(path, LoadRequest(into, mapping, None, options), open_version)
        assert chain is not None
        form = _form(tree, mapping) if are_published(tree, mapping, published) else ""
        return Pulled(chain.number, tree, chain.identity, form)


def _specs(catalog: Catalog) -> TensorSpecs:
    entries = catalog.all_entries()
    return TensorSpecs({n: (entry.shape, entry.dtype.numpy) for n, entry in entries.items()})


def _form(tree: Any, mapping: Mapping | None) -> str:
    """Return a digest of what the leaves of a tree are made of."""
    names = [
        (name, str(getattr(leaf, "dtype", "")), getattr(leaf, "shape", ()))
        for name, leaf in named_leaves(tree)[0]
    ]
    made_of = mapping and fingerprint(mapping)
    return hashlib.sha256(repr((made_of, names)).encode()).hexdigest()


def _is_held(held: Pulled, mapping: Mapping | None, versions: PublishedVersions) -> bool:
    """Whether differences apply to arrays: they are the tensors of their version, as they are."""
    if held.form is not None:
        return held.form == _form(held.tree, mapping)
    published = _specs(versions.catalog(versions.chain(held.version)))
    return are_published(held.tree, mapping, published)


def _number(versions: PublishedVersions, version: int | None) -> int:
    """Return the number of a version, or of the newest, which is there."""
    number = versions.newest(version)
    if not number and not versions.has_base:
        raise CheckpointNotFoundError(
            "no version was published yet",
            file=versions.folder,
            hint="Wait for one, or give base=.",
        )
    return number


def _updated(
    held: Pulled,
    chain: VersionChain,
    mapping: Mapping | None,
    versions: PublishedVersions,
    *,
    group: ProcessGroup,
    donate: bool,
) -> Pulled | None:
    """Return a version made from one that is held; None if all processes are to load it."""
    try:
        differences = chain.since(held.version, held.identity)
        is_known = differences is not None and (differences or held.form is not None)
        if is_known and not _is_held(held, mapping, versions):
            differences = None  # they would be looked for under other names, or in other bits
            logging.warning(_NOT_HELD, chain.number)
        has = "nothing" if differences is None else f"version {held.version}"
        agreed = chain.fingerprint()
        agreed = agreed._replace(digest=f"{has} {agreed.digest}", description=has)
        group.barrier("agreeing on the differences", agree=agreed)
        if differences is None:
            return None
        if not differences:
            return held
        tree = updated(held.tree, mapping, differences, group=group, donate=donate)
    except Exception as error:  # the others have a PeerError, and cannot know what it is of
        if isinstance(error, PeerError) and error.is_peer_gone:
            raise  # that process will not load with the others
        logging.warning("Version %d is loaded anew: %s", chain.number, error)
        return None
    return Pulled(chain.number, tree, chain.identity, held.form or _form(tree, mapping))


def _pull_folder(versions: PublishedVersions, version: int | None, into: str) -> Pulled:
    """Brings a local folder to a version: from the one that it has, or else from a whole one."""
    folder = local_path(into)
    if folder is None:
        raise InvalidArgumentError(f"pull takes a local folder, or a tree; not {into!r}.")
    folder = os.path.realpath(folder)
    finish_interrupted(folder)
    if isinstance(versions.storage, LocalStorage):
        place = os.path.relpath(folder, os.path.realpath(versions.folder)).split(os.sep)[0]
        if place == "." or folder_version(place) is not None:
            raise InvalidArgumentError(f"{into!r} is where versions are: give another folder.")
    if versions.is_base(folder):
        raise InvalidArgumentError(f"{into!r} is the model itself: give another folder.")
    held = _held_version(folder)
    known = held and (held.number, held.identity)
    number = _number(versions, version)
    chain = versions.chain(number, known)
    pulled = Pulled(number, identity=chain.identity)
    differences = None if held is None else chain.since(held.number, held.identity)
    if held is not None and differences is not None:
        try:
            with LocalStorage() as storage, Catalog.open(folder, storage=storage) as own:
                missing = {*held.sidecar_files} - storage.existing(own.path, held.sidecar_files)
                if missing:
                    problem = f"it lacks {listed(sorted(missing))}"
                    raise CheckpointNotFoundError(problem, file=folder)
                catalog = versioned(own, differences)
                catalog.all_entries()  # of files that are there, and as long as they should be
                if differences:
                    _write_version(catalog, chain, folder, held, {}, held.sidecar_files)
            return pulled
        except (FormatError, CheckpointNotFoundError) as error:
            logging.warning("%s is pulled anew: %s", folder, error)
        chain = versions.chain(number)
    catalog = versions.catalog(chain)
    # What was published comes along as it is; of a model that is only named, no code.
    is_own = chain.whole > 0
    files = read_sidecar_files(
        _root(catalog), storage=catalog.storage, code=is_own, with_card=is_own
    )
    try:
        if held is not None:  # its own files are replaced, whatever they became
            new = {name: data for name, data in files.items() if name not in held.sidecar_files}
            with LocalStorage() as storage:
                check_target(storage, folder, new, False, lambda path: False)
        _write_version(catalog, chain, folder, held, files)
    except CheckpointExistsError as error:
        error.hint = "Move them away, or give another folder."
        raise
    return pulled


def _root(catalog: Catalog) -> str:
    is_file = catalog.files == (catalog.path,)
    return os.path.dirname(catalog.path) if is_file else catalog.path


class _Held(NamedTuple):
    """The version that a folder says was pulled into it."""

    number: int
    identity: str
    files: frozenset[str]
    sidecar_files: tuple[str, ...]


def _held_version(folder: str) -> _Held | None:
    """Return the version that was pulled into a local folder; None if it has no checkpoint."""
    with LocalStorage() as storage:
        if storage.is_file(file := join(folder, MAIN_INDEX)):
            try:
                index = parse_index(read_file(storage, file, "the index"), file=file)
            except FormatError as error:
                raise _foreign(folder, str(error)) from error
            number = parse_version(index.metadata.get("version"))
            names = index.metadata.get(_SIDECAR_FILES, ())
            if number is not None and _IDENTITY in index.metadata and isinstance(names, list):
                identity = str(index.metadata[_IDENTITY])
                return _Held(number, identity, frozenset(index.files), tuple(map(str, names)))
        if is_safetensors_checkpoint(folder, storage=storage):
            raise _foreign(folder, "another checkpoint")
    return None


def _foreign(folder: str, found: str) -> SafetensorsLayoutError:
    return CheckpointExistsError(
        "the folder has a checkpoint that was not pulled",
        file=folder,
        expected="a version, or no checkpoint",
        found=found,
        hint="Give another folder, or remove this one if nothing else needs it; that of a model is"
        " what base= takes.",
    )


def _write_version(
    catalog: Catalog,
    chain: VersionChain,
    folder: str,
    held: _Held | None,
    sidecar_files: Dict[str, bytes],
    own_files: Iterable[str] = (),
) -> None:
    """Writes a version's files into a local folder, in place of those of an earlier one.

    `own_files` are side files that the folder has from that one. What others put there stays.
    """
    check_whole(catalog)
    root = _root(catalog)
    names = {file: file.removeprefix(f"{root.rstrip('/')}/") for file in catalog.files}
    files: dict[str, list[NewTensor]] = {name: [] for name in names.values()}
    for entry in catalog.all_entries().values():
        files[names[entry.file]].append(NewTensor(entry.name, entry.dtype, entry.shape))
    metadata = {
        "version": version_text(chain.number),
        _IDENTITY: chain.identity,
        _SIDECAR_FILES: [*own_files, *sidecar_files],
    }
    replaced = {*files, MAIN_INDEX, MANIFEST, DIGESTS}
    if held is not None:
        replaced |= {*held.files, *held.sidecar_files} - {*own_files}
    folders = {f"{folder}/" for name in replaced for folder in _folders_of(name)}
    with (
        LocalStorage() as storage,
        commit_when_complete(
            storage,
            folder,
            group=ProcessGroup.alone(),
            overwrite=held is not None,
            sidecar_files=sidecar_files,
            replaces=lambda name: name in replaced or name in folders,
        ) as place,
    ):
        new = place.folder
        if (manifest := catalog.manifest()) is not None:
            sidecar_files = {MANIFEST: manifest.to_json(), **sidecar_files}
        write_small_files(storage, new, sidecar_files, durable=True)
        for file in catalog.files:
            size = catalog.storage.size(file)
            storage.make_folder(os.path.dirname(join(new, names[file])))
            with (
                new_file(storage, join(new, names[file]), size, durable=True) as writer,
                Workers(_THREADS, "safetensors-pull", catalog.storage.interrupt) as workers,
            ):  # no thread writes to a file that is closed
                for start in range(0, size, _BLOCK_BYTES):
                    stop = min(start + _BLOCK_BYTES, size)
                    workers.submit(_copy, catalog, file, start, stop, writer)
                workers.join()
        write_file(
            storage, join(new, MAIN_INDEX), index_bytes([*files.items()], metadata), durable=True
        )
        storage.flush_folder(new)


def _folders_of(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _copy(catalog: Catalog, file: str, start: int, stop: int, writer: FileWriter) -> None:
    block = memoryview(bytearray(stop - start))
    catalog.storage.read_into(file, start, [block])
    writer.write_at(start, [block])
