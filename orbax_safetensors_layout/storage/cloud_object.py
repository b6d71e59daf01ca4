"""One look at an object in a bucket, and whether a later one sees the same."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple, Self

from orbax_safetensors_layout.errors import StorageError


class Seen(NamedTuple):
    """An object as it was when it was first looked at.

    Attributes:
        size: Its bytes.
        tag: Its ETag, if the store tells one.
        version: Its generation or version, if the store tells one. Listings do not.
        modified: When it was written.
    """

    size: int
    tag: str | None
    version: str | None
    modified: datetime.datetime

    @classmethod
    def of(cls, meta: Any) -> Self:
        """What obstore tells of an object."""
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


def replaced(file: str, offset: int, total: int) -> StorageError:
    """The error for an object that is another one than before.

    Args:
        file: Its URL.
        offset: The first byte of the range that was to be read.
        total: Its bytes.
    """
    return StorageError(
        f"the object was replaced or removed before bytes [{offset}, {offset + total}) were read",
        file=file,
        expected="the object that was there when it was first looked at",
        found="another, or none",
        hint="Load again when nothing writes to the checkpoint.",
    )


def not_alone(file: str) -> StorageError:
    """The error for an object that another program has written to, or removed.

    Args:
        file: Its URL.
    """
    return StorageError(
        "another program has written to the folder at the same time",
        file=file,
        expected="the object that this one has written",
        found="another, or none",
        hint="Save again, each program to a folder of its own.",
    )
