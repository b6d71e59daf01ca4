"""Whether a checkpoint is whole: its structure, its checksums, and its values against another's."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.format.digests import DIGESTS, MAX_DIGESTS_BYTES, parse_digests
from orbax_safetensors_layout.format.header import Header, TensorEntry
from orbax_safetensors_layout.format.headers import read_header, read_range
from orbax_safetensors_layout.format.index import SUFFIX
from orbax_safetensors_layout.format.manifest import MANIFEST, Manifest, TensorLeaf, leaves
from orbax_safetensors_layout.format.piece_catalog import check_save
from orbax_safetensors_layout.format.pieces import StoredPieces, piece_name
from orbax_safetensors_layout.format.survey import Survey, read_manifest, survey
from orbax_safetensors_layout.options import MIB, Progress, ReadOptions
from orbax_safetensors_layout.storage.base import Storage, join
from orbax_safetensors_layout.storage.resolve import open_storage
from orbax_safetensors_layout.transfer.progress import progress_callback

PathLike = str | os.PathLike[str]
_BLOCK_BYTES = 8 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or, as a note, that should be known.

    Attributes:
        kind: Of what kind: `header`, `index`, `file`, `manifest`, `pieces`, `digest`, `value`.
        text: What it is; names file and tensor.
        is_error: Whether the checkpoint is at fault; otherwise it is a note.
    """

    kind: str
    text: str
    is_error: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What `verify` has found.

    Attributes:
        path: The checkpoint.
        findings: All of them.
        files: Files whose headers were read.
        tensors: Tensors, or pieces of such, in them.
        digested_files: Files whose contents were held against their checksums.
        compared_tensors: Tensors that were held against another checkpoint's.
        compared_bytes: Their bytes.
    """

    path: str
    findings: tuple[Finding, ...]
    files: int = 0
    tensors: int = 0
    digested_files: int = 0
    compared_tensors: int = 0
    compared_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.is_error for finding in self.findings)

    def __str__(self) -> str:
        lines = [
            f"{finding.kind}{'' if finding.is_error else ' (note)'}: {finding.text}"
            for finding in self.findings
        ]
        facts = [f"{self.files:,} files", f"{self.tensors:,} tensors"]
        if self.digested_files:
            facts.append(f"{self.digested_files:,} checksums")
        if self.compared_tensors:
            facts.append(f"{self.compared_tensors:,} tensors compared")
        errors = sum(finding.is_error for finding in self.findings)
        verdict = "whole" if self.ok else f"{errors:,} finding{'' if errors == 1 else 's'}"
        return "\n".join([*lines, f"{self.path}: {verdict} ({', '.join(facts)})"])


def verify(
    path: PathLike,
    against: PathLike | None = None,
    *,
    mapping: Any = None,
    digests: bool = True,
    options: ReadOptions | None = None,
) -> Report:
    """Looks whether a checkpoint is whole; finds all that is wrong, not the first.

    Structure: every header; the index or the manifest against the headers; sizes, missing, stray
    and doubly held tensors; pieces. Contents: the checksums that a save with
    `WriteOptions(digests=True)` left. Values: bit by bit against another checkpoint, whose files
    may be cut otherwise. Tensors are read in blocks, in bounded memory.

    Args:
        path: The checkpoint.
        against: Another, which must have the same tensors.
        mapping: What the tensors of `path` are made of in `against`, an `osl.Mapping`.
        digests: Whether to hold files against their checksums, where there are any; that reads
            all of them.
        options: How to read: `memory_budget_bytes`, `progress` and the cost model count.

    Raises:
        CheckpointNotFoundError: Nothing stands at a path.
        StorageError: A read failed.
        MappingError: The mapping does not fit.

    Example:
        >>> import tempfile, numpy as np
        >>> import orbax_safetensors_layout as osl
        >>> folder = tempfile.mkdtemp()
        >>> osl.save(folder, {"w": np.arange(4)}, options=osl.WriteOptions(digests=True))
        >>> print(osl.verify(folder))
        /tmp/...: whole (1 files, 1 tensors, 3 checksums)
    """
    options = options or ReadOptions()
    storage, place = open_storage(path)
    with storage, progress_callback(options.progress) as progress:
        structure = _Structure(storage, place)
        structure.check()
        digested = _check_digests(structure, progress) if digests else 0
        report = Report(
            place,
            tuple(structure.findings),
            files=len(structure.headers),
            tensors=sum(len(header.tensors) for header in structure.headers.values()),
            digested_files=digested,
        )
        if against is None or not report.ok:
            return report
        from orbax_safetensors_layout.comparison import compare

        compared = compare(path, against, mapping=mapping, options=options, progress=progress)
    return dataclasses.replace(
        report,
        findings=(
            *report.findings,
            *(Finding("value", text) for text in compared.differences),
        ),
        compared_tensors=compared.tensors,
        compared_bytes=compared.nbytes,
    )


class _Structure:
    """What names, headers and side files say, each held against the others.

    Args:
        storage: Where the checkpoint is.
        path: The checkpoint.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self.findings: list[Finding] = []
        self.headers: dict[str, Header] = {}

    def check(self) -> None:
        """Finds what is wrong."""
        found = _survey_all(self.storage, self.path, self._error)
        if found is None:
            return
        for file in sorted(found.files):
            try:
                self.headers[file] = read_header(self.storage, file)
            except SafetensorsLayoutError as error:
                self._error("header", str(error))
        manifest = found.manifest
        if manifest is None and found.manifest_file is not None:
            try:
                manifest = read_manifest(self.storage, found.manifest_file)
            except SafetensorsLayoutError as error:
                self._error("manifest", str(error))
        if found.weights is not None:
            self._check_index(found)
        pieces = None if manifest is None else manifest.pieces
        if pieces is not None:
            self._check_pieces(pieces)
        else:
            self._check_repeated()
            if manifest is not None:
                self._check_tree(manifest)
        self._check_stray(found)

    def _error(self, kind: str, text: str) -> None:
        self.findings.append(Finding(kind, text))

    def _name(self, file: str) -> str:
        return file.removeprefix(f"{self.path.rstrip('/')}/")

    def _check_index(self, found: Survey) -> None:
        assert found.weights is not None
        file_of = {n: join(self.path, file) for n, file in found.weights.weight_map.items()}
        for name, file in file_of.items():
            header = self.headers.get(file)
            if header is not None and name not in header.tensors:
                self._error(
                    "index", f"the index says that '{name}' is in {self._name(file)}; it is not"
                )
        total = 0
        for file, header in self.headers.items():
            for name, entry in header.tensors.items():
                total += entry.nbytes
                if file_of.get(name) != file:
                    where = self._name(file_of[name]) if name in file_of else "no file"
                    self._error(
                        "index", f"{self._name(file)} holds '{name}'; the index says {where}"
                    )
        said = found.weights.metadata.get("total_size")
        is_known = isinstance(said, int | float) and len(self.headers) == len(found.files)
        if is_known and said != total:
            self._error("index", f"total_size of the index is {said}; the tensors have {total}")

    def _check_repeated(self) -> None:
        first: dict[str, str] = {}
        for file, header in self.headers.items():
            for name in header.tensors:
                other = first.setdefault(name, file)
                if other != file:
                    self._error(
                        "file", f"'{name}' is in both {self._name(other)} and {self._name(file)}"
                    )

    def _check_tree(self, manifest: Manifest) -> None:
        """The tensors that the tree of the manifest names."""
        held = {name for header in self.headers.values() for name in header.tensors}
        if manifest.tree is None or len(self.headers) == 0:
            return
        named = {leaf.tensor for leaf in leaves(manifest.tree) if isinstance(leaf, TensorLeaf)}
        for name in sorted(named - held):
            self._error("manifest", f"the manifest names '{name}', which no file holds")
        for name in sorted(held - named):
            self._error("manifest", f"a file holds '{name}', which the manifest does not name")

    def _check_pieces(self, pieces: StoredPieces) -> None:
        files = [join(self.path, name) for name in pieces.files]
        wanted: dict[str, set[str]] = {file: set() for file in files}
        for name, tensor in pieces.tensors.items():
            for box in pieces.boxes(name):
                file = files[box.file]
                piece = piece_name(name, tensor.shape, box)
                wanted[file].add(piece)
                if file in self.headers:
                    expected = f"{tensor.dtype} {list(box.box.shape)}"
                    entry = self.headers[file].tensors.get(piece)
                    found = "nothing" if entry is None else _kind(entry)
                    if found != expected:
                        self._error(
                            "pieces",
                            f"{self._name(file)} has {found} as '{piece}'; the manifest says"
                            f" {expected}",
                        )
        for file, header in self.headers.items():
            for name in sorted(set(header.tensors) - wanted.get(file, set())):
                self._error(
                    "pieces", f"{self._name(file)} holds '{name}', which the manifest does not name"
                )
            if pieces.save_id is not None:
                try:
                    check_save(pieces.save_id, file, header)
                except SafetensorsLayoutError as error:
                    self._error("pieces", str(error))

    def _check_stray(self, found: Survey) -> None:
        if self.storage.is_file(self.path):
            return
        for name in self.storage.list(self.path):
            if name.endswith(SUFFIX) and join(self.path, name) not in found.files:
                note = f"{name} belongs to nothing and is ignored"
                self.findings.append(Finding("file", note, is_error=False))


