"""Files that make a folder of safetensors a model: its configuration, its tokenizer."""

from __future__ import annotations

import os

from orbax_safetensors_layout.format.headers import read_range
from orbax_safetensors_layout.publishing import appearance_rank
from orbax_safetensors_layout.storage.base import join
from orbax_safetensors_layout.storage.resolve import open_storage

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


def companions(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The configuration, tokenizer and the like of a Hugging Face folder, by name.

    Args:
        path: The folder, or one such file.

    Raises:
        StorageError: A file can not be read.
    """
    storage, folder = open_storage(path)
    with storage:
        if storage.is_file(folder):
            files = {os.path.basename(folder): folder}
        else:
            files = {name: join(folder, name) for name in storage.list(folder)}
        return {
            name: read_range(storage, file, 0, storage.size(file))
            for name, file in files.items()
            if name.endswith(_SUFFIXES)
            and appearance_rank(name) is None
            and not name.startswith(".")
        }
