"""The catalog of a checkpoint: every tensor's file, offset, shape and dtype.

Only names are looked at when a catalog is opened with an index; a file's header is fetched when one
of its tensors is asked for, once.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidIndexError,
    MissingTensorError,
    StorageError,
)
from orbax_safetensors_layout.format.header import (
    PREFIX_BYTES,
    Header,
    TensorEntry,
    header_length,
    parse_header,
)
from orbax_safetensors_layout.format.index import (
    INDEX_SUFFIX,
    MAIN_INDEX,
    MAX_INDEX_BYTES,
    SUFFIX,
    WeightIndex,
    parse_index,
)
from orbax_safetensors_layout.format.nearest import nearest_names
from orbax_safetensors_layout.format.patterns import compile_pattern, is_plain
from orbax_safetensors_layout.options import KIB, PROFILES
from orbax_safetensors_layout.storage.base import Storage, join
from orbax_safetensors_layout.storage.resolve import open_storage

# Holds the header of about 2,000 tensors; at 100 MB/s it costs less than one more request does.
_FIRST_REQUEST_BYTES = 256 * KIB
_MAX_LISTED = 10
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_MAX_NUMBERED = 100_000
_MAX_HINTS = 5


class Catalog:
    """What a checkpoint holds. Safe to use from many threads; `open` makes one.

    Attributes:
        path: The file or folder that was opened, in the storage's own terms.
        storage: Where its files are read from.
        files: Paths of the `.safetensors` files that count, sorted.
        names: Names of all tensors: in the order of the index if there is one, else file by file in
            the order of their bytes.
    """

    def __init__(
        self,
        path: str,
        *,
        storage: Storage,
        files: Sequence[str],
        index: WeightIndex | None,
        owns_storage: bool,
        concurrency: int,
    ) -> None:
        self.path = path
        self.storage = storage
        self.files = tuple(sorted(files))
        self._owns_storage = owns_storage
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._headers: dict[str, Header] = {}
        self._file_of: Mapping[str, str]
        if index is None:
            self._file_of = _file_of(self._fetch(self.files), path)
        else:
            paths = {name: join(path, name) for name in index.files}
            self._file_of = {name: paths[file] for name, file in index.weight_map.items()}
        self.names = tuple(self._file_of)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        storage: Storage | None = None,
        concurrency: int | None = None,
    ) -> Self:
        """Opens a checkpoint.

        In a folder, `model.safetensors.index.json` is the authority where it exists, or else the
        only other `*.safetensors.index.json`: files that it does not name are ignored. Without an
        index all `.safetensors` files directly in the folder count, and all headers are read.

        Args:
            path: A `.safetensors` file, or a folder.
            storage: Where `path` is; None opens the one that `path` names, and `close` closes it.
            concurrency: Headers fetched at once; None takes the storage class's default.

        Raises:
            CheckpointNotFoundError: There is no `.safetensors` file at `path`.
            InvalidIndexError: The index is malformed or lists missing files, there are several, or
                without one two files hold a tensor of the same name.
            FormatError: Without an index, a header is malformed.
            StorageError: A read failed.
        """
        owns_storage = storage is None
        if storage is None:
            storage, text = open_storage(path)
        else:
            text = os.fspath(path)
        try:
            files, index = _survey(storage, text)
            return cls(
                text,
                storage=storage,
                files=files,
                index=index,
                owns_storage=owns_storage,
                concurrency=concurrency or PROFILES[storage.kind].concurrency,
            )
        except BaseException:
            if owns_storage:
                storage.close()
            raise

    def close(self) -> None:
        """Closes the storage, if `open` opened it."""
        if self._owns_storage:
            self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Catalog({self.path!r}, {len(self.names)} tensors in {len(self.files)} files)"

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __len__(self) -> int:
        return len(self.names)

    def entries(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """The entries of some tensors, in the given order.

        Only headers of files that hold one of them are fetched, concurrently, and kept.

        Args:
            names: Tensor names.

        Raises:
            MissingTensorError: The checkpoint lacks some of them; names them all.
            InvalidIndexError: A file's header lacks a tensor that the index says it holds.
            FormatError: A header is malformed.
            StorageError: A read failed.
        """
        wanted = list(dict.fromkeys(names))
        missing = [name for name in wanted if name not in self._file_of]
        if missing:
            raise self._missing([(f"Tensor '{name}' not found", name) for name in missing])
        headers = self._fetch(sorted({self._file_of[name] for name in wanted}))
        found: dict[str, TensorEntry] = {}
        for name in wanted:
            entry = headers[self._file_of[name]].tensors.get(name)
            if entry is None:
                raise self._contradiction(wanted, headers)
            found[name] = entry
        return found

    def all_entries(self) -> dict[str, TensorEntry]:
        """The entries of all tensors, in the order of `names`; see `entries`."""
        return self.entries(self.names)

    def metadata(self) -> dict[str, str]:
        """The `__metadata__` strings of all files; the first file's, in sorted order, win.

        Raises:
            FormatError: A header is malformed.
            StorageError: A read failed.
        """
        headers = self._fetch(self.files)
        merged: dict[str, str] = {}
        for file in reversed(self.files):
            merged.update(headers[file].metadata)
        return merged

    def select(self, patterns: str | Sequence[str]) -> list[str]:
        """The names that match any of some patterns, in the order of `names`.

        Args:
            patterns: Glob-like patterns on whole names: `*` (dots included), `?`, `[...]`,
                `{a,b}` and `{0..15}`; see `patterns.compile_pattern`.

        Raises:
            ValueError: A pattern is malformed.
            MissingTensorError: Some patterns match nothing; names them all.
        """
        if isinstance(patterns, str):
            patterns = [patterns]
        chosen: set[str] = set()
        unmatched: list[tuple[str, str]] = []
        for pattern in patterns:
            if is_plain(pattern):
                matching = [pattern] if pattern in self else []
                problem = f"Tensor '{pattern}' not found"
            else:
                matches = compile_pattern(pattern).fullmatch
                matching = [name for name in self.names if matches(name)]
                problem = f"Pattern '{pattern}' matches no tensor"
            if not matching:
                unmatched.append((problem, pattern))
            chosen.update(matching)
        if unmatched:
            raise self._missing(unmatched)
        return [name for name in self.names if name in chosen]

    def _fetch(self, files: Sequence[str]) -> dict[str, Header]:
        # One lock for all: whoever comes second most likely wants the same headers.
        with self._lock:
            lacking = [file for file in files if file not in self._headers]
            if len(lacking) == 1:
                self._headers[lacking[0]] = read_header(self.storage, lacking[0])
            elif lacking:
                pool = ThreadPoolExecutor(min(self._concurrency, len(lacking)), "catalog")
                try:
                    jobs = [pool.submit(read_header, self.storage, file) for file in lacking]
                    for file, job in zip(lacking, jobs, strict=True):
                        self._headers[file] = job.result()
                finally:
                    pool.shutdown(cancel_futures=True)
            return {file: self._headers[file] for file in files}

    def _missing(self, problems: Sequence[tuple[str, str]]) -> MissingTensorError:
        """One error for pairs of a message and the name or pattern that it is about."""
        errors = []
        for number, (problem, name) in enumerate(problems):
            nearest = nearest_names(name, self.names) if number < _MAX_HINTS else []
            hint = f"The nearest names are {', '.join(map(repr, nearest))}." if nearest else None
            errors.append(MissingTensorError(problem, file=self.path, tensor=name, hint=hint))
        return MissingTensorError.collect(errors)

    def _contradiction(
        self, names: Sequence[str], headers: Mapping[str, Header]
    ) -> InvalidIndexError:
        lacking = [name for name in names if name not in headers[self._file_of[name]].tensors]
        first = lacking[0]
        return InvalidIndexError(
            "the index names tensors that are not in their file's header: "
            + _listed([f"'{name}' in {self._file_of[name]}" for name in lacking]),
            file=self._file_of[first],
            tensor=first,
            expected="every tensor of the index in the file that the index gives it",
            found=f"{len(lacking)} that are not",
        )


def read_header(storage: Storage, file: str) -> Header:
    """Fetches and parses a file's header, in one request unless it is longer than 256 KiB.

    Raises:
        FormatError: It is malformed, or the file is truncated.
        StorageError: A read failed.
    """
    file_size = storage.size(file)
    data = _read(storage, file, 0, min(file_size, _FIRST_REQUEST_BYTES))
    stop = PREFIX_BYTES + header_length(data[:PREFIX_BYTES], file=file, file_size=file_size)
    if stop > len(data):
        data += _read(storage, file, len(data), stop - len(data))
    return parse_header(data[PREFIX_BYTES:stop], file=file, file_size=file_size)


def is_safetensors_checkpoint(
    path: str | os.PathLike[str], *, storage: Storage | None = None
) -> bool:
    """Whether `path` is a `.safetensors` file, or a folder with one or with an index.

    Looks at names only. A path that does not exist, or that no storage serves, is none.
    """
    owned: Storage | None = None
    try:
        if storage is None:
            storage, text = open_storage(path)
            owned = storage
        else:
            text = os.fspath(path)
        if storage.is_file(text):
            return text.endswith(SUFFIX)
        return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in storage.list(text))
    except (StorageError, CheckpointNotFoundError):
        return False
    finally:
        if owned is not None:
            owned.close()


def _read(storage: Storage, file: str, start: int, size: int) -> bytes:
    data = bytearray(size)
    if size:
        storage.read_into(file, start, [memoryview(data)])
    return bytes(data)


def _survey(storage: Storage, path: str) -> tuple[list[str], WeightIndex | None]:
    """The files that count at `path`, and the index that says so."""
    if storage.is_file(path):
        if not path.endswith(SUFFIX):
            raise CheckpointNotFoundError(
                "the path is a file of another format",
                file=path,
                expected=f"a '{SUFFIX}' file, or a folder of them",
                found=os.path.basename(path),
                hint="Give the folder that holds the index." if path.endswith(".json") else None,
            )
        return [path], None
    names = storage.list(path)
    index_name = _index_name(names, path)
    if index_name is not None:
        index_file = join(path, index_name)
        index = _read_index(storage, index_file)
        _check_present(storage, path, index, names, index_file)
        return [join(path, name) for name in index.files], index
    files = [join(path, name) for name in names if name.endswith(SUFFIX)]
    _check_complete(names, path)
    if files:
        return files, None
    if names:
        raise CheckpointNotFoundError(
            f"the folder does not contain any '{SUFFIX}' files",
            file=path,
            expected=f"'{SUFFIX}' files directly in it",
            found=_listed(names),
        )
    raise CheckpointNotFoundError(
        f"the path does not exist, or is a folder that does not contain any '{SUFFIX}' files",
        file=path,
        expected=f"a '{SUFFIX}' file, or a folder of them",
        found="no file",
    )


def _check_complete(names: Sequence[str], path: str) -> None:
    """Refuses a part of a numbered set: without an index nobody else would notice."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered:
            stem, number, count = numbered.groups()
            sets.setdefault((stem, count), set()).add(int(number))
    for (stem, count), numbers in sets.items():
        missing = set(range(1, int(count) + 1)) - numbers
        if missing and int(count) < _MAX_NUMBERED:
            absent = [f"{number:0{len(count)}}" for number in sorted(missing)]
            raise InvalidIndexError(
                "the folder has no index and lacks files of a numbered set",
                file=path,
                expected=f"{int(count)} files {stem}-…-of-{count}{SUFFIX}",
                found=f"{len(missing)} missing: numbers {_listed(absent)}",
                hint="Complete the download, or give the path of one file.",
            )


