"""The journal of a conversion: which groups are written, so that none of them is done twice."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.format import ByteRange, short_repr
from orbax_safetensors_layout.storage import LocalStorage, storage_errors

_PREFIX, _SUFFIX = "journal-", ".jsonl"
_VERSION = 7
_DIFFERENCES = {
    "version": "by another version of this package",
    "source": "of another checkpoint, or of one that has changed since",
    "arguments": "with other arguments",
    "groups": "in other parts",
    "block_bytes": "in other parts",
}


class WrittenGroup(NamedTuple):
    """A group that is written: digests of its regions; checksums of what was read and written."""

    digests: Sequence[str]
    read: Sequence[ByteRange]
    written: Sequence[ByteRange]


class Journal:
    """Lines of JSON in one file for each process: the conversion's digests, then each group.

    Args:
        folder: The conversion's own folder, beside the target.
        source: Digest of the source's content.
        arguments: Digest of the arguments, the target's description among them.
        block_bytes: Bytes read at once; the groups depend on it.
        groups: Digest of the groups.

    Attributes:
        source: Digest of the source's content.
        identity: Equal for conversions of the same source with the same arguments.
        digest: Equal for those that also have the same groups.
    """

    def __init__(
        self, folder: str, source: str, arguments: str, *, block_bytes: int, groups: str
    ) -> None:
        self._folder = folder
        self.source = source
        identity = {"version": _VERSION, "source": source, "arguments": arguments}
        self._head = {**identity, "groups": groups, "block_bytes": block_bytes}
        self.identity = json.dumps(identity)
        self.digest = json.dumps(self._head)
        self._file = ""
        self._fd = -1

    @staticmethod
    def block_bytes(folder: str) -> int | None:
        """Return the block bytes of the conversion whose journal is there; None without one."""
        return next((head.get("block_bytes") for head, _ in _journal_lines(folder)), None)

    def read(self) -> dict[int, WrittenGroup]:
        """Return the groups that are written, by their numbers."""
        done: dict[int, WrittenGroup] = {}
        for head, groups in _journal_lines(self._folder):
            for key, difference in _DIFFERENCES.items():
                if head.get(key) != self._head[key]:
                    raise SafetensorsLayoutError(
                        f"an unfinished conversion {difference} is beside the target",
                        file=self._folder,
                        hint="Repeat the call that was interrupted to continue it, or pass"
                        " restart=True (--restart) to drop it.",
                    )
            done |= groups
        return done

    def drop(self) -> None:
        """Removes what is recorded, before what it speaks of."""
        with LocalStorage() as storage:
            for name in filter(_is_journal, storage.list(self._folder)):
                storage.remove(os.path.join(self._folder, name))
            if os.path.isdir(self._folder):
                storage.flush_folder(self._folder)

    @contextlib.contextmanager
    def opened(self, process: int) -> Iterator[None]:
        """Begins, or continues, the file of a process; within the block `add` writes to it."""
        self._file = os.path.join(self._folder, f"{_PREFIX}{process}{_SUFFIX}")
        with storage_errors("cannot write the journal", self._file):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._file, flags, 0o666)
        try:
            with storage_errors("cannot write the journal", self._file):
                size = os.fstat(self._fd).st_size
                whole = os.pread(self._fd, size, 0).rpartition(b"\n")[:2]  # but for a cut line
                os.ftruncate(self._fd, sum(map(len, whole)))
                if not any(whole):
                    self._write(self.digest)
            yield
        finally:
            os.close(self._fd)

    def add(self, number: int, group: WrittenGroup) -> None:
        """Records a group, on the disk when the call returns."""
        with storage_errors("cannot write the journal", self._file):
            self._write(json.dumps([number, *group]))

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode()
        while data:  # a full disk takes the first bytes alone, without an error
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)


def _is_journal(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def _journal_lines(folder: str) -> Iterator[tuple[dict[str, Any], dict[int, WrittenGroup]]]:
    """Yields the first line of each journal file, and its groups that are written."""
    with LocalStorage() as storage:
        names = storage.list(folder)
    for name in filter(_is_journal, names):
        file = os.path.join(folder, name)
        try:
            with storage_errors("cannot read the journal", file), open(file, encoding="utf-8") as f:
                # What a crash cut off is not a line.
                lines = [json.loads(line) for line in f.read().split("\n")[:-1] if line]
            for head, *groups in [lines] if lines else ():
                is_known = head["version"] == _VERSION
                if is_known and not (type(head["block_bytes"]) is int and head["block_bytes"] > 0):
                    raise ValueError(f"block_bytes is {head['block_bytes']!r}")
                yield head, {n: _parsed(*group) for n, *group in groups if is_known}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise SafetensorsLayoutError(
                "a line of the conversion's journal is damaged",
                file=file,
                found=short_repr(repr(error)),
                hint="Pass restart=True (--restart) to begin the conversion again.",
            ) from error


def _parsed(digests: list[str], *ranges: list[list[Any]]) -> WrittenGroup:
    read, written = ([(f, s, n, c) for f, s, n, c in part] for part in ranges)
    return WrittenGroup(digests, read, written)
