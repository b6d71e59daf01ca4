"""The manifest, `orbax_safetensors_layout.json`: what safetensors files have no place for.

The `.safetensors` files are plain and complete for other tools. This file lets a tree come back as
it was: containers, leaves that are not tensors, shardings, and, where tensors are stored in pieces,
which box is in which file.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

from orbax_safetensors_layout.errors import InvalidManifestError

from . import strict_json
from .dtypes import ONE_A_BYTE, DType
from .pieces import StoredPieces, dump_pieces, parse_pieces
from .schema import Schema, short_repr
from .shardings import ShardingRecord, dump_sharding, parse_sharding
from .tree import Node, TensorLeaf, dump_tree, leaves, parse_tree

MANIFEST = "orbax_safetensors_layout.json"
VERSION = 1
MAX_MANIFEST_BYTES = 100_000_000  # 92,000 tensors in pieces over 64 files need 17 MB

Layout = Literal["hf", "sharded"]
_VERSION_KEY = "orbax_safetensors_layout"


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A validated manifest.

    Attributes:
        layout: `hf` for tensors stored whole, `sharded` for pieces.
        tree: The tree with its leaves; None where only a flat dict of tensors is known.
        shardings: The shardings that leaves refer to by number.
        metadata: Custom metadata, strings; they are in the tensor files' headers as well.
        custom: Custom metadata, any JSON value.
        pieces: The pieces, in layout `sharded`.
    """

    layout: Layout
    tree: Node | None = None
    shardings: tuple[ShardingRecord, ...] = ()
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    custom: object = None
    pieces: StoredPieces | None = None

    def dtypes(self) -> dict[str, DType]:
        """Return dtypes of the tensors whose sub-byte elements are stored one a byte, by name."""
        return {
            leaf.tensor: ONE_A_BYTE[leaf.dtype]
            for leaf in (() if self.tree is None else leaves(self.tree))
            if isinstance(leaf, TensorLeaf) and leaf.dtype is not None
        }

    def stamped(self, save_id: str) -> Manifest:
        """Return the manifest of one save, whose id is in its files of pieces, if it has any."""
        if self.pieces is None:
            return self
        pieces = dataclasses.replace(self.pieces, save_id=save_id)
        return dataclasses.replace(self, pieces=pieces)

    def to_json(self) -> bytes:
        """Return the file's bytes: one member a line, the same bytes for the same manifest.

        Raises:
            TypeError: The custom metadata is not a JSON value.
            ValueError: A name is not Unicode text.
            InvalidManifestError: It is larger than what is read again.
        """
        document: dict[str, object] = {_VERSION_KEY: VERSION, "layout": self.layout}
        if self.tree is not None:
            document["tree"] = dump_tree(self.tree)
        if self.shardings:
            document["shardings"] = [dump_sharding(record) for record in self.shardings]
        if self.metadata:
            document["metadata"] = self.metadata
        if self.custom is not None:
            document |= _dump_custom(self.custom)
        if self.pieces is not None:
            document["pieces"] = dump_pieces(self.pieces)
        lines = [f"{_dumps(key)}:{_dumps(value)}" for key, value in document.items()]
        data = "{\n{}\n}\n".replace("{}", ",\n".join(lines)).encode()
        InvalidManifestError.check_size(
            "the manifest",
            len(data),
            MAX_MANIFEST_BYTES,
            file=MANIFEST,
            hint="Store long texts and large custom metadata in files of their own.",
        )
        return data


def parse_manifest(data: bytes, *, file: str) -> Manifest:
    """Parses and validates the bytes of a manifest file.

    Raises:
        InvalidManifestError: It is not JSON, repeats a key, is of a newer version, or is malformed.
        UnsupportedDtypeError: A piece has a dtype that the format does not define.
    """
    checks = Schema(file)
    with checks.parsing("the manifest"):
        return _parse(_document(data.decode(), checks), checks)


def _document(text: str, checks: Schema) -> dict[str, object]:
    """Return the members, raw, of a version that this package reads."""
    document: dict[str, object] = {}
    look_closely = strict_json.has_surrogate_escape(text)
    whole = strict_json.members(text.lstrip(" \t\n\r"), longest=strict_json.UNBOUNDED)
    for _, key, value in whole:
        if look_closely:
            strict_json.refuse_unreadable(value)
        document[key] = value
    version = document.get(_VERSION_KEY)
    if type(version) is not int or version < 1:
        problem = f"malformed version {_VERSION_KEY!r}"
        checks.refuse(problem, "a positive integer", short_repr(version))
    if version > VERSION:
        raise InvalidManifestError(
            "the checkpoint was written by a newer version of this package",
            file=checks.file,
            expected=f"format version: at most {VERSION}",
            found=version,
            hint="Upgrade with `pip install --upgrade orbax-safetensors-layout`.",
        )
    return document


def _parse(document: dict[str, object], checks: Schema) -> Manifest:
    layout = document.get("layout")
    if layout not in ("hf", "sharded"):
        checks.refuse("unknown layout", "'hf' or 'sharded'", short_repr(layout))
    shardings = tuple(
        parse_sharding(raw, checks)
        for raw in checks.items(document.get("shardings", []), "shardings")
    )
    tree = pieces = None
    if "tree" in document:
        tree = parse_tree(document["tree"], checks, shardings=len(shardings))
    if "pieces" in document:
        pieces = parse_pieces(document["pieces"], checks)
    if (pieces is not None) != (layout == "sharded"):
        expected = "pieces in layout 'sharded', and there alone"
        found = f"layout {layout!r} {'without' if pieces is None else 'with'} pieces"
        checks.refuse("layout and pieces do not fit", expected, found)
    if tree is not None and pieces is not None:
        _check_stored(tree, pieces, checks)
    metadata = checks.members(document.get("metadata", ()), "metadata")
    return Manifest(
        layout,
        tree,
        shardings,
        {key: checks.text(value, "metadata") for key, value in metadata.items()},
        _parse_custom(document, checks),
        pieces,
    )


def _check_stored(tree: Node, pieces: StoredPieces, checks: Schema) -> None:
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, TensorLeaf)]
    missing = [leaf.tensor for leaf in tensors if leaf.tensor not in pieces.tensors]
    if missing:
        problem = "the tree names tensors that have no pieces"
        found = f"none of {len(missing)}: {short_repr(missing)}"
        checks.refuse(problem, "pieces of every tensor of the tree", found, missing[0])
    for leaf in tensors:
        code = pieces.tensors[leaf.tensor].dtype
        if leaf.dtype is not None and ONE_A_BYTE[leaf.dtype].code != code:
            problem = "the tree records a dtype that does not fit the pieces' code"
            expected = f"{ONE_A_BYTE[leaf.dtype].code} for {leaf.dtype}"
            checks.refuse(problem, expected, code, leaf.tensor)


def _dump_custom(custom: object) -> dict[str, object]:
    """The custom metadata as it is, or as text where it is JSON to Python alone, as NaN is."""
    text = json.dumps({"custom": custom})
    try:
        for _, _, value in strict_json.members(text, longest=strict_json.UNBOUNDED):
            strict_json.refuse_unreadable(value)
    except strict_json.JsonError:
        return {"custom_text": json.dumps(custom)}
    return {"custom": custom}


def _parse_custom(document: dict[str, object], checks: Schema) -> object:
    if "custom_text" not in document:
        return strict_json.plain(document.get("custom"))
    text = checks.text(document["custom_text"], "custom_text")
    try:
        return json.loads(text)
    except ValueError as error:
        raise checks.error("malformed custom_text", "JSON", str(error)) from error


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