def _index_name(names: Sequence[str], path: str) -> str | None:
    if MAIN_INDEX in names:
        return MAIN_INDEX
    found = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(found) > 1:
        raise InvalidIndexError(
            "the folder has several indices",
            file=path,
            expected=f"'{MAIN_INDEX}', or only one other",
            found=", ".join(found),
            hint=f"Rename the one that counts to '{MAIN_INDEX}'.",
        )
    return found[0] if found else None


def _read_index(storage: Storage, file: str) -> WeightIndex:
    size = storage.size(file)
    if size > MAX_INDEX_BYTES:
        raise InvalidIndexError(
            "the index is too large",
            file=file,
            expected=f"at most {MAX_INDEX_BYTES} bytes",
            found=f"{size} bytes",
        )
    return parse_index(_read(storage, file, 0, size), file=file)


def _check_present(
    storage: Storage, path: str, index: WeightIndex, names: Sequence[str], index_file: str
) -> None:
    present = set(names)
    folders = {name.rpartition("/")[0] for name in index.files} - {""}
    for folder in folders:
        present.update(f"{folder}/{name}" for name in storage.list(join(path, folder)))
    missing = [name for name in index.files if name not in present]
    if missing:
        raise InvalidIndexError(
            "the index lists files that are missing",
            file=index_file,
            expected=f"{len(index.files)} files",
            found=f"{len(missing)} missing: {', '.join(missing)}",
            hint="The download or copy of the checkpoint may be incomplete.",
        )


def _file_of(headers: Mapping[str, Header], path: str) -> dict[str, str]:
    """Tensor name to file, without an index; no two files may hold a name."""
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


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
