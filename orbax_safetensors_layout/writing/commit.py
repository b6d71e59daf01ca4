"""A save that becomes visible when it is complete; how, is a property of its storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import CheckpointExistsError, SafetensorsLayoutError
from orbax_safetensors_layout.format import DIGESTS, INDEX_SUFFIX, MANIFEST, SUFFIX
from orbax_safetensors_layout.plan import PIECES_FOLDER
from orbax_safetensors_layout.runtime import ProcessGroup
from orbax_safetensors_layout.storage import Publication, Storage, join, read_range


def publication_of(
    storage: Storage, target: str, *, overwrite: bool, documents: Collection[str] = ()
) -> Publication:
    """How a checkpoint comes to stand at a folder.

    Args:
        storage: Where the folder is.
        target: The folder.
        overwrite: Whether a checkpoint that stands there is replaced.
        documents: Names of more files that come with it.
    """

    def rank(name: str) -> int | None:
        return 0 if name in documents else appearance_rank(name)

    return storage.publication(target, overwrite=overwrite, rank=rank, scratch=(PIECES_FOLDER,))


def appearance_rank(name: str) -> int | None:
    """When a file of a checkpoint appears; None for a file that belongs to none.

    The manifest comes first, the index last. So every part of a save that a crash leaves is refused
    as incomplete: pieces by the manifest that names them all, numbered files by each other. With
    the index missing alone, nothing of the checkpoint is.

    Example:
        >>> names = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
        >>> [appearance_rank(name) for name in (MANIFEST, *names, "config.json")]
        [0, 1, 2, None]
    """
    if name == MANIFEST:
        return 0
    if name.endswith(INDEX_SUFFIX):
        return 2
    return 1 if name.endswith(SUFFIX) or name == DIGESTS else None


def publish(
    publication: Publication,
    write: Callable[[str], object],
    *,
    group: ProcessGroup,
    storage: Storage,
    overwrite: bool,
    documents: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a checkpoint, and puts it in its place when it is complete.

    Args:
        publication: Its place.
        write: Writes everything into a folder, and waits until all processes have.
        group: The processes.
        storage: Where the folder is.
        overwrite: Whether a checkpoint that stands there is replaced.
        documents: More files that come with it, by name.

    Raises:
        CheckpointExistsError: One stands there, or another file of such a name, without
            `overwrite`.
        StorageError: A step failed.
        PeerError: Another process failed.
    """
    error: BaseException | None = None
    try:
        _publish(publication, write, group, storage, overwrite, documents or {})
    except BaseException as problem:
        error = problem
        group.abandon()
        if group.is_leader:
            group.await_others()
    if group.is_leader:
        publication.end()
    group.barrier("publishing the checkpoint", error)


def _publish(
    publication: Publication,
    write: Callable[[str], object],
    group: ProcessGroup,
    storage: Storage,
    overwrite: bool,
    documents: Mapping[str, bytes],
) -> None:
    error: BaseException | None = None
    try:
        if group.is_leader:
            publication.begin()
            _check_target(storage, publication.target, overwrite)
            if not overwrite:
                check_documents(storage, publication.target, documents)
            publication.prepare()
    except BaseException as problem:
        error = problem
    group.barrier("preparing the folder", error)
    write(publication.folder)
    if group.is_leader:
        publication.publish()


def _check_target(storage: Storage, target: str, overwrite: bool) -> None:
    check_is_folder(target, is_file=storage.is_file(target))
    if not overwrite and is_safetensors_checkpoint(target, storage=storage):
        raise CheckpointExistsError(
            "a safetensors checkpoint stands there already",
            file=target,
            hint="Pass overwrite=True to replace it.",
        )


def check_documents(storage: Storage, folder: str, documents: Mapping[str, bytes]) -> None:
    """Refuses files that would replace others of their names.

    Args:
        storage: Where the folder is.
        folder: The folder, which need not exist.
        documents: The files, by name.

    Raises:
        CheckpointExistsError: Others stand there.
        StorageError: They can not be read.
    """
    present = set(storage.list(folder)) if documents else set()
    others = []
    for name in sorted(present.intersection(documents)):
        file, data = join(folder, name), documents[name]
        size = storage.size(file)
        if size != len(data) or read_range(storage, file, 0, size) != data:
            others.append(name)
    if others:
        raise CheckpointExistsError(
            f"other files of these names stand there: {others}",
            file=folder,
            hint="Pass overwrite=True (--overwrite) to replace them.",
        )


def check_is_folder(target: str, *, is_file: bool) -> None:
    """Refuses a target that is no folder, or is called as if it were none.

    Args:
        target: Its path.
        is_file: Whether a file stands there.

    Raises:
        SafetensorsLayoutError: It is called like a file.
        CheckpointExistsError: It is one.
    """
    if target.endswith(SUFFIX):
        raise SafetensorsLayoutError(
            "a checkpoint is saved as a folder",
            file=target,
            hint=f"Give the folder; the file in it is called 'model{SUFFIX}'.",
        )
    if is_file:
        raise CheckpointExistsError("the path is a file", file=target, expected="a folder")
