"""One published version's differences to the version before: what changed, and its checksums."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from orbax_safetensors_layout.catalog import read_header
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    InvalidIndexError,
    listed,
)
from orbax_safetensors_layout.format import (
    MAIN_INDEX,
    DifferenceFormat,
    Header,
    TensorEntry,
    apply_difference,
    checksum,
    parse_index,
)
from orbax_safetensors_layout.runtime import Workers
from orbax_safetensors_layout.storage import Storage, join, read_file, read_range

_THREADS = 16
VERSION_HINT = "Pull another version, or have a whole one published."


class Difference:
    """A version's differences to the one before: its tensors that changed, and their checksums."""

    def __init__(self, storage: Storage, folder: str, number: int, kind: DifferenceFormat) -> None:
        self.number = number
        self.base = kind.base
        self.follows = kind.base_history
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}  # of the encoded bytes
        self._storage = storage
        self._kind = kind
        self._checksums: dict[str, str] = {}
        self._read_headers(join(folder, MAIN_INDEX))

    def _read_headers(self, index_file: str) -> None:
        data = read_file(self._storage, index_file, "the index", error=InvalidIndexError)
        index = parse_index(data, file=index_file)
        files = {join(self.folder, name): name for name in index.files}
        for file, header in self._headers([*files]).items():
            name = files[file]
            named = {tensor for tensor, place in index.weight_map.items() if place == name}
            if named != header.tensors.keys():
                raise InvalidIndexError(
                    "the index names other tensors than the file holds",
                    file=file,
                    expected=f"{len(named)} tensors",
                    found=listed(sorted(named ^ header.tensors.keys())),
                    hint=VERSION_HINT,
                )
            for tensor, entry in header.tensors.items():
                if entry.dtype.code != "U8" or len(entry.shape) != 1:
                    raise FormatError(
                        "a difference is of another type",
                        file=file,
                        tensor=tensor,
                        expected="U8 of one dimension",
                        found=f"{entry.dtype.code} of shape {entry.shape}",
                        hint=VERSION_HINT,
                    )
                if tensor not in header.metadata:
                    raise FormatError(
                        "a difference has no checksum",
                        file=file,
                        tensor=tensor,
                        expected="one in __metadata__, by the tensor's name",
                        hint=VERSION_HINT,
                    )
                self.entries[tensor] = entry
                self._checksums[tensor] = header.metadata[tensor].lower()

    def _headers(self, files: Sequence[str]) -> dict[str, Header]:
        headers: dict[str, Header] = {}

        def read(file: str) -> None:
            headers[file] = read_header(self._storage, file)

        try:
            with Workers(_THREADS, "safetensors-pull", self._storage.interrupt) as workers:
                for file in files:
                    workers.submit(read, file)
                workers.join()
        except (CheckpointNotFoundError, FormatError) as error:
            error.hint = error.hint or VERSION_HINT
            raise
        return {file: headers[file] for file in files}

    @functools.cached_property
    def digest(self) -> bytes:
        """A digest of what the version changed, and what to."""
        return hashlib.sha256(repr(sorted(self._checksums.items())).encode()).digest()

    def identity(self, before: bytes) -> bytes:
        """Return the version's identity, by that of the version before it."""
        return hashlib.sha256(before + self.digest).digest()

    @property
    def stated_identity(self) -> str | None:
        """The identity by what the version says it follows, if it does."""
        return None if self.follows is None else self.identity(bytes.fromhex(self.follows)).hex()

    def apply(self, name: str, values: np.ndarray) -> None:
        """Changes the bytes of a tensor from those of the version before, if they differ."""
        if (entry := self.entries.get(name)) is not None:
            most = values.size if self._kind.encoding == "xor" else 4 + 5 * values.size
            most += most // 128 + 1024  # what zstd may add to bytes that it cannot compress
            FormatError.check_size(
                "the difference",
                entry.nbytes,
                most,
                file=entry.file,
                tensor=name,
                hint=VERSION_HINT,
            )
            data = read_range(self._storage, entry.file, entry.start, entry.nbytes)
            apply_difference(values, data, self._kind.encoding, entry)

    def check(self, name: str, values: np.ndarray) -> None:
        """Raises a `FormatError` if a tensor's bytes are not those that were published."""
        found = checksum(self._kind.checksum, values)
        if found != self._checksums[name]:
            raise FormatError(
                f"a tensor is not what was published as version {self.number}",
                file=self.entries[name].file,
                tensor=name,
                expected=f"{self._kind.checksum} {self._checksums[name]}",
                found=found,
                hint="What its differences were applied to is another model or version. "
                + VERSION_HINT,
            )
