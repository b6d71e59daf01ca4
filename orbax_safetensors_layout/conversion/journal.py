"""The journal of a conversion: which groups are written, so that none of them is done twice."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from orbax_safetensors_layout.errors import SafetensorsLayoutError
from orbax_safetensors_layout.format import short_repr
from orbax_safetensors_layout.storage import storage_errors

_PREFIX, _SUFFIX = "journal-", ".jsonl"
_VERSION = 3


class Journal:
    """Lines of JSON in one file for each process: what is converted, then a line for each group.

    Args:
        folder: Where the files are.
        source: Digest of what is read.
        arguments: Digest of what is made of it.
        block_bytes: What is read at once, which decides what the groups are.
        groups: Digest of the groups.
    """

    def __init__(
        self, folder: str, source: str, arguments: str, *, block_bytes: int, groups: str
    ) -> None:
        self._folder = folder
        self._identity = {"version": _VERSION, "source": source, "arguments": arguments}
        self._head = {**self._identity, "groups": groups, "block_bytes": block_bytes}

    @property
    def identity(self) -> str:
        """Equal for conversions of the same, whatever memory they may take."""
        return json.dumps(self._identity)

    @property
    def digest(self) -> str:
        """Equal on processes that convert the same in the same groups."""
        return json.dumps(self._head)

    @staticmethod
    def block_bytes(folder: str) -> int | None:
        """Returns what the conversion reads at once whose journal is there; None without one."""
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                file = os.path.join(folder, name)
                with (
                    storage_errors("can not read the journal", file),
                    open(file, encoding="utf-8") as f,
                ):
                    first = f.readline()
                found = json.loads(first).get("block_bytes") if first.endswith("\n") else None
                if isinstance(found, int):
                    return found
        return None

    def read(self) -> dict[int, list[str]]:
        """The groups that are written, with the digests of their regions.

        Raises:
            SafetensorsLayoutError: It is the journal of another conversion.
        """
        done: dict[int, list[str]] = {}
        for name in sorted(os.listdir(self._folder)):
            if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
                done |= self._read(os.path.join(self._folder, name))
        return done

    def _read(self, file: str) -> dict[int, list[str]]:
        with storage_errors("can not read the journal", file), open(file, encoding="utf-8") as f:
            # What a crash cut off is not a line.
            lines = [line for line in f.read().split("\n")[:-1] if line]
        if not lines:
            return {}
        try:
            head, *groups = map(json.loads, lines)
            done: dict[int, list[str]] = {line["group"]: line["digests"] for line in groups}
            versions = {key: head.get(key) for key in self._head}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SafetensorsLayoutError(
                "a line of the conversion's journal is damaged",
                file=file,
                found=short_repr(repr(error)),
                hint="Pass restart=True (--restart) to begin the conversion again.",
            ) from error
        for key, what in (
            ("version", "by another version of this package"),
            ("source", "of another checkpoint, or of one that has changed since"),
            ("arguments", "with other arguments"),
            ("groups", "in other parts"),
        ):
            if versions[key] != self._head[key]:
                raise SafetensorsLayoutError(
                    f"an unfinished conversion {what} stands beside the target",
                    file=self._folder,
                    hint="Repeat the call that was interrupted to continue it, or pass"
                    " restart=True (--restart) to drop it.",
                )
        return done

    def open(self, process: int) -> JournalWriter:
        """This process's file, to add to.

        Args:
            process: Number of the process.
        """
        file = os.path.join(self._folder, f"{_PREFIX}{process}{_SUFFIX}")
        with storage_errors("can not write the journal", file):
            return JournalWriter(file, json.dumps(self._head))


class JournalWriter:
    """Adds lines to a journal, each on the disk when the call returns.

    Args:
        file: The file.
        head: Its first line.
    """

    def __init__(self, file: str, head: str) -> None:
        self._file = file
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._fd).st_size
        if not size:
            self._write(head)
        elif os.pread(self._fd, 1, size - 1) != b"\n":
            whole = os.pread(self._fd, size, 0).rpartition(b"\n")[0]
            os.ftruncate(self._fd, len(whole) + 1 if whole else 0)
            if not whole:
                self._write(head)

    def add(self, group: int, digests: Sequence[str]) -> None:
        """Records a group.

        Args:
            group: Its number.
            digests: Digests of its regions.
        """
        with storage_errors("can not write the journal", self._file):
            self._write(json.dumps({"group": group, "digests": list(digests)}))

    def _write(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())
        os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
