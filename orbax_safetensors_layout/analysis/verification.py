"""Verifies a checkpoint: its structure, its checksums, and its values against another's."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orbax_safetensors_layout.catalog import (
    ORBAX_ITEM,
    Discovery,
    ExtentDoubt,
    as_recorded,
    check_save,
    check_whole,
    discover,
    read_header,
    read_manifest,
    resolve_checkpoint,
)
from orbax_safetensors_layout.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    InvalidManifestError,
    SafetensorsLayoutError,
)
from orbax_safetensors_layout.format import (
    DTYPES,
    MANIFEST,
    SUFFIX,
    DType,
    Header,
    Manifest,
    Node,
    StoredPieces,
    TensorLeaf,
    WeightIndex,
    leaves,
    piece_name,
    pieces_by_offsets,
)
from orbax_safetensors_layout.options import OnProgress, PathLike, ReadOptions, given_or_default
from orbax_safetensors_layout.pytree import prng
from orbax_safetensors_layout.reading import (
    check_bytes,
    file_blocks,
    file_crc32,
    has_all_values,
    read_digests,
)
from orbax_safetensors_layout.runtime import ProgressReport, progress_callback
from orbax_safetensors_layout.storage import Storage, join, open_storage, read_file

from .report import Finding, Report

_MOST_FINDINGS = 10_000  # of one kind; a header of 100 MB can have two million malformed entries


def verify(
    path: PathLike,
    against: PathLike | None = None,
    *,
    step: int | None = None,
    item: str | None = None,
    mapping: Any = None,
    subtree: str | None = None,
    digests: bool = True,
    options: ReadOptions | None = None,
) -> Report:
    """Checks whether a checkpoint is whole; reports all that is wrong, not the first.

    Structure: every header; the index or the manifest against the headers; sizes, missing, stray
    and doubly held tensors; pieces; the bytes of booleans. Contents: the checksums that a save with
    `WriteOptions(digests=True)` left. Values: bit by bit against another checkpoint, whose files
    may be cut otherwise. Tensors are read in blocks, in bounded memory.

    Either may be in Orbax's own format, or a step with such an item. Every array of such a `path`
    is read: missing chunks and such that cannot be decoded are found. The memory that TensorStore
    takes to decode a chunk comes on top of the budget.

    Args:
        path: The checkpoint.
        against: Another, which must have the same tensors.
        step: A step of a manager's directory, of `path` and of `against` where that is one.
        item: An item of a step, likewise; by default the only one, `default` or `state`.
        mapping: What the tensors of `path` are made of in `against`, an `osl.Mapping`.
        subtree: Dotted name of the part of the tree of `path` that is compared.
        digests: Whether to hold files against their checksums, where there are any; that reads
            all of them.
        options: How to read: `memory_budget_bytes`, `progress`, the cost model, `retries` and
            `cache` count. With a cache what it keeps is checked, and the rest at its place.

    Raises:
        CheckpointNotFoundError: A path has no checkpoint.
        StorageError: A read failed.
        MappingError: The mapping does not fit, or `against` is not a safetensors checkpoint.
        MissingTensorError: The tree has no `subtree`.
        SafetensorsLayoutError: A chunk of an Orbax checkpoint is too large for the memory budget.

    Examples:
        >>> import tempfile, numpy as np
        >>> import orbax_safetensors_layout as osl
        >>> folder = tempfile.mkdtemp()
        >>> osl.save(folder, {"w": np.arange(4)}, options=osl.WriteOptions(digests=True))
        >>> print(osl.verify(folder))
        /tmp/...: whole (1 file, 1 tensor, 2 checksums)
    """
    options = given_or_default(options, ReadOptions)
    if against is None and not (mapping is None and subtree is None):
        raise InvalidArgumentError(
            "mapping= and subtree= say what is compared: give against=, too."
        )
    ref = resolve_checkpoint(path, step=step, item=item)
    with progress_callback(options.progress) as progress:
        report = Report(ref.path, ())
        if not ref.is_orbax:
            report = _check_files(ref.path, digests, options, progress)
            if against is None or not report.ok:
                return report
        from . import compare

        if against is None:
            return compare.check_readable(ref, options, progress)
        return compare.compare(
            report,
            ref,
            resolve_checkpoint(against, step=step, item=item, by_path=True),
            mapping=mapping,
            subtree=subtree,
            options=options,
            progress=progress,
        )


def _check_files(path: str, digests: bool, options: ReadOptions, progress: OnProgress) -> Report:
    storage, place = open_storage(path, retries=options.retries, cache=options.cache_folder)
    with storage:
        check = StructureCheck(storage, place)
        check.check()
        digested = check.check_digests(progress) if digests else 0
    return Report(
        check.path,
        check.all_findings(),
        files=len(check.headers),
        tensors=sum(len(header.tensors) for header in check.headers.values()),
        digested_files=digested,
    )


class StructureCheck:
    """Compares names, headers and side files; keeps the well-formed `headers`, and `findings`."""

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self.findings: list[Finding] = []
        self.headers: dict[str, Header] = {}
        self._counts: Counter[str] = Counter()

    def check(self) -> None:
        """Adds to `findings` and `headers`."""
        discovery = self._discover()
        self.path = discovery.path  # of a step its item
        for file in sorted(discovery.files):
            before = self._counts["header"]
            with self._reporting("header") as on_error:
                header = read_header(self.storage, file, on_error=on_error)
                if self._counts["header"] == before:
                    self.headers[file] = header
        manifest = discovery.manifest
        if manifest is None and discovery.manifest_file is not None:
            with self._reporting("manifest"):
                manifest = read_manifest(self.storage, discovery.manifest_file)
        if discovery.manifest_file is None and self._names_manifest():
            self._error("manifest", f"{MANIFEST} is missing, which {ORBAX_ITEM} names")
        self._check_values({} if manifest is None else manifest.dtypes_in_files())
        if discovery.weights is not None:
            self._check_index(discovery.weights)
        tree, pieces = (None, None) if manifest is None else (manifest.tree, manifest.pieces)
        if pieces is not None:
            self._check_pieces(pieces)
        elif not self._check_offsets(has_index=discovery.weights is not None):
            self._check_whole(manifest)
        if tree is not None:
            self._check_keys(tree, pieces)
        self._check_stray(discovery)

    def all_findings(self) -> tuple[Finding, ...]:
        """Return the findings, and of each kind how many more there are."""
        more = {kind: count - _MOST_FINDINGS for kind, count in self._counts.items()}
        texts = {
            kind: f"{count:,} more are not listed" for kind, count in more.items() if count > 0
        }
        return (*self.findings, *(Finding(kind, text) for kind, text in texts.items()))

    def check_digests(self, progress: OnProgress) -> int:
        """Compares files with their checksums; returns how many."""
        storage, folder, digests = self.storage, self.path, None
        is_file = storage.is_file(folder)
        if is_file:
            if not storage.lists:  # a server may forbid to look for others
                return 0
            folder = folder.removesuffix(folder.rpartition("/")[2])
        with self._reporting("digest"):
            digests = read_digests(storage, folder)
        if digests is None:
            return 0
        if is_file:  # of a file by itself its own alone
            name = self.path.removeprefix(folder)
            digests = {name: digests[name]} if name in digests else {}
        present = storage.existing(folder, digests)
        for name in sorted(digests.keys() - present):
            self._error("digest", f"{name} is missing; it has a checksum")
        for name in () if is_file else map(self._name, self.headers):
            if name not in digests:
                note = f"{name} has no checksum"
                self.findings.append(Finding("digest", note, is_error=False))
        names = sorted(digests.keys() & present)
        report = ProgressReport(progress, sum(storage.size(join(folder, name)) for name in names))
        for name in names:
            with self._reporting("digest"):
                on_block = functools.partial(report.add, name=name)
                value = file_crc32(storage, join(folder, name), report=on_block)
                if value != digests[name]:
                    text = f"{name} has CRC-32 {value:08x}; it was written with {digests[name]:08x}"
                    self._error("digest", text)
        return len(names)

    def _discover(self) -> Discovery:
        """Return the files of the checkpoint; all that are there, where these are not known."""

        def on_error(error: SafetensorsLayoutError) -> None:
            self._error("manifest" if MANIFEST in (error.file or "") else "index", error)

        try:
            return discover(self.storage, self.path, on_error=on_error)
        except CheckpointNotFoundError:
            raise
        except SafetensorsLayoutError as error:
            on_error(error)
        names = [] if self.storage.is_file(self.path) else self.storage.list(self.path)
        files = [join(self.path, name) for name in names if name.endswith(SUFFIX)]
        return Discovery(self.path, files)

    def _names_manifest(self) -> bool:
        """Whether metadata of an item of Orbax say that it was saved with a manifest."""
        if self.storage.is_file(self.path):
            return False
        if not self.storage.existing(self.path, [ORBAX_ITEM]):
            return False
        file = join(self.path, ORBAX_ITEM)
        with self._reporting("manifest"):
            data = read_file(self.storage, file, "the item's metadata", error=InvalidManifestError)
            with contextlib.suppress(ValueError):  # of others
                metadata = json.loads(data)
                return isinstance(metadata, dict) and MANIFEST in metadata
        return False

    def _error(self, kind: str, problem: object) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= _MOST_FINDINGS:
            self.findings.append(Finding(kind, str(problem)))

    @contextlib.contextmanager
    def _reporting(self, kind: str) -> Iterator[Callable[[SafetensorsLayoutError], None]]:
        """Makes a finding of the error that ends the block, and of those that are reported."""
        try:
            yield functools.partial(self._error, kind)
        except SafetensorsLayoutError as error:
            self._error(kind, error)

    def _name(self, file: str) -> str:
        return file.removeprefix(f"{self.path.rstrip('/')}/")

    def _check_values(self, dtypes: Mapping[str, DType]) -> None:
        """Checks tensors of dtypes that not all bytes are values of, recorded ones included."""
        entries = (e for header in self.headers.values() for e in header.tensors.values())
        for name, dtype, _, file, start, stop in entries:
            dtype = dtypes.get(name, dtype)
            if has_all_values(dtype):
                continue
            with self._reporting("value"):
                for _, block in file_blocks(self.storage, file, start, stop):
                    check_bytes(block, dtype, file, name)

    def _check_index(self, index: WeightIndex) -> None:
        file_of = {name: join(self.path, file) for name, file in index.weight_map.items()}
        for name, file in file_of.items():
            header = self.headers.get(file)
            if header is not None and name not in header.tensors:
                text = f"the index says that '{name}' is in {self._name(file)}; it is not"
                self._error("index", text)
        total = 0
        for file, header in self.headers.items():
            for name, entry in header.tensors.items():
                total += entry.nbytes
                if file_of.get(name) != file:
                    where = self._name(file_of[name]) if name in file_of else "no file"
                    text = f"{self._name(file)} holds '{name}'; the index says {where}"
                    self._error("index", text)
        size = index.metadata.get("total_size")
        is_known = isinstance(size, int | float) and len(self.headers) == len(index.files)
        if is_known and size != total:
            self._error("index", f"total_size of the index is {size}; the tensors have {total}")

    def _check_whole(self, manifest: Manifest | None) -> None:
        """Checks tensors that are stored whole: each in one file, and those of the tree alone."""
        first: dict[str, str] = {}
        for file, header in self.headers.items():
            if file != self.path:
                with self._reporting("pieces"):
                    check_whole(file, header)
            for name in header.tensors:
                other = first.setdefault(name, file)
                if other != file:
                    text = f"'{name}' is in both {self._name(other)} and {self._name(file)}"
                    self._error("file", text)
        if manifest is None or manifest.tree is None or not self.headers:
            return
        with self._reporting("manifest") as on_error:
            entries = {
                e.name: e for header in self.headers.values() for e in header.tensors.values()
            }
            as_recorded(entries, manifest, join(self.path, MANIFEST), on_error)
        named = {leaf.tensor for leaf in leaves(manifest.tree) if isinstance(leaf, TensorLeaf)}
        for name in sorted(named - first.keys()):
            self._error("manifest", f"the manifest names '{name}', which no file holds")
        for name in sorted(first.keys() - named):
            self._error("manifest", f"a file holds '{name}', which the manifest does not name")

    def _check_keys(self, tree: Node, pieces: StoredPieces | None) -> None:
        """Checks that tensors that are recorded as PRNG keys can be data of such."""
        entries = {e.name: e for header in self.headers.values() for e in header.tensors.values()}
        file = join(self.path, MANIFEST)
        for leaf in leaves(tree):
            if not isinstance(leaf, TensorLeaf) or leaf.key_impl is None:
                continue
            stored = entries.get(leaf.tensor) if pieces is None else pieces.tensors[leaf.tensor]
            if stored is None:
                continue
            dtype = DTYPES[stored.dtype] if isinstance(stored.dtype, str) else stored.dtype
            shape, name = stored.shape, leaf.tensor
            with self._reporting("manifest"):
                prng.keys_of(shape, dtype.numpy, leaf.key_impl, file=file, tensor=name)

    def _check_pieces(self, pieces: StoredPieces) -> None:
        files = [join(self.path, name) for name in pieces.files]
        named: dict[str, set[str]] = {file: set() for file in files}
        for name, tensor in pieces.tensors.items():
            for box in pieces.boxes(name):
                file = files[box.file]
                piece = piece_name(name, tensor.shape, box)
                named[file].add(piece)
                if file not in self.headers:
                    continue
                expected = f"{tensor.dtype} {list(box.box.shape)}"
                entry = self.headers[file].tensors.get(piece)
                actual = "nothing" if entry is None else f"{entry.dtype.code} {list(entry.shape)}"
                if actual != expected:
                    text = f"{self._name(file)} has {actual} as '{piece}'"
                    self._error("pieces", f"{text}; the manifest says {expected}")
        for file, header in self.headers.items():
            for name in sorted(header.tensors.keys() - named.get(file, set())):
                text = f"{self._name(file)} holds '{name}', which the manifest does not name"
                self._error("pieces", text)
            if pieces.save_id is not None:
                with self._reporting("pieces"):
                    check_save(pieces.save_id, file, header)

    def _check_offsets(self, *, has_index: bool) -> bool:
        """Checks offsets of pieces, with an index file by file; returns whether there are some."""
        with self._reporting("pieces"):
            for file, header in self.headers.items() if has_index else ():
                pieces_by_offsets({file: header}, file)
            pieces = None if has_index else pieces_by_offsets(self.headers, self.path)
            doubt = None if pieces is None else ExtentDoubt.of(pieces, self.path)
            if doubt is not None:
                finding = Finding("pieces", str(doubt.error), is_error=doubt.is_likely)
                self.findings.append(finding)
            return pieces is not None
        return True

    def _check_stray(self, discovery: Discovery) -> None:
        if self.storage.is_file(self.path):
            return
        files = {*discovery.files}
        for name in self.storage.list(self.path):
            if name.endswith(SUFFIX) and join(self.path, name) not in files:
                note = f"{name} is not a file of this checkpoint and is ignored"
                self.findings.append(Finding("file", note, is_error=False))
