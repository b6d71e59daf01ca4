"""Objects in a bucket: what a look at one sees, and calls for many of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Self

from orbax_safetensors_layout.errors import StorageError

from .buffers import changed

_AT_ONCE = 16


class Seen(NamedTuple):
    """An object as it was when it was first looked at.

    Attributes:
        tag: Its ETag, if the store tells one.
        version: Its generation or version, if the store tells one. Listings do not.
    """

    size: int
    tag: str | None
    version: str | None
    modified: datetime.datetime

    @classmethod
    def of(cls, meta: Any) -> Self:
        tag = meta["e_tag"]
        if tag and not tag.startswith(('"', "W/")):  # Azure's listings leave the quotes out
            tag = f'"{tag}"'
        return cls(meta["size"], tag, meta["version"], meta["last_modified"])

    def is_same(self, other: Seen) -> bool:
        """Whether two looks saw one object, by all that both tell."""
        if self.size != other.size or (self.tag and other.tag and self.tag != other.tag):
            return False
        if self.version and other.version:
            return self.version == other.version
        return bool(self.tag and other.tag) or self.modified == other.modified

    def is_unwritten_since(self, other: Seen) -> bool:
        """Whether no object was written between two heads, not even an equal one."""
        return self.is_same(other) and self.modified == other.modified


def replaced(file: str, offset: int, total: int) -> StorageError:
    """Return the error for a read of `total` bytes of an object that is no longer the same."""
    during = f"bytes [{offset}, {offset + total}) were read"
    return changed(file, "the object as it was first seen", "another, or none", during)


def not_alone(file: str, expected: str = "the object that this one has written") -> StorageError:
    """Return the error for an object that another program has written or removed."""
    return StorageError(
        "another program has written to the folder at the same time",
        file=file,
        expected=expected,
        found="another, or none",
        hint="Save again, each program to a folder of its own.",
    )


def call_for_all(call: Callable[[str], None], names: Sequence[str]) -> None:
    """Calls for all names, several at once; raises the first one's error."""
    if names:
        with ThreadPoolExecutor(min(_AT_ONCE, len(names)), "safetensors-objects") as pool:
            for _ in pool.map(call, names):
                pass
