"""Where a checkpoint's tree stands."""

from __future__ import annotations

from typing import NamedTuple


class CheckpointRef(NamedTuple):
    """A checkpoint's tree.

    Attributes:
        path: Its folder or file.
        is_orbax: Whether Orbax saved it, in its own format.
        item: The item that it is, of a checkpoint of several.
    """

    path: str
    is_orbax: bool
    item: str | None
