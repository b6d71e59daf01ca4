"""Side files: the configuration, tokenizer and the like beside the tensors of a checkpoint."""

from __future__ import annotations

import os

from orbax_safetensors_layout.errors import CheckpointNotFoundError
from orbax_safetensors_layout.storage import join, open_storage, read_range

from .commit import appearance_rank

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


def read_sidecar_files(path: str | os.PathLike[str], *, required: bool = False) -> dict[str, bytes]:
    """Returns the side files of a Hugging Face folder by name.

    Args:
        path: The folder, or one such file.
        required: Raise where there are none.

    Raises:
        CheckpointNotFoundError: There are none.
        StorageError: A file cannot be read.
    """
    storage, folder = open_storage(path)
    with storage:
        if storage.is_file(folder):
            files = {os.path.basename(folder): folder}
        else:
            files = {name: join(folder, name) for name in storage.list(folder)}
        found = {
            name: read_range(storage, file, 0, storage.size(file))
            for name, file in files.items()
            if name.endswith(_SUFFIXES)
            and appearance_rank(name) is None
            and not name.startswith(".")
        }
    if required and not found:
        raise CheckpointNotFoundError(
            "there is nothing to put beside the files",
            file=path,
            expected="a folder with config.json, a tokenizer and the like",
        )
    return found
