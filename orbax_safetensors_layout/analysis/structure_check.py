"""Whether the structure of a checkpoint is sound: all that headers and side files can tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from orbax_safetensors_layout.catalog import (
    Discovery,
    check_save,
    discover,
    read_header,
    read_manifest,
)
from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.format import (
    MANIFEST,
    SUFFIX,
    Header,
    Manifest,
    StoredPieces,
    TensorEntry,
    TensorLeaf,
    leaves,
    piece_name,
)
from orbax_safetensors_layout.storage import Storage, join

from .report import Finding

_MOST_FINDINGS = 10_000  # of one kind; a header of 100 MB can have two million malformed entries


class StructureCheck:
    """What names, headers and side files say, each held against the others.

    Attributes:
        storage: Where the checkpoint is.
        path: The checkpoint.
        findings: What is wrong.
        headers: The headers of its files, those that are well formed.

    Args:
        storage: Where the checkpoint is.
        path: The checkpoint.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self.findings: list[Finding] = []
        self.headers: dict[str, Header] = {}
        self._counts: Counter[str] = Counter()

    def check(self) -> None:
        """Finds what is wrong."""
        found = _survey_all(self.storage, self.path, self._error)
        if found is None:
            return
        for file in sorted(found.files):
            before = self._counts["header"]
            try:
                header = read_header(self.storage, file, on_error=self._header_error)
            except SafetensorsLayoutError as error:
                self._header_error(error)
            if self._counts["header"] == before:
                self.headers[file] = header
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
        for kind, count in self._counts.items():
            if count > _MOST_FINDINGS:
                more = f"{count - _MOST_FINDINGS:,} more are not listed"
                self.findings.append(Finding(kind, more))

    def _header_error(self, error: SafetensorsLayoutError) -> None:
        self._error("header", str(error))

    def _error(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= _MOST_FINDINGS:
            self.findings.append(Finding(kind, text))

    def name(self, file: str) -> str:
        """A file's name, relative to the checkpoint."""
        return file.removeprefix(f"{self.path.rstrip('/')}/")

    def _check_index(self, found: Discovery) -> None:
        assert found.weights is not None
        file_of = {n: join(self.path, file) for n, file in found.weights.weight_map.items()}
        for name, file in file_of.items():
            header = self.headers.get(file)
            if header is not None and name not in header.tensors:
                self._error(
                    "index", f"the index says that '{name}' is in {self.name(file)}; it is not"
                )
        total = 0
        for file, header in self.headers.items():
            for name, entry in header.tensors.items():
                total += entry.nbytes
                if file_of.get(name) != file:
                    where = self.name(file_of[name]) if name in file_of else "no file"
                    self._error(
                        "index", f"{self.name(file)} holds '{name}'; the index says {where}"
                    )
        said = found.weights.metadata.get("total_size")
        is_known = isinstance(said, int | float) and len(self.headers) == len(found.weights.files)
        if is_known and said != total:
            self._error("index", f"total_size of the index is {said}; the tensors have {total}")

    def _check_repeated(self) -> None:
        first: dict[str, str] = {}
        for file, header in self.headers.items():
            for name in header.tensors:
                other = first.setdefault(name, file)
                if other != file:
                    self._error(
                        "file", f"'{name}' is in both {self.name(other)} and {self.name(file)}"
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
                            f"{self.name(file)} has {found} as '{piece}'; the manifest says"
                            f" {expected}",
                        )
        for file, header in self.headers.items():
            for name in sorted(set(header.tensors) - wanted.get(file, set())):
                self._error(
                    "pieces", f"{self.name(file)} holds '{name}', which the manifest does not name"
                )
            if pieces.save_id is not None:
                try:
                    check_save(pieces.save_id, file, header)
                except SafetensorsLayoutError as error:
                    self._error("pieces", str(error))

    def _check_stray(self, found: Discovery) -> None:
        if self.storage.is_file(self.path):
            return
        for name in self.storage.list(self.path):
            if name.endswith(SUFFIX) and join(self.path, name) not in found.files:
                note = f"{name} belongs to nothing and is ignored"
                self.findings.append(Finding("file", note, is_error=False))


def _survey_all(storage: Storage, path: str, tell: Callable[[str, str], None]) -> Discovery | None:
    """What is at a path; where that is not known, the files by themselves, and why.

    Args:
        storage: Where the checkpoint is.
        path: The checkpoint.
        tell: Is given the kind and the text of what is wrong.

    Raises:
        CheckpointNotFoundError: There is nothing there.
    """

    def told(error: SafetensorsLayoutError) -> None:
        tell("manifest" if MANIFEST in (error.file or "") else "index", str(error))

    try:
        return discover(storage, path, on_error=told)
    except SafetensorsLayoutError as error:
        if isinstance(error, FileNotFoundError):
            raise
        told(error)
    names = [] if storage.is_file(path) else storage.list(path)
    return Discovery(path, [join(path, name) for name in names if name.endswith(SUFFIX)])


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype.code} {list(entry.shape)}"