def _survey_all(storage: Storage, path: str, tell: Callable[[str, str], None]) -> Survey | None:
    """What stands at a path; where that is not known, the files by themselves, and why.

    Args:
        storage: Where the checkpoint is.
        path: The checkpoint.
        tell: Is given the kind and the text of what is wrong.

    Raises:
        CheckpointNotFoundError: Nothing stands there.
    """
    try:
        return survey(storage, path)
    except SafetensorsLayoutError as error:
        if isinstance(error, FileNotFoundError):
            raise
        kind = "manifest" if MANIFEST in (error.file or "") else "index"
        tell(kind, str(error))
    names = [] if storage.is_file(path) else storage.list(path)
    return Survey([join(path, name) for name in names if name.endswith(SUFFIX)])


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype.code} {list(entry.shape)}"


def _check_digests(structure: _Structure, progress: Callable[[Progress], None] | None) -> int:
    """Holds files against their checksums; returns how many."""
    storage, folder = structure.storage, structure.path
    if storage.is_file(folder) or DIGESTS not in storage.list(folder):
        return 0
    file = join(folder, DIGESTS)
    try:
        size = min(storage.size(file), MAX_DIGESTS_BYTES)
        found = parse_digests(read_range(storage, file, 0, size), file=file)
    except SafetensorsLayoutError as error:
        structure.findings.append(Finding("digest", str(error)))
        return 0
    present = set(storage.list(folder))
    missing = sorted(set(found) - present)
    structure.findings += [
        Finding("digest", f"{name} is missing; there is a checksum of it") for name in missing
    ]
    structure.findings += [
        Finding("digest", f"{structure._name(name)} has no checksum", is_error=False)
        for name in structure.headers
        if structure._name(name) not in found
    ]
    names = sorted(set(found) & present)
    total = sum(storage.size(join(folder, name)) for name in names)
    done = 0
    for name in names:
        value = 0
        for block in _blocks(storage, join(folder, name)):
            value = zlib.crc32(block, value)
            done += len(block)
            if progress is not None:
                progress(Progress(done, total, name))
        if value != found[name]:
            text = f"{name} has CRC-32 {value:08x}; it was written with {found[name]:08x}"
            structure.findings.append(Finding("digest", text))
    return len(names)


def _blocks(storage: Storage, file: str) -> Iterator[memoryview]:
    size = storage.size(file)
    memory = memoryview(bytearray(min(size, _BLOCK_BYTES)))
    for start in range(0, size, _BLOCK_BYTES):
        block = memory[: min(_BLOCK_BYTES, size - start)]
        storage.read_into(file, start, [block])
        yield block
