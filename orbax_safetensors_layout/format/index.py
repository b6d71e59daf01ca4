"""`model.safetensors.index.json`, parsed into types: which file holds which tensor."""

from __future__ import annotations

import dataclasses
import re

from orbax_safetensors_layout.errors import InvalidIndexError

from . import strict_json
from .schema import Schema

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
    kind: type | None = None  # of the weight map
    metadata: object = None
    names: dict[str, str] = {}  # one string object per file, not one per tensor
    weight_map: dict[str, str] = {}
    with schema.parsing("the index"):
        text = data.decode().lstrip(" \t\n\r")
        for outer, key, value in strict_json.members(text, ("weight_map",)):
            strict_json.refuse_lone_surrogate(key)
            if outer is not None:
                weight_map[key] = _file_name(key, value, names, schema)
                continue
            plain = strict_json.plain(value)  # other members are checked, and not kept
            if key == "weight_map":
                kind = type(value)
            elif key == "metadata":
                metadata = plain
    if kind is not tuple:
        found = "nothing" if kind is None or kind is type(None) else kind.__name__
        expected = "an object 'weight_map' of tensor names to file names"
        schema.raise_error("the index has no weight_map", expected, found)
    if not isinstance(metadata, dict | None):
        schema.raise_error("malformed metadata", "an object", type(metadata).__name__)
    return WeightIndex(weight_map, metadata or {})


def _file_name(tensor: str, name: object, names: dict[str, str], schema: Schema) -> str:
    if not isinstance(name, str):
        found = repr(strict_json.plain(name))[:80]
        schema.raise_error("malformed weight_map", "a file name", found, tensor)
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
