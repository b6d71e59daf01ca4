"""What a checkpoint holds, read once from its headers for Orbax's metadata calls."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Self

from orbax_safetensors_layout.format.catalog import Catalog
from orbax_safetensors_layout.format.header import TensorEntry


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """The headers of a checkpoint.

    Attributes:
        tensors: Every tensor by its name.
        custom_metadata: The `__metadata__` strings of the files.
        modified_nsecs: When the last of its files was written, in nanoseconds since the epoch; None
            where an index lists no files.
    """

    tensors: Mapping[str, TensorEntry]
    custom_metadata: Mapping[str, str]
    modified_nsecs: int | None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Reads all headers.

        Raises:
            CheckpointNotFoundError: No safetensors checkpoint stands at `path`.
            FormatError: A header or the index is malformed.
        """
        with Catalog.open(path) as catalog:
            written = [int(1e9 * catalog.storage.modified_seconds(file)) for file in catalog.files]
            return cls(catalog.all_entries(), catalog.metadata(), max(written, default=None))
