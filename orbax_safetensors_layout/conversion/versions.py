"""Published versions of a model: which there are, and what one is made of.

Each is whole, or differences to the one before. `VersionedStorage` reads a version's tensors as if
it were whole, so that whatever reads checkpoints reads versions.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    FormatError,
    InvalidIndexError,
    listed,
)
from orbax_safetensors_layout.format import (
    HISTORY,
    MAIN_INDEX,
    DifferenceFormat,
    TensorEntry,
    folder_version,
    parse_index,
    version_folder,
)
from orbax_safetensors_layout.options import CacheFolder, PathLike, RetryPolicy
from orbax_safetensors_layout.runtime import Fingerprint, ProcessGroup, Workers
from orbax_safetensors_layout.storage import Storage, join, local_path, read_file

from .difference import VERSION_HINT, Difference
from .versioned_storage import check_whole, versioned

_SAMPLES, _SAMPLE_BYTES = 128, 4096  # that tell a model from others; twice as many
_SAMPLE_THREADS = 16


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

    def _numbers(self) -> list[int]:
        """Return the versions that there are folders of, the newest first."""
        try:
            names = self.storage.folders(self.folder)
        except CheckpointNotFoundError:  # a repository that is yet to be made
            return []
        return sorted((n for n in map(folder_version, names) if n is not None), reverse=True)

    def _is_complete(self, number: int) -> bool:
        """Whether the index of a version is there, which appears last."""
        try:
            return self.storage.is_file(join(self.path(number), MAIN_INDEX))
        except CheckpointNotFoundError:  # a repository that is yet to be made
            return False

    def newest(self, version: int | None = None) -> int:
        """Return the newest version, or checks that the given one is there; 0 if there is none."""
        if version is None:
            return next(filter(self._is_complete, self._numbers()), 0)
        if not version or self._is_complete(version):
            return version
        others = [version_folder(n) for n in reversed(self._numbers()) if n != version]
        raise CheckpointNotFoundError(
            f"there is no complete version {version}",
            file=self.folder,
            expected=version_folder(version),
            found=listed(others) or "no versions",
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
                    hint=VERSION_HINT,
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
                    hint=VERSION_HINT
                    if base
                    else "Give the model that it was published with as base=.",
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
