"""The folder of a checkpoint that is being written: its small files, and what completes it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping

from orbax_safetensors_layout.errors import CheckpointNotFoundError
from orbax_safetensors_layout.format import (
    DIGESTS,
    MAIN_INDEX,
    MANIFEST,
    dump_digests,
    index_bytes,
    parse_digests,
)
from orbax_safetensors_layout.options import WriteOptions
from orbax_safetensors_layout.plan import PIECES_FOLDER, WritePlan
from orbax_safetensors_layout.storage import Storage, join, open_storage, read_range

from .commit import appearance_rank
from .open_files import FileSet


class CheckpointFolder:
    """A folder that the processes of a save fill; where files appear one by one, in this order.

    The manifest is in it first, then come files of tensors, and last what makes them one
    checkpoint; see `publishing.appearance_rank`.

    Attributes:
        path: The folder, which exists.
        storage: Where it is.
        files: The files of tensors that this process has begun.

    Args:
        path: The folder.
        storage: Where it is.
        options: Whether files are flushed, and have checksums.
    """

    def __init__(self, path: str, storage: Storage, options: WriteOptions) -> None:
        self.path = path
        self.storage = storage
        self.files = FileSet(storage, path, durable=options.fsync, digest=options.digests)
        self._durable = options.fsync
        self._digests = options.digests
        self._documents: set[str] = set()

    def begin(self, manifest: bytes | None, documents: Mapping[str, bytes]) -> None:
        """Writes what is known before the tensors are; for one process.

        Args:
            manifest: What stands beside the tensors, if anything.
            documents: More small files, by name.
        """
        if manifest is not None:
            self.files.digests[MANIFEST] = zlib.crc32(manifest)
            documents = {MANIFEST: manifest, **documents}
        self._write(documents)

    def make_pieces_folder(self) -> None:
        """Makes the place for what only the processes themselves read; `complete` removes it."""
        self.storage.make_folder(join(self.path, PIECES_FOLDER))

    def leave_digests(self, process: int) -> None:
        """Leaves the checksums of this process's files to the one that calls `complete`."""
        if self._digests:
            self.make_pieces_folder()
            self._write({_own_digests(process): dump_digests(self.files.digests)})

    def complete(self, plan: WritePlan) -> None:
        """Writes what makes many files one checkpoint, and removes what was only needed before.

        For one process, when all have written.
        """
        documents = {}
        if len(plan.files) > 1:
            files = [(name, tensors) for name, _, tensors in plan.files]
            documents[MAIN_INDEX] = index_bytes(files)
        if self._digests:
            found = {name: zlib.crc32(data) for name, data in documents.items()}
            found |= self.files.digests
            for process in range(1, plan.process_count):
                found |= self._left_digests(process)
            documents[DIGESTS] = dump_digests(found)
        self._write(documents)
        self._remove_strays(plan)
        if plan.exchanges or self._digests:
            self.storage.remove(join(self.path, PIECES_FOLDER))
        if self._durable:
            self.storage.flush_folder(self.path)

    def _remove_strays(self, plan: WritePlan) -> None:
        """Removes what a save that was given up has left, and would pass for a part of this one."""
        own = self._documents.union(plan.names)
        for name in self.storage.list(self.path):
            if appearance_rank(name) is not None and name not in own:
                self.storage.remove(join(self.path, name))

    def _left_digests(self, process: int) -> dict[str, int]:
        file = join(self.path, _own_digests(process))
        data = read_range(self.storage, file, 0, self.storage.size(file))
        return parse_digests(data, file=file)

    def _write(self, documents: Mapping[str, bytes]) -> None:
        self._documents.update(documents)
        for name, data in documents.items():
            file = self.storage.create(join(self.path, name), len(data), durable=self._durable)
            try:
                file.write_at(0, [memoryview(bytearray(data))])
                file.finish()
            except BaseException:
                file.abort()
                raise


def _own_digests(process: int) -> str:
    return f"{PIECES_FOLDER}/{DIGESTS}.{process}"


_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


def companions(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The configuration, tokenizer and the like of a Hugging Face folder, by name.

    Args:
        path: The folder, or one such file.

    Raises:
        StorageError: A file can not be read.
    """
    storage, folder = open_storage(path)
    with storage:
        if storage.is_file(folder):
            files = {os.path.basename(folder): folder}
        else:
            files = {name: join(folder, name) for name in storage.list(folder)}
        return {
            name: read_range(storage, file, 0, storage.size(file))
            for name, file in files.items()
            if name.endswith(_SUFFIXES)
            and appearance_rank(name) is None
            and not name.startswith(".")
        }


def given_companions(config: str | os.PathLike[str]) -> dict[str, bytes]:
    """The files of a folder that a caller names for them, as `companions`.

    Raises:
        CheckpointNotFoundError: There are none.
        StorageError: A file can not be read.
    """
    found = companions(config)
    if not found:
        raise CheckpointNotFoundError(
            "there is nothing to put beside the files",
            file=config,
            expected="a folder with config.json, a tokenizer and the like",
        )
    return found
