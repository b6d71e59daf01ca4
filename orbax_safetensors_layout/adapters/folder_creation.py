"""Reports folders that Orbax cannot make to all processes.

Orbax makes the folders of a save on its first process; the others wait for it, up to five minutes.
Where it makes them in the background (v0's default), handlers take part in the waiting; see
`_orbax.folders_being_made`. Otherwise its functions are watched, for every handler:

1. The first process remembers an error, tells it the others, and meets them as if all were well.
2. Having met, the first process raises the error, and each of the others a `PeerError`.

Without an error, each of the others asks the key-value store once more than Orbax does.
"""

from __future__ import annotations

import asyncio
import os
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import jax

from orbax_safetensors_layout.errors import PeerError
from orbax_safetensors_layout.reading import DistributedStore

from . import _orbax

_PREFIX = "orbax_safetensors_layout/folders"


class WatchedFolders:
    """The folders of one save, with what goes wrong while they are made.

    Args:
        operation: Orbax's number of the save, the same on all processes.
        paths: The `TemporaryPath`s to make.
        subdirectories: Names of the folders to make in each of them.
    """

    def __init__(self, operation: str, paths: Sequence[Any], subdirectories: Iterable[str]) -> None:
        self._folder = os.fspath(paths[0].get())
        self._key = f"{_PREFIX}/{operation}/{urllib.parse.quote(self._folder, safe='')}"
        self._error: Exception | None = None
        names = tuple(subdirectories)
        self.paths = [_WatchedPath(path, names, self._report) for path in paths]

    def _report(self, error: Exception) -> None:
        self._error = error
        text = f"process {jax.process_index()} failed while making the folder: {error}"
        DistributedStore.connect().renew(self._key, text)

    async def make(self, make: Callable[[], Awaitable[None]]) -> None:
        """Awaits what makes `paths`, and ends with a barrier.

        Raises:
            PeerError: Another process could not make its folders.
            Exception: This process could not.
        """
        await make()
        if self._error is not None:
            raise self._error
        text = DistributedStore.connect().peek(self._key)
        if text is not None:
            raise PeerError(text, file=self._folder)


class _WatchedPath:
    """Has the one method of a `TemporaryPath` that makes it."""

    def __init__(self, path: Any, names: tuple[str, ...], report: Any) -> None:
        self._path = path
        self._names = names
        self._report = report

    async def create(self) -> Any:
        try:
            folder = await self._path.create()
            await asyncio.gather(*(_orbax.make_folder(folder / name) for name in self._names))
        except Exception as error:
            self._report(error)
        return self._path.get()
