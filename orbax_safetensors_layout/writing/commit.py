"""The commit of a save, which becomes visible when it is complete, and the side files with it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping

from orbax_safetensors_layout.catalog import is_safetensors_checkpoint
from orbax_safetensors_layout.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.format import DIGESTS, INDEX_SUFFIX, MANIFEST, SUFFIX
from orbax_safetensors_layout.options import PathLike
from orbax_safetensors_layout.plan import PIECES_FOLDER
from orbax_safetensors_layout.runtime import ProcessGroup
from orbax_safetensors_layout.storage import Storage, join, open_storage, read_range

_SIDECAR_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_SIDECAR_NAMES = (  # that are asked for where a folder cannot be listed
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
)


def appearance_rank(name: str) -> int | None:
    """Return when a file of a checkpoint appears; None for a file that belongs to none.

    So every part of a save that a crash leaves is rejected as incomplete: pieces by the manifest
    that names them all, numbered files by each other. The index alone may be missing.
    """
    if name == MANIFEST:
        return 0
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
) -> Iterator[str]:
    """Yields the folder to write a checkpoint into; leaving the block commits it to `target`.

    All processes enter the block, and leave it when all have written or one has failed. The side
    files of the leader count. Without `overwrite` a checkpoint, or another file of such a name, is
    a `CheckpointExistsError`.
    """

    def rank(name: str) -> int | None:
        return 0 if name in sidecar_files else appearance_rank(name)

    new_folder = storage.new_folder(
        target, overwrite=overwrite, rank=rank, scratch=(PIECES_FOLDER,)
    )
    error: BaseException | None = None
    try:
        with group.together("preparing the folder"):
            if group.is_leader:
                new_folder.begin()
                exists = functools.partial(is_safetensors_checkpoint, storage=storage)
                check_target(storage, new_folder.target, sidecar_files, overwrite, exists)
                new_folder.prepare()
        yield new_folder.folder
        if group.is_leader:
            new_folder.commit()
    except BaseException as problem:
        error = problem
        group.abandon()
        if group.is_leader:
            group.await_others()
    if group.is_leader:
        new_folder.end()
    group.barrier("committing the checkpoint", error)


def check_target(
    storage: Storage,
    target: str,
    sidecar_files: Mapping[str, bytes],
    overwrite: bool,
    is_checkpoint: Callable[[str], bool],
) -> None:
    """Raises where no checkpoint can be, or one or other side files would be overwritten."""
    if target.endswith(SUFFIX):
        raise SafetensorsLayoutError(
            "a checkpoint is saved as a folder",
            file=target,
            hint=f"Give the folder; the file in it is called 'model{SUFFIX}'.",
        )
    if storage.is_file(target):
        raise CheckpointExistsError("the path is a file", file=target, expected="a folder")
    if overwrite:
        return
    if is_checkpoint(target):
        raise CheckpointExistsError(
            "a checkpoint is there already",
            file=target,
            hint="Pass overwrite=True (--overwrite) to replace it.",
        )
    present = set(storage.list(target)) if sidecar_files else set()
    others = []
    for name in sorted(present.intersection(sidecar_files)):
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


def read_sidecar_files(
    path: PathLike, *, storage: Storage | None = None, required: bool = False
) -> dict[str, bytes]:
    """Returns the side files of a Hugging Face folder, or that one file, by name.

    They are those of the version that a `storage` has pinned, if it is given.
    """
    folder = os.fsdecode(path)
    with contextlib.ExitStack() as stack:
        if storage is None:
            storage, folder = open_storage(path)
            stack.enter_context(storage)
        if storage.is_file(folder):
            files = {os.path.basename(folder): folder}
        else:
            names = {*storage.list(folder)}
            if not storage.lists:
                names |= storage.existing(folder, _SIDECAR_NAMES)
            files = {name: join(folder, name) for name in sorted(names)}
        data = {
            name: read_range(storage, file, 0, storage.size(file))
            for name, file in files.items()
            if name.endswith(_SIDECAR_SUFFIXES)
            and appearance_rank(name) is None
            and not name.startswith(".")
        }
    if required and not data:
        raise CheckpointNotFoundError(
            "no config.json, tokenizer or similar file is there",
            file=path,
            expected="a folder with such files, or one of them",
        )
    return data


def configured_files(
    files: Mapping[str, bytes],
    target: PathLike,
    configured: Callable[[Mapping[str, bytes]], dict[str, bytes]],
) -> dict[str, bytes]:
    """Returns the side files of a save as `configured` returns them.

    Files that are in the target already and stay there are among them where it changes these.
    """
    present = read_sidecar_files(target)
    changed = configured({**present, **files})
    return {
        name: data for name, data in changed.items() if name in files or data != present.get(name)
    }
