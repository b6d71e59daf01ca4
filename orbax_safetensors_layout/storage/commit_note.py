"""Names of what is beside a folder that is replaced, and a note of what takes its place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import NamedTuple, Self


class Note(NamedTuple):
    """Describes a finished folder that was about to be committed."""

    finished: str  # folder, relative to the one that holds it and the target
    identity: str  # of what it holds
    entries: dict[str, list[int]]  # what it, and all in it, keep wherever it is moved, by name

    @classmethod
    def read(cls, fd: int, folder: str) -> Self | None:
        """Returns the note in the lock file of a folder; None for anything else that is in it.

        What it names is removed, so only what saves and conversions work under is believed.
        """
        try:
            noted = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
            note = cls(noted["finished"], noted["identity"], noted["entries"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None  # nothing was noted, or a crash cut it off
        types = tuple(type(part) for part in note)
        known = [os.path.basename(partial_folder(folder, what)) for what in ("save", "convert")]
        if types != (str, str, dict) or note.workspace not in known or "" not in note.entries:
            return None
        inner = note.finished[len(note.workspace) + 1 :]
        return None if inner in (os.curdir, os.pardir) or os.sep in inner else note

    @property
    def workspace(self) -> str:
        """The folder beside the target that it was made in."""
        return self.finished.split(os.sep)[0]

    def is_at(self, folder: str) -> bool:
        """Whether the folder that was about to be committed is this one."""
        try:
            entries = entries_of(folder)
        except (OSError, ValueError):
            return False
        return all(entries.get(name) == entry for name, entry in self.entries.items())


def entries_of(folder: str) -> dict[str, list[int]]:
    """Returns inodes, which a later folder may get again, so also sizes and times of files in it.

    Not those of folders in it, to which come files that are kept.
    """
    entries = {"": [os.stat(folder).st_ino]}
    with os.scandir(folder) as files:
        for file in files:
            stat = file.stat(follow_symlinks=False)
            is_folder = file.is_dir(follow_symlinks=False)
            times = [] if is_folder else [stat.st_size, stat.st_mtime_ns]
            entries[file.name] = [stat.st_ino, *times]
    return entries


def partial_folder(folder: str, purpose: str = "save") -> str:
    """Returns the hidden path beside `folder` at which `purpose` prepares its new content."""
    return _hidden(folder, f"partial-{purpose}")


def aside_folder(folder: str) -> str:
    """Returns where a folder is for an instant while it is replaced, if two cannot be exchanged."""
    return _hidden(folder, "old")


def folder_being_replaced(folder: str) -> str | None:
    """Returns where the old folder (a real path) is while a new one takes its place, or None."""
    with contextlib.suppress(OSError), open(lock_file(folder), "rb") as file:
        note = Note.read(file.fileno(), folder)
        if note is not None and note.is_at(os.path.join(os.path.dirname(folder), note.finished)):
            return aside_folder(folder)
    return None


def lock_file(folder: str) -> str:
    """Returns the file beside a folder that is locked while it is replaced, and holds the note."""
    return _hidden(folder, "lock")


def _hidden(folder: str, what: str) -> str:
    parent, name = os.path.split(folder)
    tag = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    return os.path.join(parent, f".{tag}.{what}")
