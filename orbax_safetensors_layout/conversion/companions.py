"""Files that make a folder of safetensors a model: its configuration, its tokenizer."""

from __future__ import annotations

import os

from orbax_safetensors_layout.format.headers import read_range
from orbax_safetensors_layout.format.index import INDEX_SUFFIX
from orbax_safetensors_layout.format.manifest import MANIFEST
from orbax_safetensors_layout.storage.base import join
from orbax_safetensors_layout.storage.resolve import open_storage

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


def companions(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The configuration, tokenizer and the like of a Hugging Face folder, by name.

    Args:
        path: The folder. A single file has none.

    Raises:
        StorageError: A file can not be read.
    """
    storage, folder = open_storage(path)
    with storage:
        names = [
            name
            for name in storage.list(folder)
            if name.endswith(_SUFFIXES) and not name.endswith(INDEX_SUFFIX) and name != MANIFEST
        ]
        files = {name: join(folder, name) for name in names}
        return {name: read_range(storage, f, 0, storage.size(f)) for name, f in files.items()}
