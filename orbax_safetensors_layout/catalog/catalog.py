"""The catalog of a checkpoint: every tensor's file, offset, shape and dtype.

Opening one reads the index, if there is one. A file's header is fetched once, when one of its
tensors is asked for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from absl import logging

from orbax_safetensors_layout.errors import (
    InvalidIndexError,
    InvalidManifestError,
    MissingTensorError,
    SafetensorsLayoutError,
    StorageError,
    listed,
    redact_urls,
)
from orbax_safetensors_layout.format import (
    DCP_KEYS,
    MAIN_INDEX,
    MANIFEST,
    ONE_A_BYTE,
    PREFIX_BYTES,
    SAVE_ID,
    Header,
    Layout,
    Manifest,
    OnError,
    StoredPieces,
    TensorEntry,
    TensorLeaf,
    header_length,
    leaf_names,
    leaves,
    parse_header,
    pieces_by_offsets,
    raise_error,
    unboxed_aliases,
)
from orbax_safetensors_layout.geometry import Box
from orbax_safetensors_layout.options import CacheFolder, RetryPolicy, storage_profile
from orbax_safetensors_layout.runtime import Workers, paused_collector
from orbax_safetensors_layout.storage import (
    FIRST_READ_BYTES,
    Storage,
    join,
    open_storage,
    read_range,
)

from .discover import Discovery, discover, read_manifest
from .piece_catalog import ExtentDoubt, PieceCatalog, check_whole
from .select import missing_names, select_names

ROTARY_BUFFER = "rotary_emb.inv_freq"
"""The end of names of tensors that transformers saved until 4.31, and no program takes."""
_OF_PIECES = {SAVE_ID, *DCP_KEYS}  # keys of metadata that speak of the files as they are
_BYTES = frozenset(dtype.code for dtype in ONE_A_BYTE.values())


class Catalog:
    """The tensors of a checkpoint. Safe to use from many threads; `open` makes one.

    An index says which files are the checkpoint, and their headers which tensors these hold, as for
    transformers. What the index says of a tensor is only where to look first.

    Attributes:
        path: The file or folder in the storage's own terms.
        other_names: Names that metadata give a stored tensor besides its own, with that one, as
            `safetensors.torch.save_model` writes them for tied weights. They can be asked for.
    """

    def __init__(self, discovery: Discovery, storage: Storage) -> None:
        path, manifest = discovery.path, discovery.manifest
        self.path = path
        self.storage = storage
        self.files = tuple(sorted(discovery.files))
        self._pieces: PieceCatalog | None = None
        self._manifest_file = discovery.manifest_file
        self._manifest = manifest
        self._is_checked = False
        self._index = discovery.weights
        self._index_file = discovery.index_file
        self._knows_all = discovery.weights is None
        self._absent: dict[str, str] = {}  # of the index, in no file, with that which it gives
        self._headers = HeaderCache(storage)
        self._names_lock = threading.Lock()
        self._file_of: Mapping[str, str]
        metadata: list[Mapping[str, object]] = []
        pieces, files = None if manifest is None else manifest.pieces, discovery.files
        if pieces is None and discovery.weights is None:
            headers = self._headers.fetch(self.files)
            if self.files != (path,):
                for file, header in headers.items():
                    check_whole(file, header)
            pieces, files = pieces_by_offsets(headers, path), [*headers]
        if pieces is not None:
            dtypes = {} if manifest is None else manifest.dtypes()
            self._pieces = PieceCatalog(pieces, files, self._headers.visit, dtypes)
            self._file_of = dict.fromkeys(pieces.tensors, "")
        elif discovery.weights is None:
            self._file_of = _file_of(headers, {}, path)
            metadata = [header.metadata for header in headers.values()]
        else:
            paths = {name: join(path, name) for name in discovery.weights.files}
            weight_map = discovery.weights.weight_map
            self._file_of = {name: paths[file] for name, file in weight_map.items()}
            metadata = [discovery.weights.metadata]
        self.other_names = {
            other: name
            for of_file in (() if discovery.manifest_file else metadata)
            for other, name in of_file.items()
            if isinstance(name, str) and name in self._file_of and other not in self._file_of
        }
        self.layout: Layout = "hf" if self._pieces is None else "sharded"

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        storage: Storage | None = None,
        retries: RetryPolicy | None = None,
        cache: CacheFolder | None = None,
    ) -> Self:
        """Opens a `.safetensors` file or a folder.

        In a folder, `model.safetensors.index.json` says which files count where it exists, or else
        the only other `*.safetensors.index.json` where there is no `model.safetensors`. An index is
        left out if none of its files is there, but others of the model are. Without an
        index all `.safetensors` files directly in the folder count, but none beside
        `model.safetensors` or its numbered set, nor adapters beside others, and all headers are
        read. In a step that Orbax
        made, the only item of safetensors files is opened, or `default` or `state`.

        Without a `storage` the one that `path` names is opened, with `retries` and
        `cache`, and closed on an error.
        """
        with contextlib.ExitStack() as on_error:
            if storage is None:
                storage, path = open_storage(path, retries=retries, cache=cache)
                on_error.callback(storage.close)
            catalog = cls(discover(storage, os.fspath(path)), storage)
            on_error.pop_all()
        return catalog

    @classmethod
    def of_pieces(cls, storage: Storage, folder: str, pieces: StoredPieces) -> Self:
        """Return the catalog of pieces in a folder that has no manifest yet."""
        files = [join(folder, name) for name in pieces.files]
        return cls(Discovery(folder, files, manifest=Manifest("sharded", pieces=pieces)), storage)

    def over(self, storage: Storage) -> Self:
        """Return this catalog with the bytes of its tensors in another storage."""
        other = copy.copy(self)
        other.storage = storage
        return other

    def close(self) -> None:
        """Closes the storage."""
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Catalog({self.path!r}, {len(self._file_of)} tensors in {len(self.files)} files)"

    def __contains__(self, name: object) -> bool:
        return name in self._file_of or name in self.other_names

    @property
    def names(self) -> Sequence[str]:
        """The names of the stored tensors: those of an index in its order, by all headers."""
        self.read_all_names()
        return tuple(self._file_of)

    def listed(self) -> Sequence[str]:
        """Return the names that are known without further headers, other names included."""
        return (*self._file_of, *self.other_names)

    def check_index(self) -> None:
        """Reads all headers if one that was read holds other tensors than the index says of it."""
        if self._knows_all:
            return
        held = self._headers.fetched()
        listed: dict[str, set[str]] = {file: set() for file in held}
        for name, file in self._file_of.items():
            if file in listed:
                listed[file].add(name)
        differing = (listed[file] ^ header.tensors.keys() for file, header in held.items())
        if any(not name.endswith(ROTARY_BUFFER) for names in differing for name in names):
            self.read_all_names()

    def read_all_names(self) -> None:
        """Makes the tensors of the listed files those of the checkpoint, whatever is in an index.

        Without the rotary buffers that it leaves out.
        """
        with self._names_lock:
            if self._knows_all:
                return
            indexed = self._file_of
            file_of = _file_of(self._headers.fetch(self.files), indexed, self.path)
            absent = {name: file for name, file in indexed.items() if name not in file_of}
            more = [n for n in file_of if n not in indexed and not n.endswith(ROTARY_BUFFER)]
            wrong = [f"'{name}' is in no file" for name in absent]
            wrong += [f"'{n}' is in {f}" for n, f in file_of.items() if indexed.get(n, f) != f]
            wrong += [f"'{name}' is there, too" for name in more]
            if wrong:
                text = "%s does not say what its files hold: %s. What they hold counts."
                logging.warning(text, redact_urls(self._index_file or ""), listed(wrong))
            order = [name for name in indexed if name not in absent]
            self._file_of = {name: file_of[name] for name in (*order, *more)}
            self._absent, self._knows_all = absent, True

    def stored_name(self, name: str) -> str | None:
        """Return the name of a tensor, or of a value of the manifest, that a leaf is stored under.

        It may differ by the levels of boxes: `kernel` is found as `kernel.value`, and that as
        `kernel` where the manifest records a box.
        """
        if name in self:
            return name
        stored = self._stored_names  # which reads all headers
        return name if name in self else stored.get(name)

    @functools.cached_property
    def _stored_names(self) -> dict[str, str]:
        manifest = self.manifest()
        if manifest is None or manifest.tree is None:
            return unboxed_aliases(self.names)
        saved = [name for name, _ in leaf_names(manifest.tree)]
        boxed = (name for name, _ in leaf_names(manifest.tree, boxes=True))
        aliases = unboxed_aliases(saved)
        return aliases | dict(zip(boxed, saved, strict=True)) | dict(zip(saved, saved, strict=True))

    @property
    def doubt(self) -> ExtentDoubt | None:
        """Doubt whether pieces are all of their tensors; None where shapes are recorded."""
        return None if self._pieces is None else ExtentDoubt.of(self._pieces.stored, self.path)

    def entries(
        self, names: Iterable[str], *, compares_shapes: bool = False
    ) -> dict[str, TensorEntry]:
        """Return the entries of some tensors, in the given order.

        Only headers of files that hold one of them are fetched, concurrently, and kept. A tensor
        that is stored in pieces is described as a whole; see `locate`. Where the manifest records
        that bytes hold sub-byte elements, the dtype is theirs. `compares_shapes` says that the
        caller holds all shapes against others; else such that are in doubt are refused.
        """
        names = list(dict.fromkeys(names))
        if self._pieces is None and (entries := self._entries(names)) is not None:
            return self._as_recorded(entries)
        self.read_all_names()
        missing = [name for name in names if name not in self]
        if missing:
            problems = [(f"Tensor '{name}' not found", name) for name in missing]
            error = missing_names(problems, self.names, path=self.path)
            raise self.explained(error)
        if self._pieces is not None:
            if not compares_shapes and not self._is_checked and self.doubt is not None:
                self.doubt.refuse_or_warn()
                self._is_checked = True
            return {name: self._pieces.whole(name) for name in names}
        return self._as_recorded(self._entries(names) or {})

    def _entries(self, names: Sequence[str]) -> dict[str, TensorEntry] | None:
        """Return the entries of tensors, None where one is not in the file that is known for it."""
        stored = [*map(self.other_names.get, names, names)]
        files = [*map(self._file_of.get, stored)]
        headers = self._headers.fetch(sorted({file for file in files if file is not None}))
        self._refuse_parts(headers)
        entries = {
            name: entry
            for name, held, file in zip(names, stored, files, strict=True)
            if file is not None and (entry := headers[file].tensors.get(held))
        }
        entries |= {n: entries[n]._replace(name=n) for n in entries.keys() & self.other_names}
        return entries if len(entries) == len(names) else None

    def explained(self, error: SafetensorsLayoutError) -> SafetensorsLayoutError:
        """Adds to an error what else is in doubt: parts, and what an index says but no file has."""
        hints = [error.hint]
        if error.hint is None and self.doubt is not None:
            hints = [self.doubt.hint]
        if places := [f"'{name}' in {file}" for name, file in self._absent.items()]:
            hints.append(
                f"The index names {listed(places, 3)}, and no file of it holds that: complete the"
                " download, or take the files of one version."
            )
        error.hint = " ".join(filter(None, hints)) or None
        return error

    def _refuse_parts(self, headers: Mapping[str, Header]) -> None:
        """Refuses pieces that an index takes for whole: processes wrote one file over another's."""
        if not any(pieces_by_offsets({file: headers[file]}, file) for file in headers):
            return
        size = None if self._index is None else self._index.metadata.get("total_size")
        every = self._headers.fetch(self.files).values()
        nbytes = sum(entry.nbytes for header in every for entry in header.tensors.values())
        if isinstance(size, int | float) and size > nbytes:
            raise InvalidIndexError(
                "files that torch's DCP wrote hold less than their index says, so parts of tensors",
                file=self.path,
                expected=f"total_size {size}",
                found=f"{nbytes} bytes of tensors",
                hint="Save again with save_distributed=True: several ranks have written one file.",
            )

    def locate(
        self, regions: Mapping[str, Sequence[Box]]
    ) -> dict[str, tuple[tuple[Box, TensorEntry], ...]]:
        """Return the stored arrays that regions of tensors, boxes by name, are made of.

        These are the boxes that overlap a region, each stored as a row-major array of its own. A
        tensor that is stored whole is one box. The headers of many files are fetched together.
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
        if self._pieces is not None:
            return self._pieces.files_of(name)
        return (self._file_of[self.other_names.get(name, name)],)

    def prefer(self, process: int) -> None:
        """Chooses, of files that hold the same piece, those that suit a process of a load."""
        if self._pieces is not None:
            self._pieces.prefer(process)

    def _as_recorded(self, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Gives sub-byte elements that are stored one a byte the manifest's dtype."""
        if _BYTES.isdisjoint([entry.dtype.code for entry in entries.values()]):
            return entries  # the manifest has nothing to say of other dtypes
        manifest = self.manifest() or self._manifest_beside()
        return entries if manifest is None else as_recorded(entries, manifest, self._manifest_file)

    def all_entries(self) -> dict[str, TensorEntry]:
        """Return the entries of all tensors, in the order of `names`; see `entries`."""
        return self.entries(self.names)

    def manifest(self) -> Manifest | None:
        """Return the manifest, if this package wrote the checkpoint; see `read_manifest`.

        Of whole tensors it must name all, or another program wrote the files since.
        """
        if self._manifest is None and self._manifest_file is not None:
            self._manifest = read_manifest(self.storage, self._manifest_file)
        if not self._is_checked and self._manifest is not None and self._pieces is None:
            self._check_names(self._manifest)
            self._is_checked = True
        return self._manifest

    def _check_names(self, manifest: Manifest) -> None:
        if manifest.tree is None:
            return
        saved = {leaf.tensor for leaf in leaves(manifest.tree) if isinstance(leaf, TensorLeaf)}
        others = [name for name in self._file_of if name not in saved]
        if others:
            raise InvalidManifestError(
                "the files hold tensors that the manifest does not name: another program has"
                " written to them since",
                file=self._manifest_file,
                tensor=others[0],
                expected="the tensors that were saved with it",
                found=listed(map(repr, others)),
                hint="To load the files as they are, remove the manifest.",
            )

    def _manifest_beside(self) -> Manifest | None:
        """Return the manifest of a file that is opened by itself, if one beside it speaks of it."""
        if self.files != (self.path,):
            return None
        file = self.path.removesuffix(self.path.rpartition("/")[2]) + MANIFEST
        try:
            if not self.storage.is_file(file) or self._is_other():
                return None
            return read_manifest(self.storage, file)
        except StorageError:  # a server may forbid to look for others
            return None
        except InvalidManifestError:
            if self.storage.lists:
                raise
            return None  # it may answer with a page in place of "not found"

    def _is_other(self) -> bool:
        """Whether a file is none of the checkpoint in its folder, as far as that can be told."""
        above, _, name = self.path.rpartition("/")
        folder = above or ("/" if self.path.startswith("/") else ".")
        if self.storage.lists:
            with contextlib.suppress(SafetensorsLayoutError):
                files = discover(self.storage, folder, on_error=lambda _: None).files
                return name not in {file.rpartition("/")[2] for file in files}
        return False

    def metadata(self) -> dict[str, str]:
        """Return the `__metadata__` strings of all files; the first file in sorted order wins."""
        if self._pieces is not None and self._manifest is not None:
            return dict(self._manifest.metadata)
        headers = self._headers.fetch(self.files)
        merged: dict[str, str] = {}
        for file in reversed(self.files):
            merged.update(headers[file].metadata)
        return {key: value for key, value in merged.items() if key not in _OF_PIECES}

    def select(self, patterns: str | Sequence[str]) -> list[str]:
        """Return the names that match any of some patterns, in order; see `compile_pattern`."""
        is_single = isinstance(patterns, str) or not hasattr(patterns, "__iter__")
        given: list[Any] = [patterns] if is_single else [*patterns]
        names = self.listed()
        if not all(isinstance(name, str) and name in self for name in given):
            names = [*self.names, *(name for name in self.other_names if name in given)]
        try:
            return select_names(names, patterns if is_single else given, path=self.path)
        except MissingTensorError as error:
            raise self.explained(error) from None


