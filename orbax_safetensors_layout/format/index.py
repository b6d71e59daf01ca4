"""`model.safetensors.index.json`, parsed into types: which file holds which tensor."""

from __future__ import annotations

import dataclasses
import re

from orbax_safetensors_layout.errors import InvalidIndexError

from .schema import Schema, short_repr
from .strict_json import parse_object

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAIN_INDEX = "model.safetensors.index.json"

_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclasses.dataclass(frozen=True, slots=True)
class WeightIndex:
    """A validated index: tensor name to its file's, relative to the index's folder, in order."""

    weight_map: dict[str, str]
    metadata: dict[str, object]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.weight_map.values())))


def parse_index(data: bytes, *, file: str) -> WeightIndex:
    """Parses and validates an index, whose files may be in or below its folder alone."""
    schema = Schema(file, InvalidIndexError)
    with schema.parsing("the index"):
        document = parse_object(data.decode())
    if not isinstance(document.get("weight_map"), dict):
        found = type(document.get("weight_map")).__name__ if "weight_map" in document else "nothing"
        expected = "an object 'weight_map' of tensor names to file names"
        schema.raise_error("the index has no weight_map", expected, found)
    metadata = document.get("metadata")
    if not isinstance(metadata, dict | None):
        schema.raise_error("malformed metadata", "an object", type(metadata).__name__)
    names: dict[str, str] = {}  # one string object per file, not one per tensor
    weight_map = {
        tensor: _file_name(tensor, name, names, schema)
        for tensor, name in document["weight_map"].items()
    }
    return WeightIndex(weight_map, metadata or {})


def _file_name(tensor: str, name: object, names: dict[str, str], schema: Schema) -> str:
    if not isinstance(name, str):
        schema.raise_error("malformed weight_map", "a file name", short_repr(name), tensor)
    if name not in names:
        plain = re.sub(r"^(\./)+", "", name)
        check_file_name(plain, schema, tensor)
        names[name] = names.setdefault(plain, plain)
    return names[name]


def check_file_name(
    name: str, schema: Schema, tensor: str | None = None, end: str = SUFFIX
) -> None:
    """Refuses a file name that leads out of its folder on any system, or of another format."""
    leaves = (
        "\\" in name
        or _DRIVE.match(name)
        or _CONTROL.search(name)
        or any(part in ("", ".", "..") for part in name.split("/"))
    )
    if leaves:
        expected = "a file name, or a relative path without '..' and '\\'"
        schema.raise_error("a file name leads outside of its folder", expected, repr(name), tensor)
    if not name.endswith(end):
        expected = f"a name that ends in {end}"
        schema.raise_error("a file name is of another format", expected, repr(name), tensor)
