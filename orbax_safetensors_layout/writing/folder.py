"""The folder of a checkpoint that is being written, and the order in which its files appear."""

from __future__ import annotations

import contextlib
import threading
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence

from orbax_safetensors_layout.catalog import is_beside
from orbax_safetensors_layout.errors import StorageError, listed
from orbax_safetensors_layout.format import (
    DIGESTS,
    MANIFEST,
    Manifest,
    RangeChecksums,
    dump_digests,
    join_crc32,
    parse_digests,
    ranges_by_file,
)
from orbax_safetensors_layout.options import MIB, WriteOptions
from orbax_safetensors_layout.plan import PIECES_FOLDER, FileWrite, WritePlan
from orbax_safetensors_layout.runtime import Budget, Fingerprint, ProcessGroup, Workers
from orbax_safetensors_layout.storage import (
    ByteBuffer,
    FileWriter,
    Storage,
    join,
    read_file,
    write_file,
)

from .commit import appearance_rank

_BUDGET_BYTES = 256 * MIB  # of a save that names none: copies from devices, and pieces


class OpenFile:
    """A file that is being written, by many threads; they compute the CRC-32, if it has a digest.

    It is complete when no write is pending; the first counts until all writes are known.
    """

    def __init__(self, plan: FileWrite, writer: FileWriter, *, durable: bool, digest: bool) -> None:
        self.plan = plan
        self.durable = durable
        self.pending_writes = 1
        self._writer = writer
        self._checksums = RangeChecksums() if digest else None
        self._has_header = False
        self._lock = threading.Lock()

    def write_at(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        """Writes buffers, after the header if they are the first ones."""
        self._write_header()
        self._write(offset, buffers)

    def _write_header(self) -> None:
        with self._lock:
            if not self._has_header:
                self._write(0, [memoryview(bytearray(self.plan.layout.header))])
                self._has_header = True

    def _write(self, offset: int, buffers: Sequence[ByteBuffer]) -> None:
        if self._checksums is not None:
            self._checksums.add("", offset, buffers)
        self._writer.write_at(offset, buffers)

    def finish(self) -> int | None:
        """Completes the file; returns the CRC-32."""
        try:
            self._write_header()
            self._writer.finish()
        except BaseException:
            self.abort()
            raise
        if self._checksums is None:
            return None
        return join_crc32(ranges_by_file(self._checksums.take())[""], self.plan.layout.size)

    def abort(self) -> None:
        self._writer.abort()


class CheckpointFolder:
    """A folder, which exists, that the processes of a save fill.

    `begin` writes the manifest and the side files; then come files of tensors; `complete` writes
    what makes them one checkpoint. See `commit.appearance_rank`.
    """

    def __init__(
        self, path: str, storage: Storage, group: ProcessGroup, options: WriteOptions
    ) -> None:
        self.path = path
        self.storage = storage
        self.group = group
        self.pool = Workers(options.writers, "safetensors-write", storage.interrupt, self.check)
        self.budget = Budget(options.memory_budget_bytes or _BUDGET_BYTES)  # of values
        self.bytes_written = 0  # of complete files of tensors
        self._options = options
        self._open: list[OpenFile] = []
        self._lock = threading.Lock()
        self._digests: dict[str, int] = {}  # of complete files, by name
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
        self.group.check(self._doing)

    def begin(
        self,
        manifest: Manifest | None,
        sidecar_files: Mapping[str, bytes],
        fingerprint: Fingerprint | None,
    ) -> str:
        """Agrees on what is saved, writes manifest and side files, returns the id of the save."""
        save_id = uuid.uuid4().hex
        error: BaseException | None = None
        try:
            if self.group.is_leader:
                files = dict(sidecar_files)
                if manifest is not None:
                    files = {MANIFEST: manifest.stamped(save_id).to_json()} | files
                    self._digests[MANIFEST] = zlib.crc32(files[MANIFEST])
                self._write(files)
        except BaseException as problem:
            error = problem
            self.storage.interrupt()
        return self.group.barrier(
            "agreeing on what is saved", error, agree=fingerprint, broadcast=save_id
        )

    def begin_file(self, plan: FileWrite) -> OpenFile:
        """Creates a file, of which nothing is written yet; temporary files are not durable."""
        stays = not plan.is_temporary
        durable, digest = self._options.fsync and stays, self._options.digests and stays
        writer = self.storage.create(join(self.path, plan.name), plan.layout.size, durable=durable)
        file = OpenFile(plan, writer, durable=durable, digest=digest)
        with self._lock:
            self._open.append(file)
        return file

    def expect(self, file: OpenFile, writes: int) -> None:
        with self._lock:
            file.pending_writes += writes

    def written(self, file: OpenFile) -> None:
        """Counts a pending write of a file as done; the last completes it."""
        with self._lock:
            file.pending_writes -= 1
            if file.pending_writes:
                return
            self._open.remove(file)
        digest = file.finish()
        with self._lock:
            self.bytes_written += file.plan.layout.size
            if digest is not None:
                self._digests[file.plan.name] = digest

    def unfinished(self) -> list[OpenFile]:
        with self._lock:
            return [*self._open]

    def make_pieces_folder(self) -> None:
        """Makes the folder of temporary files; `complete` removes it."""
        self.storage.make_folder(join(self.path, PIECES_FOLDER))

    def leave_digests(self) -> None:
        """Leaves the checksums of this process's files to the leader, for `complete`."""
        if self._options.digests and not self.group.is_leader:
            self.make_pieces_folder()
            self._write({_own_digests(self.group.process_index): dump_digests(self._digests)})

    def close(self) -> None:
        self.pool.stop()
        for file in self._open:
            file.abort()
        self._open.clear()

    def complete(self, plan: WritePlan) -> None:
        """Checks the files of all processes, writes index and digests, removes temporary files."""
        with self.step("looking at what was written"):  # by all, before pieces are removed
            self.storage.check_written(self.path)
        with self.step("completing the folder"):
            if self.group.is_leader:
                self._complete(plan)

    def _complete(self, plan: WritePlan) -> None:
        files = plan.index()
        if self._options.digests:
            digests = {**self._digests}
            for process in range(1, plan.process_count):
                file = join(self.path, _own_digests(process))
                digests |= parse_digests(read_file(self.storage, file, "the digests"), file=file)
            files = with_digests(files, digests)
        self._write(files)
        own = self._small_files.union(plan.names)
        present = self.storage.list(self.path)
        if missing := sorted({*plan.names}.difference(present)):
            raise StorageError(
                "files that processes have written are not in the folder",
                file=self.path,
                expected=listed(missing),
                found=listed([*present]),
                hint="All processes must write to one file system, or one bucket.",
            )
        for name in present:  # what an abandoned save left would pass for own
            if name.startswith(".") or is_beside(name, self._options.stem):
                continue  # of others, where files appear in their place at once
            if appearance_rank(name) is not None and name not in own:
                self.storage.remove(join(self.path, name))
        if plan.exchanges or self._options.digests:
            self.storage.remove(join(self.path, PIECES_FOLDER))
        if self._options.fsync:
            self.storage.flush_folder(self.path)

    def _write(self, files: Mapping[str, bytes]) -> None:
        self._small_files.update(files)
        write_small_files(self.storage, self.path, files, durable=self._options.fsync)


def _own_digests(process: int) -> str:
    return f"{PIECES_FOLDER}/{DIGESTS}.{process}"


def with_digests(files: Mapping[str, bytes], digests: Mapping[str, int]) -> dict[str, bytes]:
    """Return small files, and beside them the CRC-32 of these and of a checkpoint's others."""
    own = {name: zlib.crc32(files[name]) for name in files if appearance_rank(name) is not None}
    return {**files, DIGESTS: dump_digests({**own, **digests})}


def write_small_files(
    storage: Storage, folder: str, files: Mapping[str, bytes], *, durable: bool
) -> None:
    """Writes files in the order of `appearance_rank`, each of which appears complete.

    Names of those in folders are paths.
    """
    inner = {join(folder, name.rpartition("/")[0]) for name in files if "/" in name}
    for path in inner:
        storage.make_folder(path)
    for name in sorted(files, key=lambda name: appearance_rank(name) or 0):
        write_file(storage, join(folder, name), files[name], durable=durable)
    if durable:
        for path in inner:
            storage.flush_folder(path)
