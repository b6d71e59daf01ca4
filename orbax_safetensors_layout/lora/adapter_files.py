"""The files of an adapter: opened to look at them and to read tensors, and closed after each."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    StorageError,
    UnsupportedDtypeError,
    listed,
)
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.mapping import read_config
from orbax_safetensors_layout.options import MIB, ReadOptions
from orbax_safetensors_layout.storage import (
    LocalStorage,
    Storage,
    join,
    open_storage,
    read_range,
)

CONFIG_FILE = "adapter_config.json"
STEM = "adapter_model"
WEIGHTS_FILE = f"{STEM}.safetensors"

_KEPT_BYTES = 64 * MIB  # of tensors that were read, in case that other shards take them
_PART_BYTES = 8 * MIB  # of tensors that are side by side in the file, and are read at once
_MLX_FILE = "adapters.safetensors"
_MOST_LISTED = 100  # folders that are looked at for adapters


class AdapterFiles:
    """An adapter's configuration and header, and its tensors as they are asked for.

    Nothing stays open between two calls. The tensors are those of the version that was there at
    first: another one is an error. The last 64 MiB of them are kept. For many threads.

    Attributes:
        path: The folder, absolute if it is local.
        file: That of the tensors.
        config: The configuration.
        entries: The tensors, by name.
        digest: Equal for equal versions, in every process, wherever they are.
    """

    def __init__(self, path: str | os.PathLike[str], options: ReadOptions) -> None:
        self._options = options
        with opened(path, options) as (storage, folder):
            self.path = folder if storage.kind == "local" else os.fspath(path)
            self.file = join(folder, WEIGHTS_FILE)
            self.config = read_config(join(folder, CONFIG_FILE), storage=storage)
            catalog = Catalog.open(self.file, storage=storage)
            self.entries: dict[str, TensorEntry] = catalog.entries(catalog.names)
            self._check_dtypes()
            self._together = _parts(self.entries)
            content, self._written = self._seen(storage)
        shapes = [(e.name, e.dtype, e.shape, e.start) for e in self.entries.values()]
        described = [sorted(self.config.items()), shapes, content]
        self.digest = hashlib.sha256(repr(described).encode()).hexdigest()
        self._content = content
        self._lock = threading.Lock()  # of what is kept
        self._reading = threading.Lock()
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor.

        Raises:
            StorageError: It cannot be read, or the file is of another version by now.
        """
        values = self._find(name)
        if values is None:
            with self._reading:  # one reads for all that wait
                values = self._find(name)
                if values is None:
                    values = self._read_from(name)
        return values

    def _find(self, name: str) -> np.ndarray | None:
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def _read_from(self, name: str) -> np.ndarray:
        """Return a tensor, and keep those that are read with it, in one opening."""
        entries = self._together[name]
        stored = {entry.name: np.empty(entry.nbytes, np.uint8) for entry in entries}
        with opened(self.path, self._options) as (storage, _):
            content, written = self._seen(storage)
            self.check(f"{content}, of {written}", f"{self._content}, of {self._written}")
            buffers = [part.data for part in stored.values() if part.size]
            if buffers:
                storage.read_into(self.file, entries[0].start, buffers)
        read = {e.name: stored[e.name].view(e.dtype.numpy).reshape(e.shape) for e in entries}
        with self._lock:
            self._kept |= read
            self._kept.move_to_end(name)
            while len(self._kept) > 1 and sum(v.nbytes for v in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return read[name]

    def _check_dtypes(self) -> None:
        errors = [
            UnsupportedDtypeError(
                "the adapter has elements of less than a byte",
                file=self.file,
                tensor=entry.name,
                expected="a dtype of whole bytes, such as F32 or BF16",
                found=entry.dtype.code,
                hint="Cast it, or merge it with PEFT (merge_and_unload).",
            )
            for entry in self.entries.values()
            if entry.dtype.packed
        ]
        if errors:
            raise UnsupportedDtypeError.collect(errors)

    def check(self, seen: str, merged: str | None) -> None:
        """Raises if a version is not the one that was merged, as far as that is known."""
        if merged not in (None, seen):
            raise StorageError(
                "the adapter is not the one that was merged: it was changed or replaced since",
                file=self.file,
                expected=merged,
                found=seen,
                hint="Merge it again, and load when nothing writes to it.",
            )

    def _seen(self, storage: Storage) -> tuple[str, float | None]:
        """Return what tells the tensors that a storage has from others, and when it got them."""
        size, key = storage.size(self.file), storage.content_key(self.file)
        header = min((entry.start for entry in self.entries.values()), default=0)
        start = read_range(storage, self.file, 0, min(header + (0 if key else MIB), size))
        seen = hashlib.sha256(start)
        if key is None and isinstance(storage, LocalStorage):  # the beginning may be frozen
            for entry in self.entries.values():
                seen.update(storage.sample(self.file, entry.start, entry.stop))
        content = f"{size:,} bytes, {seen.hexdigest()[:16]}, {key}"
        return content, None if key else storage.modified_seconds(self.file)


def _parts(entries: dict[str, TensorEntry]) -> dict[str, list[TensorEntry]]:
    """Return for each tensor those that are read with it, in the order of the file."""
    parts: list[list[TensorEntry]] = []
    for entry in sorted(entries.values(), key=lambda entry: entry.start):
        part = parts[-1] if parts else []
        follows = part and part[-1].stop == entry.start
        if follows and entry.stop - part[0].start <= min(_PART_BYTES, _KEPT_BYTES):
            part.append(entry)
        else:
            parts.append([entry])
    return {entry.name: part for part in parts for entry in part}


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], options: ReadOptions) -> Iterator[tuple[Storage, str]]:
    """Opens the storage of an adapter; says of a file that is not there where adapters are."""
    storage, folder = open_storage(path, retries=options.retries, cache=options.cache_folder)
    with storage:
        try:
            yield storage, folder
        except CheckpointNotFoundError as error:
            if _MLX_FILE in storage.list(folder):
                raise FormatError(
                    "the adapter is one of MLX, whose matrices are transposed",
                    file=join(folder, _MLX_FILE),
                    expected=f"PEFT's {WEIGHTS_FILE}",
                    hint="osl.load gives its tensors as they are: lora_a [in, rank] is PEFT's"
                    " lora_A.weight transposed, lora_b its lora_B.weight, and scale alpha / rank.",
                ) from error
            inside = [
                name for name in storage.folders(folder)[:_MOST_LISTED]
                if storage.is_file(join(join(folder, name), CONFIG_FILE))
            ]  # fmt: skip
            if not inside:
                raise
            raise CheckpointNotFoundError(
                "no adapter in the folder itself",
                file=folder,
                expected=f"{CONFIG_FILE} and {WEIGHTS_FILE}",
                found=f"adapters in {listed(map(repr, inside), 5)}",
                hint=f"Give the path of one, such as {join(os.fspath(path), inside[0])}",
            ) from error
