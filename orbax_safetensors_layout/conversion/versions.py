"""Published versions of a model: which there are, and the bytes of one, put together of several.

Each is whole, or differences to the one before. `VersionedStorage` reads a version's tensors as if
it were whole, so that whatever reads checkpoints reads versions.
"""

from __future__ import annotations

import bisect
import collections
import functools
import hashlib
import itertools
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from orbax_safetensors_layout.catalog import Catalog, read_header
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    InvalidIndexError,
    UnexpectedTensorError,
    listed,
)
from orbax_safetensors_layout.format import (
    HISTORY,
    MAIN_INDEX,
    DifferenceFormat,
    TensorEntry,
    apply_difference,
    checksum,
    folder_version,
    parse_index,
    version_folder,
)
from orbax_safetensors_layout.options import GIB, CacheFolder, PathLike, RetryPolicy
from orbax_safetensors_layout.runtime import Fingerprint, ProcessGroup, Workers
from orbax_safetensors_layout.storage import (
    Buffer,
    Storage,
    WrappedStorage,
    cut_out,
    join,
    local_path,
    read_file,
    read_range,
    scatter,
)

_KEPT_BYTES = GIB  # of tensors that were put together, for the next range of each
_SAMPLES, _SAMPLE_BYTES = 128, 4096  # that tell a model from others; twice as many
_SAMPLE_THREADS = 16
_HINT = "Pull another version, or have a whole one published."


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
        for name in index.files:
            file = join(self.folder, name)
            header = read_header(self._storage, file)
            named = {tensor for tensor, place in index.weight_map.items() if place == name}
            if named != header.tensors.keys():
                raise InvalidIndexError(
                    "the index names other tensors than the file holds",
                    file=file,
                    expected=f"{len(named)} tensors",
                    found=listed(sorted(named ^ header.tensors.keys())),
                    hint=_HINT,
                )
            for tensor, entry in header.tensors.items():
                if entry.dtype.code != "U8" or len(entry.shape) != 1:
                    raise FormatError(
                        "a difference is of another type",
                        file=file,
                        tensor=tensor,
                        expected="U8 of one dimension",
                        found=f"{entry.dtype.code} of shape {entry.shape}",
                        hint=_HINT,
                    )
                if tensor not in header.metadata:
                    raise FormatError(
                        "a difference has no checksum",
                        file=file,
                        tensor=tensor,
                        expected="one in __metadata__, by the tensor's name",
                        hint=_HINT,
                    )
                self.entries[tensor] = entry
                self._checksums[tensor] = header.metadata[tensor].lower()

    def digest(self) -> bytes:
        """Return a digest of what the version changed, and what to."""
        return hashlib.sha256(repr(sorted(self._checksums.items())).encode()).digest()

    def identity(self, before: bytes) -> bytes:
        """Return the version's identity, by that of the version before it."""
        return hashlib.sha256(before + self.digest()).digest()

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
                "the difference", entry.nbytes, most, file=entry.file, tensor=name, hint=_HINT
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
                hint="What its differences were applied to is another model or version. " + _HINT,
            )


class VersionChain(NamedTuple):
    """A version: what it begins with, and the differences to that."""

    number: int
    whole: int  # a version that is whole, or one that is held; 0 is the model itself
    differences: tuple[Difference, ...]  # in the order in which they apply
    origin: bytes  # the identity of `whole`

    @property
    def identity(self) -> str:
        """A text that no other version has, also none of this number in another history."""
        return self.identities()[self.number].hex()

    def fingerprint(self) -> Fingerprint:
        """Return what all processes must have to go on from this version."""
        text = f"version {self.number} of history {self.identity:.12}..."
        demand = "All must find the same versions, and give the same model as base=."
        return Fingerprint(self.identity, text, demand)

    def identities(self) -> dict[int, bytes]:
        identities = {self.whole: self.origin}
        at = self.origin
        for difference in self.differences:
            at = identities[difference.number] = difference.identity(at)
        return identities

    def since(self, number: int, identity: str | None) -> tuple[Difference, ...] | None:
        """Return the differences to an earlier version; None if it is not one of this history.

        Without an identity the number counts.
        """
        own = self.identities().get(number)
        if own is None or identity not in (None, own.hex()):
            return None
        return tuple(d for d in self.differences if d.number > number)


