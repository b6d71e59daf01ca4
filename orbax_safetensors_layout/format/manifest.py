"""`orbax_safetensors_layout.json`: the tree, and all that safetensors files have no place for."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from typing import Literal, TypeAlias

from orbax_safetensors_layout.errors import InvalidManifestError

from .dtypes import ONE_A_BYTE, DType
from .pieces import StoredPieces, dump_pieces, parse_pieces, piece_name
from .schema import Schema, short_repr
from .strict_json import JsonError, parse_object
from .tree import Node, TensorLeaf, ValueLeaf, dump_tree, leaf_names, leaves, parse_tree

MANIFEST = "orbax_safetensors_layout.json"
VERSION = 1
MAX_MANIFEST_BYTES = 100_000_000  # 92,000 tensors in pieces over 64 files need 17 MB

Layout = Literal["hf", "sharded"]
_VERSION_KEY = "orbax_safetensors_layout"


class Unconstrained(enum.Enum):
    """The part of a spec that leaves a dimension to the compiler."""

    UNCONSTRAINED = "unconstrained"


UNCONSTRAINED = Unconstrained.UNCONSTRAINED
SpecPart: TypeAlias = str | tuple[str, ...] | Unconstrained | None


@dataclasses.dataclass(frozen=True, slots=True)
class MeshRecord:
    """A mesh of devices, which are positions in `jax.devices()`, in row-major order."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    axis_types: tuple[str, ...]
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NamedRecord:
    """A `NamedSharding`."""

    mesh: MeshRecord
    spec: tuple[SpecPart, ...]  # nothing, a mesh axis or several for each dimension
    memory_kind: str | None = None  # None where it is the devices' default


@dataclasses.dataclass(frozen=True, slots=True)
class SingleDeviceRecord:
    """A `SingleDeviceSharding`; its device is a position in `jax.devices()`."""

    device: int
    memory_kind: str | None = None


ShardingRecord: TypeAlias = NamedRecord | SingleDeviceRecord


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """A validated manifest."""

    layout: Layout
    tree: Node | None = None  # None where only a flat dict of tensors is known
    shardings: tuple[ShardingRecord, ...] = ()  # that leaves refer to by number
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)  # also in the headers
    custom: object = None  # custom metadata, any JSON value
    pieces: StoredPieces | None = None  # in layout `sharded`

    def dtypes(self) -> dict[str, DType]:
        """Return dtypes of the tensors whose sub-byte elements are stored one a byte, by name."""
        return {
            leaf.tensor: ONE_A_BYTE[leaf.dtype]
            for leaf in (() if self.tree is None else leaves(self.tree))
            if isinstance(leaf, TensorLeaf) and leaf.dtype is not None
        }

    def dtypes_in_files(self) -> dict[str, DType]:
        """Return `dtypes` by the names that tensors, or their pieces, have in the files."""
        dtypes, pieces = self.dtypes(), self.pieces
        if pieces is None:
            return dtypes
        return {
            piece_name(name, pieces.tensors[name].shape, box): dtype
            for name, dtype in dtypes.items()
            for box in pieces.boxes(name)
        }

    def values(self) -> dict[str, bool | int | float | str]:
        """Return what was saved beside the tensors, by name."""
        named = () if self.tree is None else leaf_names(self.tree)
        return {name: leaf.value for name, leaf in named if isinstance(leaf, ValueLeaf)}

    def stamped(self, save_id: str) -> Manifest:
        """Return the manifest of one save, whose id is in its files of pieces, if it has any."""
        if self.pieces is None:
            return self
        return dataclasses.replace(self, pieces=dataclasses.replace(self.pieces, save_id=save_id))

    def to_json(self) -> bytes:
        """Return the file's bytes, one member a line; a Value- or TypeError if it is not JSON."""
        document: dict[str, object] = {_VERSION_KEY: VERSION, "layout": self.layout}
        if self.tree is not None:
            document["tree"] = dump_tree(self.tree)
        if self.shardings:
            document["shardings"] = [_dump_sharding(record) for record in self.shardings]
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
    """Parses and validates the bytes of a manifest file."""
    schema = Schema(file)
    with schema.parsing("the manifest"):
        return _parse(_document(data.decode(), schema), schema)


def _document(text: str, schema: Schema) -> dict[str, object]:
    document = parse_object(text)
    version = document.get(_VERSION_KEY)
    if type(version) is not int or version < 1:
        problem = f"malformed version {_VERSION_KEY!r}"
        schema.raise_error(problem, "a positive integer", short_repr(version))
    if version > VERSION:
        raise InvalidManifestError(
            "the checkpoint was written by a newer version of this package",
            file=schema.file,
            expected=f"format version: at most {VERSION}",
            found=version,
            hint="Upgrade with `pip install --upgrade orbax-safetensors-layout`.",
        )
    return document


