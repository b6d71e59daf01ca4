"""The catalog of a checkpoint: every tensor's file, offset, shape and dtype.

Opening one reads the index, if there is one. A file's header is fetched once, when one of its
tensors is asked for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from orbax_safetensors_layout.errors import InvalidIndexError, InvalidManifestError
from orbax_safetensors_layout.format import (
    MAIN_INDEX,
    ONE_A_BYTE,
    Header,
    Layout,
    Manifest,
    StoredPieces,
    TensorEntry,
)
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.options import RetryPolicy
from orbax_safetensors_layout.storage import Storage, join, open_storage

from .discover import Discovery, discover, listed, read_manifest
from .headers import HeaderCache
from .piece_catalog import PieceCatalog
from .select import missing_names, select_names

_BYTES = frozenset(dtype.code for dtype in ONE_A_BYTE.values())


class Catalog:
    """The tensors of a checkpoint. Safe to use from many threads; `open` makes one.

    Attributes:
        path: The file or folder that holds it, in the storage's own terms.
        files: Paths of its `.safetensors` files, sorted.
        names: Names of all tensors: in the order of the index if it has one, else file by file in
            the order of their bytes.
        layout: `hf` for tensors stored whole, `sharded` for pieces.
    """

    def __init__(
        self,
        discovery: Discovery,
        storage: Storage,
        *,
        owns_storage: bool = False,
        concurrency: int | None = None,
    ) -> None:
        path, manifest = discovery.path, discovery.manifest
        self.path = path
        self.storage = storage
        self.files = tuple(sorted(discovery.files))
        self.layout: Layout = "hf"
        self._pieces: PieceCatalog | None = None
        self._manifest_file = discovery.manifest_file
        self._manifest = manifest
        self._owns_storage = owns_storage
        self._headers = HeaderCache(storage, concurrency)
        self._file_of: Mapping[str, str]
        if manifest is not None and manifest.pieces is not None:
            self.layout = "sharded"
            self._pieces = PieceCatalog(
                manifest.pieces, discovery.files, self._headers.fetch, manifest.dtypes()
            )
            self._file_of = dict.fromkeys(manifest.pieces.tensors, "")
        elif discovery.weights is None:
            self._file_of = _file_of(self._headers.fetch(self.files), path)
        else:
            paths = {name: join(path, name) for name in discovery.weights.files}
            self._file_of = {
                name: paths[file] for name, file in discovery.weights.weight_map.items()
            }
        self.names = tuple(self._file_of)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        storage: Storage | None = None,
        concurrency: int | None = None,
        retries: RetryPolicy | None = None,
    ) -> Self:
        """Opens a `.safetensors` file or a folder.

        In a folder, `model.safetensors.index.json` is the authority where it exists, or else the
        only other `*.safetensors.index.json`: files that it does not name are ignored. Without an
        index all `.safetensors` files directly in the folder count, but none beside
        `model.safetensors` or its numbered set, and all headers are read. Of a step that Orbax
        made, the only item of safetensors files is opened, or `default` or `state`.

        Without a `storage` the one that `path` names is opened, with `retries`, and closed by
        `close`. `concurrency` is of headers; by default the storage class's.

        Raises:
            CheckpointNotFoundError: `path` has no `.safetensors` file.
            InvalidIndexError: The index is malformed or lists missing files, the folder has
                several, or without one two files hold a tensor of the same name.
            FormatError: Without an index, a header is malformed.
            StorageError: A read failed.
        """
        owns_storage = storage is None
        if storage is None:
            storage, text = open_storage(path, retries=retries)
        else:
            text = os.fspath(path)
        try:
            discovery = discover(storage, text)
            return cls(discovery, storage, owns_storage=owns_storage, concurrency=concurrency)
        except BaseException:
            if owns_storage:
                storage.close()
            raise

    @classmethod
    def of_pieces(cls, storage: Storage, folder: str, pieces: StoredPieces) -> Self:
        """Return the catalog of pieces in a folder that has no manifest yet."""
        files = [join(folder, name) for name in pieces.files]
        return cls(Discovery(folder, files, manifest=Manifest("sharded", pieces=pieces)), storage)

    def close(self) -> None:
        """Closes the storage, if `open` opened it."""
        if self._owns_storage:
            self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Catalog({self.path!r}, {len(self.names)} tensors in {len(self.files)} files)"

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __len__(self) -> int:
        return len(self.names)

    def entries(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """Return the entries of some tensors, in the given order.

        Only headers of files that hold one of them are fetched, concurrently, and kept. A tensor
        that is stored in pieces is described as a whole; see `locate`. Where the manifest records
        that bytes hold sub-byte elements, the dtype is theirs.

        Raises:
            MissingTensorError: The checkpoint lacks some of them; names them all.
            InvalidIndexError: A file's header lacks a tensor that the index says it holds.
            FormatError: A header, or the manifest, is malformed.
            StorageError: A read failed.
        """
        names = list(dict.fromkeys(names))
        missing = [name for name in names if name not in self._file_of]
        if missing:
            problems = [(f"Tensor '{name}' not found", name) for name in missing]
            raise missing_names(problems, self.names, path=self.path)
        if self._pieces is not None:
            return {name: self._pieces.whole(name) for name in names}
        headers = self._headers.fetch(sorted({self._file_of[name] for name in names}))
        lacking = [name for name in names if name not in headers[self._file_of[name]].tensors]
        if lacking:
            raise InvalidIndexError(
                "the index names tensors that are not in their file's header: "
                + listed([f"'{name}' in {self._file_of[name]}" for name in lacking]),
                file=self._file_of[lacking[0]],
                tensor=lacking[0],
                expected="every tensor of the index in the file that the index gives it",
                found=f"{len(lacking)} that are not",
            )
        entries = {name: headers[self._file_of[name]].tensors[name] for name in names}
        return self._as_recorded(entries)

    def locate(
        self, regions: Mapping[str, Sequence[Box]]
    ) -> dict[str, tuple[tuple[Box, TensorEntry], ...]]:
        """Return the stored arrays that regions of tensors, boxes by name, are made of.

        These are the boxes that overlap a region, each stored as a row-major array of its own. A
        tensor that is stored whole is one box. The headers of many files are fetched together.

        Raises:
            MissingTensorError: The checkpoint lacks some of them; names them all.
            InvalidManifestError: A file lacks a piece, or has it in another shape.
            FormatError: A header is malformed.
            StorageError: A read failed.
        """
        if self._pieces is not None:
            return self._pieces.find(regions)
        entries = self.entries(regions)
        return {name: ((_whole(entry.shape), entry),) for name, entry in entries.items()}

    def pieces(self, names: Iterable[str]) -> dict[str, tuple[Box, ...]]:
        """Return the boxes of those of some tensors that are stored in pieces, by name."""
        pieces = self._pieces
        return {} if pieces is None else {name: pieces.boxes(name) for name in names}

    def files_of(self, name: str) -> tuple[str, ...]:
        """Return the paths of the files that hold a tensor or pieces of it."""
        return (self._file_of[name],) if self._pieces is None else self._pieces.files_of(name)

    def prefer(self, process: int) -> None:
        """Chooses, of files that hold the same piece, those that suit a process of a load."""
        if self._pieces is not None:
            self._pieces.prefer(process)

    def _as_recorded(self, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Gives sub-byte elements that are stored one a byte the manifest's dtype."""
        if all(entry.dtype.code not in _BYTES for entry in entries.values()):
            return entries  # the manifest has nothing to say of other dtypes
        manifest = self.manifest()
        dtypes = {} if manifest is None else manifest.dtypes()
        for name in dtypes.keys() & entries.keys():
            entry, dtype = entries[name], dtypes[name]
            if entry.dtype.code == dtype.code:
                entries[name] = entry._replace(dtype=dtype)
            elif entry.dtype.code in _BYTES:
                raise InvalidManifestError(
                    "the manifest records a dtype that does not fit the file's code",
                    file=self._manifest_file,
                    tensor=name,
                    expected=f"{dtype.code} for {dtype.numpy}",
                    found=entry.dtype.code,
                )
        return entries

    def all_entries(self) -> dict[str, TensorEntry]:
        """Return the entries of all tensors, in the order of `names`; see `entries`."""
        return self.entries(self.names)

    def manifest(self) -> Manifest | None:
        """Return the manifest, if this package wrote the checkpoint; see `read_manifest`."""
        if self._manifest is None and self._manifest_file is not None:
            self._manifest = read_manifest(self.storage, self._manifest_file)
        return self._manifest

    def metadata(self) -> dict[str, str]:
        """Return the `__metadata__` strings of all files; the first file in sorted order wins."""
        headers = self._headers.fetch(self.files)
        if self._pieces is not None and self._manifest is not None:
            return dict(self._manifest.metadata)
        merged: dict[str, str] = {}
        for file in reversed(self.files):
            merged.update(headers[file].metadata)
        return merged

    def select(self, patterns: str | Sequence[str]) -> list[str]:
        """Return the names that match any of some patterns, in the order of `names`.

        Patterns are glob-like and match whole names; see `compile_pattern`. Each also matches the
        name that it spells.

        Raises:
            InvalidArgumentError: A pattern is malformed.
            MissingTensorError: Some patterns match nothing; names them all.
        """
        return select_names(self.names, patterns, path=self.path)


@functools.lru_cache(1024)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


def _file_of(headers: Mapping[str, Header], path: str) -> dict[str, str]:
    """Return the file of each tensor, without an index; no two files may hold a name."""
    file_of: dict[str, str] = {}
    repeated: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if file_of.setdefault(name, file) != file:
                repeated.setdefault(name, file)
    if repeated:
        name, second = next(iter(repeated.items()))
        more = f", and {len(repeated) - 1} more such names" if len(repeated) > 1 else ""
        raise InvalidIndexError(
            f"Duplicate tensor {name} in {file_of[name]} and {second}{more}",
            file=path,
            tensor=name,
            expected="each name in one file",
            found="the name in two files",
            hint=f"Add the '{MAIN_INDEX}' that says which file counts, or give one file's path.",
        )
    return file_of
