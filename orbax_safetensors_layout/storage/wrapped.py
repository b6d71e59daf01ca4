"""A storage that reads through another one; a base for those that change what comes from it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .base import Buffer, Storage


class WrappedStorage(Storage):
    """Another storage, for reading alone; what a subclass leaves is the other's."""

    def __init__(self, storage: Storage) -> None:
        self.kind, self.lists, self.save_hint = storage.kind, storage.lists, storage.save_hint
        self._storage = storage

    def read_into(
        self, file: str, offset: int, buffers: Sequence[Buffer], *, shared: bool = False
    ) -> None:
        self._storage.read_into(file, offset, buffers, shared=shared)

    def size(self, file: str) -> int:
        return self._storage.size(file)

    def is_file(self, path: str) -> bool:
        return self._storage.is_file(path)

    def folders(self, folder: str) -> list[str]:
        return self._storage.folders(folder)

    def list(self, folder: str) -> list[str]:
        return self._storage.list(folder)

    def existing(self, folder: str, names: Collection[str]) -> set[str]:
        return self._storage.existing(folder, names)

    def modified_seconds(self, file: str) -> float:
        return self._storage.modified_seconds(file)

    def version(self, file: str) -> str | None:
        return self._storage.version(file)

    def content_key(self, file: str) -> str | None:
        return self._storage.content_key(file)

    def identity(self, file: str) -> str:
        return self.content_key(file) or self._storage.identity(file)

    def check_unchanged(self, file: str) -> None:
        self._storage.check_unchanged(file)

    def forget(self, file: str) -> bool:
        return self._storage.forget(file)

    def interrupt(self) -> None:
        self._storage.interrupt()

    def close(self) -> None:
        self._storage.close()