def _parse(document: dict[str, object], schema: Schema) -> Manifest:
    layout = document.get("layout")
    if layout not in ("hf", "sharded"):
        schema.raise_error("unknown layout", "'hf' or 'sharded'", short_repr(layout))
    shardings = tuple(
        _parse_sharding(raw, schema)
        for raw in schema.items(document.get("shardings", []), "shardings")
    )
    tree = pieces = None
    if "tree" in document:
        tree = parse_tree(document["tree"], schema, shardings=len(shardings))
    if "pieces" in document:
        pieces = parse_pieces(document["pieces"], schema)
    if (pieces is not None) != (layout == "sharded"):
        expected = "pieces in layout 'sharded', and there alone"
        found = f"layout {layout!r} {'without' if pieces is None else 'with'} pieces"
        schema.raise_error("layout and pieces do not fit", expected, found)
    if tree is not None and pieces is not None:
        _check_stored(tree, pieces, schema)
    metadata = schema.members(document.get("metadata", {}), "metadata")
    return Manifest(
        layout,
        tree,
        shardings,
        {key: schema.text(value, "metadata") for key, value in metadata.items()},
        _parse_custom(document, schema),
        pieces,
    )


def _dump_sharding(record: ShardingRecord) -> dict[str, object]:
    if isinstance(record, SingleDeviceRecord):
        return {"device": record.device, "memory_kind": record.memory_kind}
    mesh = record.mesh
    return {
        "mesh": dict(zip(mesh.axis_names, mesh.sizes, strict=True)),
        "axis_types": mesh.axis_types,
        "devices": mesh.devices,
        "spec": [
            {part.value: True} if isinstance(part, Unconstrained) else part for part in record.spec
        ],
        "memory_kind": record.memory_kind,
    }


def _parse_sharding(raw: object, schema: Schema) -> ShardingRecord:
    fields = schema.members(raw, "sharding")
    memory_kind = fields.get("memory_kind")
    if memory_kind is not None:
        memory_kind = schema.text(memory_kind, "memory kind")
    if "device" in fields:
        return SingleDeviceRecord(schema.size(fields["device"], "device"), memory_kind)
    mesh = _mesh(fields, schema)
    spec = tuple(_part(part, schema) for part in schema.items(fields.get("spec"), "spec"))
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    axes = [axis for part in parts for axis in part if isinstance(axis, str)]
    if not set(axes) <= set(mesh.axis_names) or len(set(axes)) != len(axes):
        expected = f"each of the mesh axes {short_repr(mesh.axis_names)} at most once"
        schema.raise_error("malformed spec", expected, short_repr(spec))
    return NamedRecord(mesh, spec, memory_kind)


def _mesh(fields: dict[str, object], schema: Schema) -> MeshRecord:
    axes = schema.members(fields.get("mesh"), "mesh")
    sizes = tuple(schema.size(size, "size of a mesh axis") for size in axes.values())
    types = schema.texts(fields.get("axis_types"), "axis types")
    devices = schema.sizes(fields.get("devices"), "devices of a mesh")
    fits = len(types) == len(axes) and math.prod(sizes) == len(set(devices)) == len(devices)
    if not fits or not devices:
        expected = "a type for each axis, and distinct devices, as many as the sizes multiply to"
        found = f"axes {short_repr(axes)}, {len(types)} types, {len(devices)} devices"
        schema.raise_error("malformed mesh", expected, found)
    return MeshRecord(tuple(axes), sizes, types, devices)


def _part(raw: object, schema: Schema) -> SpecPart:
    if raw is None:
        return None
    if isinstance(raw, list):
        return schema.texts(raw, "spec")
    if raw == {UNCONSTRAINED.value: True}:
        return UNCONSTRAINED
    return schema.text(raw, "spec")


def _check_stored(tree: Node, pieces: StoredPieces, schema: Schema) -> None:
    tensors = [leaf for leaf in leaves(tree) if isinstance(leaf, TensorLeaf)]
    missing = [leaf.tensor for leaf in tensors if leaf.tensor not in pieces.tensors]
    if missing:
        problem = "the tree names tensors that have no pieces"
        found = f"none of {len(missing)}: {short_repr(missing)}"
        schema.raise_error(problem, "pieces of every tensor of the tree", found, missing[0])
    for leaf in tensors:
        code = pieces.tensors[leaf.tensor].dtype
        if leaf.dtype is not None and ONE_A_BYTE[leaf.dtype].code != code:
            problem = "the tree records a dtype that does not fit the pieces' code"
            expected = f"{ONE_A_BYTE[leaf.dtype].code} for {leaf.dtype}"
            schema.raise_error(problem, expected, code, leaf.tensor)


def _dump_custom(custom: object) -> dict[str, object]:
    """The custom metadata as it is, or as text where it is JSON to Python alone, as NaN is."""
    try:
        parse_object(json.dumps({"custom": custom}))
    except JsonError:
        return {"custom_text": json.dumps(custom)}
    return {"custom": custom}


def _parse_custom(document: dict[str, object], schema: Schema) -> object:
    if "custom_text" not in document:
        return document.get("custom")
    text = schema.text(document["custom_text"], "custom_text")
    try:
        return json.loads(text)
    except ValueError as error:
        raise schema.error("malformed custom_text", "JSON", str(error)) from error


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
