"""A published version's tensors, read as if it were whole: differences apply to what is read."""

from __future__ import annotations

import bisect
import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from orbax_safetensors_layout.catalog import Catalog
from orbax_safetensors_layout.errors import FormatError, UnexpectedTensorError, listed
from orbax_safetensors_layout.format import TensorEntry
from orbax_safetensors_layout.options import GIB
from orbax_safetensors_layout.storage import Buffer, Storage, WrappedStorage, cut_out, scatter

from .difference import VERSION_HINT, Difference

_KEPT_BYTES = GIB  # of tensors that were put together, for the next range of each


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
                hint=VERSION_HINT,
            )
    return whole.over(VersionedStorage(whole.storage, whole.entries(changed), differences))


class VersionedStorage(WrappedStorage):
    """A whole version's storage, with differences applied to the bytes of its tensors.

    A tensor that changed is read whole, put together and held against its checksum when any byte
    of it is asked for: one difference is one compressed stream. The last ones are kept; with those
    that threads put together meanwhile, each beside a difference of its size, they take up to
    `_KEPT_BYTES`, or what one of them does.
    """

    def __init__(
        self,
        storage: Storage,
        changed: dict[str, TensorEntry],
        differences: Sequence[Difference],
    ) -> None:
        super().__init__(storage)
        self._differences = differences
        self._changes = b"".join(difference.digest for difference in differences).hex()
        self._in_file: dict[str, list[TensorEntry]] = {}
        for entry in sorted(changed.values(), key=lambda entry: entry.start):
            self._in_file.setdefault(entry.file, []).append(entry)
        self._locks = {name: threading.Lock() for name in changed}
        self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._kept_bytes = self._begun_bytes = 0
        self._state = threading.Condition()

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
            with self._state:
                if entry.name in self._kept:
                    self._kept.move_to_end(entry.name)
                    return self._kept[entry.name]
            with self._reserved(2 * entry.nbytes):
                values = np.empty(entry.nbytes, np.uint8)
                if entry.nbytes:
                    self._storage.read_into(entry.file, entry.start, [values.data])
                put_together(entry.name, values, self._differences)
            with self._state:
                self._kept[entry.name] = values
                self._kept_bytes += values.nbytes
                self._drop_kept(least=0 if self._begun_bytes else 1)
            return values

    @contextlib.contextmanager
    def _reserved(self, nbytes: int) -> Iterator[None]:
        """Waits for room for so many bytes, which are in use within the block."""
        with self._state:
            self._state.wait_for(
                lambda: not self._begun_bytes or self._begun_bytes + nbytes <= _KEPT_BYTES
            )
            self._begun_bytes += nbytes
            self._drop_kept(least=0)
        try:
            yield
        finally:
            with self._state:
                self._begun_bytes -= nbytes
                self._state.notify_all()

    def _drop_kept(self, least: int) -> None:
        while self._kept_bytes + self._begun_bytes > _KEPT_BYTES and len(self._kept) > least:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes

    def version(self, file: str) -> str | None:
        version = super().version(file)
        if file not in self._in_file:
            return version
        return f"{version!r} {self._changes}"

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
