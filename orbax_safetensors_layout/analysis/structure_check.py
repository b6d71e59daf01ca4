"""Checks the structure of a checkpoint: all that headers and side files can tell."""

from __future__ import annotations

from collections import Counter

from orbax_safetensors_layout.catalog import (
    Discovery,
    check_save,
    discover,
    read_header,
    read_manifest,
)
from orbax_safetensors_layout.errors import CheckpointNotFoundError, SafetensorsLayoutError
from orbax_safetensors_layout.format import (
    DTYPES,
    MANIFEST,
    SUFFIX,
    Header,
    Manifest,
    Node,
    StoredPieces,
    TensorLeaf,
    WeightIndex,
    leaves,
    piece_name,
)
from orbax_safetensors_layout.pytree import prng
from orbax_safetensors_layout.storage import Storage, join

from .report import Finding

_MOST_FINDINGS = 10_000  # of one kind; a header of 100 MB can have two million malformed entries


class StructureCheck:
    """Compares names, headers and side files with one another.

    Attributes:
        findings: What is wrong.
        headers: The headers of the checkpoint's files, those that are well formed.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.storage = storage
        self.path = path
        self.findings: list[Finding] = []
        self.headers: dict[str, Header] = {}
        self._counts: Counter[str] = Counter()

    def check(self) -> None:
        """Adds to `findings` and `headers`."""
        discovery = self._discover()
        for file in sorted(discovery.files):
            before = self._counts["header"]
            try:
                header = read_header(self.storage, file, on_error=self._header_error)
            except SafetensorsLayoutError as error:
                self._header_error(error)
            if self._counts["header"] == before:
                self.headers[file] = header
        manifest = discovery.manifest
        if manifest is None and discovery.manifest_file is not None:
            try:
                manifest = read_manifest(self.storage, discovery.manifest_file)
            except SafetensorsLayoutError as error:
                self._error("manifest", str(error))
        if discovery.weights is not None:
            self._check_index(discovery.weights)
        pieces = None if manifest is None else manifest.pieces
        if pieces is not None:
            self._check_pieces(pieces)
        else:
            self._check_whole(manifest)
        if manifest is not None and manifest.tree is not None:
            self._check_keys(manifest.tree, pieces)
        self._check_stray(discovery)
        for kind, count in self._counts.items():
            if count > _MOST_FINDINGS:
                more = f"{count - _MOST_FINDINGS:,} more are not listed"
                self.findings.append(Finding(kind, more))

    def _discover(self) -> Discovery:
        """Return the files of the checkpoint; all that are there, where these are not known."""

        def on_error(error: SafetensorsLayoutError) -> None:
            self._error("manifest" if MANIFEST in (error.file or "") else "index", str(error))

        try:
            return discover(self.storage, self.path, on_error=on_error)
        except CheckpointNotFoundError:
            raise
        except SafetensorsLayoutError as error:
            on_error(error)
        names = [] if self.storage.is_file(self.path) else self.storage.list(self.path)
        files = [join(self.path, name) for name in names if name.endswith(SUFFIX)]
        return Discovery(self.path, files)

    def _header_error(self, error: SafetensorsLayoutError) -> None:
        self._error("header", str(error))

    def _error(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= _MOST_FINDINGS:
            self.findings.append(Finding(kind, text))

    def name(self, file: str) -> str:
        """A file's name, relative to the checkpoint."""
        return file.removeprefix(f"{self.path.rstrip('/')}/")

    def _check_index(self, index: WeightIndex) -> None:
        file_of = {name: join(self.path, file) for name, file in index.weight_map.items()}
        for name, file in file_of.items():
            header = self.headers.get(file)
            if header is not None and name not in header.tensors:
                text = f"the index says that '{name}' is in {self.name(file)}; it is not"
                self._error("index", text)
        total = 0
        for file, header in self.headers.items():
            for name, entry in header.tensors.items():
                total += entry.nbytes
                if file_of.get(name) != file:
                    where = self.name(file_of[name]) if name in file_of else "no file"
                    text = f"{self.name(file)} holds '{name}'; the index says {where}"
                    self._error("index", text)
        size = index.metadata.get("total_size")
        is_known = isinstance(size, int | float) and len(self.headers) == len(index.files)
        if is_known and size != total:
            self._error("index", f"total_size of the index is {size}; the tensors have {total}")

    def _check_whole(self, manifest: Manifest | None) -> None:
        """Checks tensors that are stored whole: each in one file, and those of the tree alone."""
        first: dict[str, str] = {}
        for file, header in self.headers.items():
            for name in header.tensors:
                other = first.setdefault(name, file)
                if other != file:
                    text = f"'{name}' is in both {self.name(other)} and {self.name(file)}"
                    self._error("file", text)
        if manifest is None or manifest.tree is None or not self.headers:
            return
        named = {leaf.tensor for leaf in leaves(manifest.tree) if isinstance(leaf, TensorLeaf)}
        for name in sorted(named - first.keys()):
            self._error("manifest", f"the manifest names '{name}', which no file holds")
        for name in sorted(first.keys() - named):
            self._error("manifest", f"a file holds '{name}', which the manifest does not name")

    def _check_keys(self, tree: Node, pieces: StoredPieces | None) -> None:
        """Checks that tensors that are recorded as PRNG keys can be data of such."""
        keys = [leaf for leaf in leaves(tree) if isinstance(leaf, TensorLeaf) and leaf.key_impl]
        entries = {e.name: e for header in self.headers.values() for e in header.tensors.values()}
        for leaf in keys:
            stored = entries.get(leaf.tensor) if pieces is None else pieces.tensors[leaf.tensor]
            if stored is None or leaf.key_impl is None:
                continue
            dtype = DTYPES[stored.dtype] if isinstance(stored.dtype, str) else stored.dtype
            try:
                prng.keys_of(
                    stored.shape,
                    dtype.numpy,
                    leaf.key_impl,
                    file=join(self.path, MANIFEST),
                    tensor=leaf.tensor,
                )
            except SafetensorsLayoutError as error:
                self._error("manifest", str(error))

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
                found = "nothing" if entry is None else f"{entry.dtype.code} {list(entry.shape)}"
                if found != expected:
                    text = (
                        f"{self.name(file)} has {found} as '{piece}'; the manifest says {expected}"
                    )
                    self._error("pieces", text)
        for file, header in self.headers.items():
            for name in sorted(header.tensors.keys() - named.get(file, set())):
                text = f"{self.name(file)} holds '{name}', which the manifest does not name"
                self._error("pieces", text)
            if pieces.save_id is not None:
                try:
                    check_save(pieces.save_id, file, header)
                except SafetensorsLayoutError as error:
                    self._error("pieces", str(error))

    def _check_stray(self, discovery: Discovery) -> None:
        if self.storage.is_file(self.path):
            return
        for name in self.storage.list(self.path):
            if name.endswith(SUFFIX) and join(self.path, name) not in discovery.files:
                note = f"{name} is not a file of this checkpoint and is ignored"
                self.findings.append(Finding("file", note, is_error=False))