class PublishedVersions:
    """The versions in a folder, in terms of its storage; `base` is the model that version 0 is."""

    def __init__(
        self,
        storage: Storage,
        folder: str,
        base: PathLike | None = None,
        *,
        retries: RetryPolicy | None = None,
        cache: CacheFolder | None = None,
    ) -> None:
        self.storage = storage
        self.folder = folder
        self._base = base
        self._open_base = functools.partial(Catalog.open, retries=retries, cache=cache)
        self._whole_catalogs: dict[int, Catalog] = {}  # what is known by its bytes is read from

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the model."""
        if (base := self._whole_catalogs.get(0)) is not None:
            base.close()

    @property
    def has_base(self) -> bool:
        return self._base is not None

    def is_base(self, folder: str) -> bool:
        """Whether a local folder, a real path, is the model."""
        base = None if self._base is None else local_path(os.fsdecode(self._base))
        return base is not None and os.path.realpath(base) == folder

    def path(self, number: int) -> str:
        return join(self.folder, version_folder(number))

    def numbers(self) -> list[int]:
        """Return the complete versions, in order: an index is what appears last."""
        try:
            names = self.storage.folders(self.folder)
        except CheckpointNotFoundError:  # a repository that is yet to be made
            return []
        numbers = sorted(n for n in map(folder_version, names) if n is not None)
        return [n for n in numbers if self.storage.is_file(join(self.path(n), MAIN_INDEX))]

    def newest(self, version: int | None = None) -> int:
        """Return the newest version, or checks that the given one is there; 0 if there is none."""
        numbers = self.numbers()
        if version is None or version in numbers or version == 0:
            return (numbers[-1] if numbers else 0) if version is None else version
        raise CheckpointNotFoundError(
            f"there is no complete version {version}",
            file=self.folder,
            expected=version_folder(version),
            found=listed([version_folder(number) for number in numbers]) or "no versions",
        )

    def agreed(self, group: ProcessGroup) -> int:
        """Return the newest version that the first process finds; 0 if there is none."""
        error: BaseException | None = None
        text = "0"
        try:
            if group.is_leader:
                text = str(self.newest())
        except BaseException as problem:
            error = problem
        return int(group.barrier("looking for the newest version", error, broadcast=text))

    def chain(self, number: int, held: tuple[int, str | None] | None = None) -> VersionChain:
        """Return what version `number` is made of: from a whole one on, or from one that is held.

        What is held has a number and an identity. If the versions after it name that one, what it
        is made of is not looked at.

        Raises:
            CheckpointNotFoundError: A version that it needs is missing, or the model is.
            FormatError: One of them follows another version or model than the one that is there.
        """
        differences: list[Difference] = []
        at, stated = number, None  # identity of version `at` by what follows it
        while stated is None or (at, stated) != held:
            if not at:
                origin = self._digest(at, number)
                break
            folder = self.path(at)
            if not self.storage.is_file(file := join(folder, MAIN_INDEX)):
                raise CheckpointNotFoundError(
                    f"version {number} needs version {at}, which is missing or incomplete",
                    file=folder,
                    expected=MAIN_INDEX,
                    hint=_HINT,
                )
            data = read_file(self.storage, file, "the index", error=InvalidIndexError)
            metadata = parse_index(data, file=file).metadata
            kind = DifferenceFormat.parse(metadata, number=at, file=file)
            if kind is None:
                origin = self._digest(at, number, data if HISTORY in metadata else b"")
                break
            difference = Difference(self.storage, folder, at, kind)
            if at == number and (at, difference.stated_identity) == held:
                stated = difference.stated_identity
                continue
            differences.append(difference)
            at, stated = kind.base, kind.base_history
        else:
            origin = bytes.fromhex(stated)
        chain = VersionChain(number, at, tuple(reversed(differences)), origin)
        self._check_order(chain)
        return chain

    def _check_order(self, chain: VersionChain) -> None:
        identities = chain.identities()
        for difference in chain.differences:
            base = difference.base
            identity = identities[base].hex()
            if difference.follows not in (None, identity):
                what = f"version {base}" if base else "model"
                place = self.path(base) if base else os.fsdecode(self._base or "")
                raise FormatError(
                    f"version {difference.number} follows another {what} than is there",
                    file=difference.folder,
                    expected=f"{what} of history {difference.follows:.12}...",
                    found=f"{identity:.12}..., of {place}",
                    hint=_HINT if base else "Give the model that it was published with as base=.",
                )

    def catalog(self, chain: VersionChain) -> Catalog:
        """Return a version as a checkpoint."""
        whole = self._whole(chain.whole, chain.number)
        if chain.whole and not chain.differences:
            return whole
        return versioned(whole, chain.differences)

    def _whole(self, number: int, needed_for: int) -> Catalog:
        """Return a whole version, or the model."""
        if number in self._whole_catalogs:
            return self._whole_catalogs[number]
        if number:
            catalog = Catalog.open(self.path(number), storage=self.storage)
        elif self._base is not None:
            catalog = self._open_base(self._base)
        else:
            raise CheckpointNotFoundError(
                f"version {needed_for} is differences to the model itself, and none is given",
                file=self.folder,
                hint="Give base=, the folder or URL of the model that training began with.",
            )
        self._whole_catalogs[number] = catalog
        return catalog

    def _digest(self, number: int, needed_for: int, index: bytes = b"") -> bytes:
        """Return a digest of a whole version or the model: of its tensors and some of their bytes.

        Where it lies does not matter, nor which files there are; an `index` counts as it is.
        """
        catalog = self._whole(number, needed_for)
        check_whole(catalog)
        entries = sorted(catalog.all_entries().values())
        described = [(entry.name, entry.dtype.code, entry.shape) for entry in entries]
        digest = hashlib.sha256(index + repr(described).encode())
        read = catalog.storage.read_into
        samples: list[np.ndarray] = []
        with Workers(_SAMPLE_THREADS, "safetensors-pull", catalog.storage.interrupt) as workers:
            for entry, start in _sampled([entry for entry in entries if entry.nbytes]):
                samples.append(np.empty(min(entry.nbytes, _SAMPLE_BYTES), np.uint8))
                workers.submit(read, entry.file, entry.start + start, [samples[-1].data])
            workers.join()
        for sample in samples:
            digest.update(sample.data)
        return digest.digest()


def _sampled(entries: Sequence[TensorEntry]) -> list[tuple[TensorEntry, int]]:
    """Return tensors and where a sample begins: in the middle of some, and evenly in all bytes."""
    stops = [*itertools.accumulate(entry.nbytes for entry in entries)]
    count = min(len(entries), _SAMPLES)
    chosen = {n * (len(entries) - 1) // max(count - 1, 1) for n in range(count)}
    places = {stops[number] - (entries[number].nbytes + 1) // 2 for number in chosen}
    places |= {stops[-1] * (2 * n + 1) // (2 * _SAMPLES) for n in range(_SAMPLES) if stops}
    samples: dict[tuple[int, int], None] = {}
    for place in sorted(places):
        number = bisect.bisect_right(stops, place)
        nbytes = entries[number].nbytes
        last = nbytes - min(nbytes, _SAMPLE_BYTES)
        before = place - (stops[number] - nbytes) - _SAMPLE_BYTES // 2
        samples[number, min(max(before, 0), last)] = None
    return [(entries[number], start) for number, start in samples]


def check_whole(catalog: Catalog) -> None:
    """Raises a `FormatError` if a checkpoint has tensors in parts."""
    if catalog.layout != "hf":
        raise FormatError(
            "differences apply to whole tensors",
            file=catalog.path,
            expected="layout 'hf'",
            found=f"layout {catalog.layout!r}",
            hint="Put the tensors together first, with osl.consolidate.",
        )


def versioned(whole: Catalog, differences: Sequence[Difference]) -> Catalog:
    """Return the catalog of a version: that of a whole one, with differences applied."""
    check_whole(whole)
    changed = {name: None for difference in differences for name in difference.entries}
    for difference in differences:
        unknown = [name for name in difference.entries if name not in whole]
        if unknown:
            raise UnexpectedTensorError(
                f"version {difference.number} changes tensors that the version before it lacks",
                file=difference.folder,
                tensor=unknown[0],
                expected=f"tensors of {whole.path}",
                found=listed(map(repr, unknown)),
                hint=_HINT,
            )
    return whole.over(VersionedStorage(whole.storage, whole.entries(changed), differences))


class VersionedStorage(WrappedStorage):
    """A whole version's storage, with differences applied to the bytes of its tensors.

    A tensor that changed is read whole, put together and held against its checksum when any byte
    of it is asked for: one difference is one compressed stream. The last ones are kept.
    """

    def __init__(
        self,
        storage: Storage,
        changed: dict[str, TensorEntry],
        differences: Sequence[Difference],
    ) -> None:
        super().__init__(storage)
        self._differences = differences
        self._in_file: dict[str, list[TensorEntry]] = {}
        for entry in sorted(changed.values(), key=lambda entry: entry.start):
            self._in_file.setdefault(entry.file, []).append(entry)
        self._locks = {name: threading.Lock() for name in changed}
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        stop = offset + sum(map(len, buffers))
        entries = self._in_file.get(file, [])
        first = bisect.bisect_right(entries, offset, key=lambda entry: entry.stop)
        at = offset
        for entry in entries[first:]:
            if entry.start >= stop:
                break
            start, end = max(entry.start, offset), min(entry.stop, stop)
            self._read_whole(file, at, cut_out(buffers, at - offset, start - offset), shared)
            values = self._values(entry).data[start - entry.start : end - entry.start]
            scatter(values, cut_out(buffers, start - offset, end - offset))
            at = end
        self._read_whole(file, at, cut_out(buffers, at - offset, stop - offset), shared)

    def _read_whole(self, file: str, offset: int, buffers: Sequence[Buffer], shared: bool) -> None:
        if buffers:
            self._storage.read_into(file, offset, buffers, shared=shared)

    def _values(self, entry: TensorEntry) -> np.ndarray:
        """Return the bytes of a tensor that changed."""
        with self._locks[entry.name]:
            with self._lock:
                if entry.name in self._kept:
                    self._kept.move_to_end(entry.name)
                    return self._kept[entry.name]
            values = np.empty(entry.nbytes, np.uint8)
            if entry.nbytes:
                self._storage.read_into(entry.file, entry.start, [values.data])
            put_together(entry.name, values, self._differences)
            with self._lock:
                self._kept[entry.name] = values
                nbytes = sum(kept.nbytes for kept in self._kept.values())
                while nbytes > _KEPT_BYTES and len(self._kept) > 1:
                    nbytes -= self._kept.popitem(last=False)[1].nbytes
            return values

    def version(self, file: str) -> str | None:
        version = super().version(file)
        if file not in self._in_file:
            return version
        return repr((version, *(difference.digest() for difference in self._differences)))

    def content_key(self, file: str) -> str | None:
        return None if file in self._in_file else super().content_key(file)


def put_together(name: str, values: np.ndarray, differences: Sequence[Difference]) -> None:
    """Applies differences to a tensor's bytes in place, and checks what comes of it."""
    last: Difference | None = None
    for difference in differences:
        if name in difference.entries:
            difference.apply(name, values)
            last = difference
    if last is not None:
        last.check(name, values)