@functools.lru_cache(1024)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


def as_recorded(
    entries: dict[str, TensorEntry],
    manifest: Manifest,
    file: str | None,
    on_error: OnError = raise_error,
) -> dict[str, TensorEntry]:
    """Gives entries of a checkpoint's files the dtypes that its manifest, `file`, records."""
    dtypes = manifest.dtypes_in_files()
    for name in dtypes.keys() & entries.keys():
        entry, dtype = entries[name], dtypes[name]
        if entry.dtype.code == dtype.code:
            entries[name] = entry._replace(dtype=dtype)
        elif entry.dtype.code in _BYTES:
            on_error(
                InvalidManifestError(
                    "the manifest records a dtype that does not fit the file's code",
                    file=file,
                    tensor=name,
                    expected=f"{dtype.code} for {dtype.numpy}",
                    found=entry.dtype.code,
                )
            )
    return entries


def _file_of(
    headers: Mapping[str, Header], indexed: Mapping[str, str], path: str
) -> dict[str, str]:
    """Return the file of each tensor; of several the one that an index gives it."""
    file_of: dict[str, str] = {}
    repeated: dict[str, str] = {}
    for file, header in headers.items():
        held = dict.fromkeys(header.tensors, file)
        for name in sorted(file_of.keys() & held.keys()):
            if indexed.get(name) != file:
                held[name] = file_of[name]
                if file_of[name] != indexed.get(name):
                    repeated[name] = file
        file_of |= held
    repeated = {name: file for name, file in repeated.items() if indexed.get(name) != file_of[name]}
    if repeated:
        name = next(iter(repeated))
        places = [f"{n} in {file_of[n]} and {second}" for n, second in repeated.items()]
        raise InvalidIndexError(
            f"Duplicate tensor {listed(places, 1)}",
            file=path,
            tensor=name,
            expected="each name in one file",
            found="the name in two files",
            hint=f"Say in '{MAIN_INDEX}' which file counts. If each has a part of the tensor, the"
            " program that wrote them has to make it whole.",
        )
    return file_of


