"""The commit of a save, which becomes visible when it is complete, and the side files with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping

from orbax_safetensors_layout.catalog import checkpoint_beside, replaced_files
from orbax_safetensors_layout.errors import (
    CheckpointExistsError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.format import DIGESTS, INDEX_SUFFIX, MANIFEST, SUFFIX
from orbax_safetensors_layout.plan import PIECES_FOLDER
from orbax_safetensors_layout.runtime import ProcessGroup
from orbax_safetensors_layout.storage import NewFolder, Storage, join, read_range


def appearance_rank(name: str) -> int | None:
    """Return when a file of a checkpoint appears; None for a file that belongs to none.

    So every part of a save that a crash leaves is rejected as incomplete: pieces by the manifest
    that names them all, numbered files by each other. The index alone may be missing.
    """
    if name == MANIFEST:
        return 0
    if "/" in name:
        return None
    if name.endswith(INDEX_SUFFIX):
        return 2
    return 1 if name.endswith(SUFFIX) or name == DIGESTS else None


@contextlib.contextmanager
def commit_when_complete(
    storage: Storage,
    target: str,
    *,
    group: ProcessGroup,
    overwrite: bool,
    sidecar_files: Mapping[str, bytes],
    stem: str = "model",
    shared: Collection[str] = (),
    replaces: Callable[[str], bool] | None = None,
) -> Iterator[NewFolder]:
    """Yields the folder to write a checkpoint into; leaving the block commits it to `target`.

    All processes enter the block, and leave it when all have written or one has failed. The side
    files of the leader count. Of the target the files go that `replaces` accepts, by default those
    of the checkpoint that is there (see `replaced_files`). Without `overwrite` such a checkpoint,
    or another file of a name of this one, is a `CheckpointExistsError`, also one that comes while
    this one is written. So are `shared` files, which speak of a whole folder, beside a model.
    """
    present: set[str] = set()  # side files that are there already, and stay whatever happens
    inner = {f"{name.rpartition('/')[0]}/" for name in sidecar_files if "/" in name}

    def rank(name: str) -> int | None:
        if name in sidecar_files or name in inner:
            return None if name in present else 0
        if replaces is None or not replaces(name):
            return None
        return appearance_rank(name) or 0

    new_folder = storage.new_folder(
        target, overwrite=overwrite, rank=rank, scratch=(PIECES_FOLDER,)
    )

    def exists(folder: str) -> bool:
        names = storage.list(folder)
        weights = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))]
        beside = [name for name in weights if rank(name) is None]
        speaks = any(name in names and rank(name) is not None for name in (MANIFEST, DIGESTS))
        return len(beside) < len(weights) or (bool(beside) and speaks)

    def check() -> None:
        if other := checkpoint_beside(storage, new_folder.target):
            hint = "Save to another folder, or remove it first."
            if other != new_folder.target:
                ours = any(name.endswith(SUFFIX) for name in storage.list(other))
                item = ", or with overwrite=True into that of the item" if ours else ""
                hint = f"Save to another folder{item}, or remove the step first."
            raise CheckpointExistsError(
                "Orbax made a checkpoint there, which would stay beside this one",
                file=other,
                expected="a folder without one, also with overwrite=True",
                hint=hint,
            )
        present.update(check_target(storage, new_folder.target, sidecar_files, overwrite, exists))

    error: BaseException | None = None
    try:
        try:
            if group.is_leader:
                new_folder.begin()
                if replaces is None:
                    replaces = replaced_files(storage, new_folder.target, stem)
                if others := [name for name in shared if rank(name) is None]:
                    raise CheckpointExistsError(
                        f"the folder has a model, which {others} would speak of as well",
                        file=new_folder.target,
                        expected="a folder without other weights",
                        hint="Save to a folder of its own; or, beside a model, with osl.peft.save"
                        " and without digests=True.",
                    )
                check()
                new_folder.prepare()
        except BaseException as problem:
            error = problem
        new_folder.folder = group.barrier(
            "preparing the folder", error, broadcast=new_folder.folder
        )
        yield new_folder
        if storage.uploads:
            with group.together("sending the files"):
                new_folder.send(group.process_index, group.process_count)
        if group.is_leader:
            if new_folder.folder != new_folder.target:
                check()
            new_folder.commit()
    except BaseException as problem:
        error = problem
        if group.is_leader:
            group.fail(problem)  # others may be waiting for it at the end already
        group.abandon()
    try:
        if error is not None and group.is_leader:
            group.await_others()
    finally:
        if group.is_leader:
            new_folder.end()
    group.barrier("committing the checkpoint", error)


def check_target(
    storage: Storage,
    target: str,
    sidecar_files: Mapping[str, bytes],
    overwrite: bool,
    is_checkpoint: Callable[[str], bool],
) -> set[str]:
    """Raises where no checkpoint can be, or one or other side files would be overwritten.

    Returns the names of side files that are there already, and equal. A folder in the place of one,
    or a file or link in the place of its folder, is not replaced, whatever `overwrite` is.
    """
    if target.endswith(SUFFIX):
        raise SafetensorsLayoutError(
            "a checkpoint is saved as a folder",
            file=target,
            hint=f"Give the folder; the file in it is called 'model{SUFFIX}'.",
        )
    if storage.is_file(target):
        raise CheckpointExistsError("the path is a file", file=target, expected="a folder")
    _check_kinds(storage, target, sidecar_files)
    if overwrite:
        return set()
    if is_checkpoint(target):
        raise CheckpointExistsError(
            "a checkpoint is there already",
            file=target,
            hint="Pass overwrite=True (--overwrite) to replace it.",
        )
    present = storage.existing(target, sidecar_files) if sidecar_files else set()
    others = []
    for name in sorted(present):
        file, data = join(target, name), sidecar_files[name]
        size = storage.size(file)
        if size != len(data) or read_range(storage, file, 0, size) != data:
            others.append(name)
    if others:
        raise CheckpointExistsError(
            f"the folder has other files of these names: {others}",
            file=target,
            hint="Pass overwrite=True (--overwrite) to replace them.",
        )
    return present


def _check_kinds(storage: Storage, target: str, names: Collection[str]) -> None:
    inner = {name.rpartition("/")[0] for name in names if "/" in name}
    files = inner and inner.intersection(storage.list(target))
    folders = names and {*storage.folders(target)}.intersection(names)
    links = [name for name in inner if storage.is_link(join(target, name))]
    if others := sorted({*files, *folders, *links}):
        raise CheckpointExistsError(
            f"the folder has other things of these names: {others}",
            file=target,
            expected="no folders where files go, and no files or links where folders go",
            hint="Move them away, or give another folder.",
        )
