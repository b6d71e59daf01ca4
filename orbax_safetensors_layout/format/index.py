"""`model.safetensors.index.json`, parsed into types: which file holds which tensor."""

from __future__ import annotations

import dataclasses
import re

from orbax_safetensors_layout.errors import InvalidIndexError

from . import strict_json

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAIN_INDEX = "model.safetensors.index.json"

_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclasses.dataclass(frozen=True, slots=True)
class WeightIndex:
    """A validated index.

    Attributes:
        weight_map: Tensor name to the name of its file, relative to the index's folder, in the
            order of the index.
        metadata: Its `metadata`, for instance `{"total_size": 123}`; empty if there is none.
    """

    weight_map: dict[str, str]
    metadata: dict[str, object]

    @property
    def files(self) -> tuple[str, ...]:
        """The distinct file names, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def parse_index(data: bytes, *, file: str) -> WeightIndex:
    """Parses and validates an index.

    Args:
        data: The index file's bytes.
        file: The index file's path, for errors.

    Raises:
        InvalidIndexError: It is not JSON, repeats a key, has no `weight_map` of strings to strings,
            or names a file other than a `.safetensors` file in or below its folder.

    >>> data = b'{"weight_map": {"bias": "model-00001-of-00001.safetensors"}}'
    >>> parse_index(data, file="model.safetensors.index.json").files
    ('model-00001-of-00001.safetensors',)
    """
    with strict_json.errors_of("index", InvalidIndexError, file):
        return _parse(data.decode(), file)


def _parse(text: str, file: str) -> WeightIndex:
    found: dict[str, object] = {}  # other members are checked, and not kept
    names: dict[str, str] = {}  # one string object per file, not one per tensor
    weight_map: dict[str, str] = {}
    for outer, key, value in strict_json.bounded_members(text.lstrip(" \t\n\r"), ("weight_map",)):
        strict_json.refuse_lone_surrogate(key)
        if key in (weight_map if outer is not None else found):
            raise strict_json.JsonError(f"key {key!r} is repeated")
        if outer is not None:
            weight_map[key] = _file_name(key, value, names, file)
        elif key == "metadata":
            found[key] = strict_json.plain(value)
        else:
            strict_json.refuse_unreadable(value)
            found[key] = type(value)
    if found.get("weight_map") is not tuple:
        kind = found.get("weight_map", type(None))
        raise InvalidIndexError(
            "the index has no weight_map",
            file=file,
            expected="an object 'weight_map' of tensor names to file names",
            found="nothing" if kind is type(None) else getattr(kind, "__name__", ""),
        )
    return WeightIndex(weight_map, _metadata(found.get("metadata"), file))


def _file_name(tensor: str, name: object, names: dict[str, str], file: str) -> str:
    if not isinstance(name, str):
        raise InvalidIndexError(
            "malformed weight_map",
            file=file,
            tensor=tensor,
            expected="a file name",
            found=repr(strict_json.plain(name))[:80],
        )
    if name not in names:
        strict_json.refuse_lone_surrogate(name)
        check_file_name(name, tensor, file)
    return names.setdefault(name, name)


def check_file_name(name: str, tensor: str, file: str) -> None:
    """Refuses a file name of an index that leads out of its folder on any system.

    Raises:
        InvalidIndexError: The name leads out of the folder, or is not of a `.safetensors` file.
    """
    leaves = (
        "\\" in name
        or _DRIVE.match(name)
        or _CONTROL.search(name)
        or any(part in ("", ".", "..") for part in name.split("/"))
    )
    if leaves:
        raise InvalidIndexError(
            "the index names a file outside of its folder",
            file=file,
            tensor=tensor,
            expected="a file name, or a relative path without '..' and '\\'",
            found=repr(name),
        )
    if not name.endswith(SUFFIX):
        raise InvalidIndexError(
            "the index names a file of another format",
            file=file,
            tensor=tensor,
            expected=f"a name that ends in {SUFFIX}",
            found=repr(name),
        )


def _metadata(value: object, file: str) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidIndexError(
            "malformed metadata", file=file, expected="an object", found=type(value).__name__
        )
    return value