class HeaderCache:
    """Headers of files, each fetched when it is first asked for. Safe to use from many threads."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._headers: dict[str, Header] = {}
        self._lock = threading.Lock()

    def fetch(self, files: Sequence[str]) -> dict[str, Header]:
        """Return the headers of some files."""
        # One lock for all: a second caller most likely asks for the same headers.
        with self._lock:
            lacking = [file for file in files if file not in self._headers]
            self._read_all(lacking, self._headers.__setitem__)
            return {file: self._headers[file] for file in files}

    def fetched(self) -> dict[str, Header]:
        """Return the headers that were fetched so far."""
        with self._lock:
            return dict(self._headers)

    def visit(self, files: Sequence[str], look: Callable[[str, Header], None]) -> None:
        """Calls `look`, on any thread, with each of some files and its header; keeps no other."""
        with self._lock:
            for file in self._headers.keys() & files:
                look(file, self._headers[file])
            self._read_all([file for file in files if file not in self._headers], look)

    def _read_all(self, files: Sequence[str], take: Callable[[str, Header], None]) -> None:
        if len(files) == 1:
            self._read(files[0], take)
        elif files:
            threads = min(storage_profile(self._storage.kind).concurrency, len(files))
            with Workers(threads, "catalog", self._storage.interrupt) as workers:
                for file in files:
                    workers.submit(self._read, file, take)
                workers.join()

    def _read(self, file: str, take: Callable[[str, Header], None]) -> None:
        take(file, read_header(self._storage, file))


def read_header(storage: Storage, file: str, *, on_error: OnError = raise_error) -> Header:
    """Fetches and parses a file's header, in one request unless it is longer than 256 KiB.

    For `on_error` see `parse_header`.
    """
    file_size = storage.size(file)
    data = read_range(storage, file, 0, min(file_size, FIRST_READ_BYTES))
    length = header_length(data[:PREFIX_BYTES], file=file, file_size=file_size)
    header = data[PREFIX_BYTES : PREFIX_BYTES + length]
    if len(header) < length:
        header += read_range(storage, file, len(data), length - len(header))
    with paused_collector():
        return parse_header(header, file=file, file_size=file_size, on_error=on_error)
