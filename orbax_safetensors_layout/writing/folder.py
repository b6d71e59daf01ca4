"""The folder of a checkpoint that is being written, and the order in which its files appear."""

from __future__ import annotations

import contextlib
import uuid
import zlib
from collections.abc import Iterator, Mapping

from orbax_safetensors_layout.format import (
    DIGESTS,
    MANIFEST,
    Manifest,
    dump_digests,
    parse_digests,
)
from orbax_safetensors_layout.options import MIB, WriteOptions
from orbax_safetensors_layout.plan import PIECES_FOLDER, WritePlan
from orbax_safetensors_layout.runtime import Fingerprint, ProcessGroup, Workers
from orbax_safetensors_layout.storage import Storage, join, read_file, write_file

from .commit import appearance_rank
from .open_files import FileSet

_BUDGET_BYTES = 256 * MIB  # of a save that names none: copies from devices, and pieces


class CheckpointFolder:
    """A folder that the processes of a save fill.

    `begin` writes the manifest and the side files; then come files of tensors; `complete` writes
    what makes them one checkpoint. See `commit.appearance_rank`.

    Attributes:
        path: The folder, which exists.
        files: The files of tensors that this process has begun.
        pool: Threads that write them.
        memory_budget_bytes: Host bytes of values that are held at once.
    """

    def __init__(
        self, path: str, storage: Storage, group: ProcessGroup, options: WriteOptions
    ) -> None:
        self.path = path
        self.storage = storage
        self.group = group
        self.files = FileSet(storage, path, durable=options.fsync, digest=options.digests)
        self.pool = Workers(options.writers, "safetensors-write", storage.interrupt, self.check)
        self.memory_budget_bytes = options.memory_budget_bytes or _BUDGET_BYTES
        self._durable = options.fsync
        self._digests = options.digests
        self._small_files: set[str] = set()
        self._doing = "saving"

    @contextlib.contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """A step of all processes: leaving the block, each waits until all have."""
        self._doing = doing
        with self.group.together(doing):
            try:
                yield
            except BaseException:
                self.storage.interrupt()
                self.pool.stop()
                raise

    def check(self) -> None:
        """Raises, at most once a second, if another process has failed."""
        self.group.check(self._doing)

    def begin(
        self,
        manifest: Manifest | None,
        sidecar_files: Mapping[str, bytes],
        fingerprint: Fingerprint | None,
    ) -> str:
        """Agrees on what is saved, and writes the manifest and the side files.

        Returns the id of the save, the same on all processes.
        """
        save_id = uuid.uuid4().hex
        error: BaseException | None = None
        try:
            if self.group.is_leader:
                files = dict(sidecar_files)
                if manifest is not None:
                    files = {MANIFEST: manifest.stamped(save_id).to_json()} | files
                    self.files.digests[MANIFEST] = zlib.crc32(files[MANIFEST])
                self._write(files)
        except BaseException as problem:
            error = problem
            self.storage.interrupt()
        return self.group.barrier(
            "agreeing on what is saved", error, agree=fingerprint, broadcast=save_id
        )

    def make_pieces_folder(self) -> None:
        """Makes the folder of what only the processes themselves read; `complete` removes it."""
        self.storage.make_folder(join(self.path, PIECES_FOLDER))

    def leave_digests(self) -> None:
        """Leaves the checksums of this process's files to the leader, for `complete`."""
        if self._digests and not self.group.is_leader:
            self.make_pieces_folder()
            self._write({_own_digests(self.group.process_index): dump_digests(self.files.digests)})

    def close(self) -> None:
        """Stops the threads, and drops files that are not complete."""
        self.pool.stop()
        self.files.abort()

    def complete(self, plan: WritePlan) -> None:
        """Checks what all have written, writes index and digests, removes temporary files."""
        with self.step("looking at what was written"):  # by all, before pieces are removed
            self.storage.check_written(self.path)
        with self.step("completing the folder"):
            if self.group.is_leader:
                self._complete(plan)

    def _complete(self, plan: WritePlan) -> None:
        files = plan.index()
        if self._digests:
            digests = {name: zlib.crc32(data) for name, data in files.items()}
            digests |= self.files.digests
            for process in range(1, plan.process_count):
                file = join(self.path, _own_digests(process))
                digests |= parse_digests(read_file(self.storage, file, "the digests"), file=file)
            files[DIGESTS] = dump_digests(digests)
        self._write(files)
        self._remove_strays(plan)
        if plan.exchanges or self._digests:
            self.storage.remove(join(self.path, PIECES_FOLDER))
        if self._durable:
            self.storage.flush_folder(self.path)

    def _remove_strays(self, plan: WritePlan) -> None:
        """Removes what an abandoned save has left, which would pass for a part of this one."""
        own = self._small_files.union(plan.names)
        for name in self.storage.list(self.path):
            if appearance_rank(name) is not None and name not in own:
                self.storage.remove(join(self.path, name))

    def _write(self, files: Mapping[str, bytes]) -> None:
        self._small_files.update(files)
        write_small_files(self.storage, self.path, files, durable=self._durable)


def _own_digests(process: int) -> str:
    return f"{PIECES_FOLDER}/{DIGESTS}.{process}"


def write_small_files(
    storage: Storage, folder: str, files: Mapping[str, bytes], *, durable: bool
) -> None:
    """Writes files from memory, each of which appears complete."""
    for name, data in files.items():
        write_file(storage, join(folder, name), data, durable=durable)
