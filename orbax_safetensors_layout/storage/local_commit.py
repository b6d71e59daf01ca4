"""Puts a finished folder in its place: at once, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Set

from absl import logging

from orbax_safetensors_layout.errors import CheckpointExistsError, StorageError

from .base import NewFolder, Rank, Storage
from .commit_note import Note, aside_folder, entries_of, lock_file, partial_folder
from .local_file import closed_on_error, storage_errors
from .local_write import CFunction, flush_folder, libc_function

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class FolderExchange(NewFolder):
    """A save that is written beside its folder, and exchanged for it when it is complete."""

    def __init__(self, target: str, storage: Storage, rank: Rank) -> None:
        self.target = os.path.realpath(target)
        self.folder = partial_folder(self.target)
        self.storage = storage
        self._rank = rank
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        self._claim = self._stack.enter_context(claimed(self.target))
        # The first error is raised.
        self._stack.callback(self._remove_finished)

    def prepare(self) -> None:
        check_replaceable(self.target)
        self.storage.make_folder(self.folder)

    def commit(self) -> None:
        self._claim.commit(self.folder, is_replaced=lambda name: self._rank(name) is not None)

    def end(self) -> None:
        self._stack.close()

    def _remove_finished(self) -> None:
        if not os.path.exists(aside_folder(self.target)):  # which it leads loads to
            shutil.rmtree(self.folder, ignore_errors=True)


class Claim:
    """The right to replace a folder, held by a lock file beside it; `claimed` gives it.

    The lock goes with its holder, but the file stays when the holder is killed. Its note of the
    finished folder shows whoever comes next whether that took the place, and what is to be removed.
    """

    def __init__(self, folder: str, fd: int) -> None:
        self._folder = folder
        self._fd = fd
        self._note = Note.read(fd, folder)

    def finish_former(self) -> None:
        """Puts back, or removes, the remains of a killed holder beside the folder."""
        with storage_errors("cannot put in order what a crash left", self._folder):
            aside = aside_folder(self._folder)
            if self.was_committed():
                _remove_tree(aside)
            elif os.path.isdir(aside):
                self._put_back(aside)
            _remove_tree(partial_folder(self._folder))
            if self._note is not None and not self._note.is_at(self._beside(self._note.finished)):
                # There is nothing at its place, or what it was exchanged for.
                _remove_tree(self._beside(self._note.workspace))

    def _put_back(self, aside: str) -> None:
        try:
            os.rename(aside, self._folder)  # also in place of an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise StorageError(
                "a save was killed while it replaced the folder, and another was put there since",
                file=self._folder,
                found=f"the folder that was replaced, at {aside}",
                hint="Remove one of the two, or move it away.",
            ) from error

    def was_committed(self, identity: str | None = None) -> bool:
        """Whether a folder (any, or with that identity) of a killed holder is in the place."""
        note = self._note
        return note is not None and identity in (None, note.identity) and note.is_at(self._folder)

    def forget(self) -> None:
        """Drops the note of a holder that was killed: the folder will be replaced."""
        self._note = None
        with storage_errors("cannot drop the note of a save", lock_file(self._folder)):
            os.ftruncate(self._fd, 0)

    def commit(
        self, finished: str, *, is_replaced: Callable[[str], bool], identity: str = ""
    ) -> None:
        """Calls `commit_folder` for a finished folder, after a note of it for `was_committed`."""
        with storage_errors("cannot note what is about to be committed", self._folder):
            name = os.path.relpath(finished, os.path.dirname(self._folder))
            self._note = Note(name, identity, entries_of(finished))
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(self._note._asdict()).encode(), 0)
            os.fsync(self._fd)
        flush_folder(os.path.dirname(self._folder))
        commit_folder(finished, self._folder, is_replaced=is_replaced)

    def release(self) -> None:
        """Removes the lock file, unless something that its note names is left beside the folder."""
        note = self._note
        left = () if note is None else (aside_folder(self._folder), self._beside(note.workspace))
        if not any(map(os.path.exists, left)):
            with contextlib.suppress(OSError):
                os.unlink(lock_file(self._folder))
        os.close(self._fd)

    def _beside(self, name: str) -> str:
        return os.path.join(os.path.dirname(self._folder), name)


def _remove_tree(folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def commit_folder(finished: str, folder: str, *, is_replaced: Callable[[str], bool]) -> None:
    """Puts a finished folder in the place of another beside it, which may exist.

    What has no name of the finished folder, and is not replaced by `is_replaced`, is in the new
    one, too, also what another program puts there meanwhile. A crash leaves the old or the new
    folder complete at `folder`; on systems that cannot exchange two names, for an instant none,
    with the old one at `aside_folder` and the new one still at `finished`. After an error the old
    folder is as it was, unless only making the change durable failed.
    """
    parent = os.path.dirname(folder)
    new = _paths(finished)
    _check_kinds(folder, new, is_replaced)
    with storage_errors("cannot put the finished folder in its place", folder):
        if not os.path.isdir(folder):
            os.rename(finished, folder)
            flush_folder(parent)
            return
        os.chmod(finished, stat.S_IMODE(os.stat(folder).st_mode))
        kept = [*_kept(folder, new, is_replaced)]
        for path in kept:
            link_tree(os.path.join(folder, path), _with_folder(os.path.join(finished, path)))
        for place in {os.path.dirname(path) for path in kept}:
            flush_folder(os.path.join(finished, place))
        here = ""
        with contextlib.suppress(OSError):
            here = os.getcwd()
        _replace(finished, folder)
        for path in [*_kept(finished, new, is_replaced)]:
            _bring(os.path.join(finished, path), _with_folder(os.path.join(folder, path)))
        flush_folder(parent)  # before the old folder goes
        _remove_old(finished, folder)
        # A program that works in the folder goes on in the new one.
        if here == folder or here.startswith(folder + os.sep):
            with contextlib.suppress(OSError):
                os.chdir(here)


def _check_kinds(folder: str, new: Set[str], is_replaced: Callable[[str], bool]) -> None:
    """Refuses folders, and links to some, where files go, and files and links where folders go.

    But what is replaced.
    """
    for path in sorted(new):
        name = path.rstrip(os.sep)
        place = os.path.join(folder, name)
        is_folder = os.path.isdir(place) if name == path else _is_real_folder(place)
        is_other = is_folder == (name == path) and os.path.lexists(place)
        if is_other and not is_replaced(f"{name}{os.sep}" if is_folder else name):
            raise CheckpointExistsError(
                "the folder has something else of a name of the checkpoint",
                file=place,
                expected="a file" if name == path else "a folder",
                found="a folder" if is_folder else "a file or a link",
                hint="Move it away, or give another folder.",
            )


def _paths(folder: str) -> set[str]:
    """Return the paths of all in a folder; those of folders end with a separator."""
    paths: set[str] = set()
    for root, folders, files in os.walk(folder):
        names = [*files, *(f"{name}{os.sep}" for name in folders)]
        paths.update(os.path.join(root, name).removeprefix(f"{folder}{os.sep}") for name in names)
    return paths


def _kept(
    folder: str, new: Set[str], is_replaced: Callable[[str], bool], inside: str = ""
) -> Iterator[str]:
    """Yield the paths of what is in a folder, of no name among `new` paths, and not replaced.

    Folders are looked into that have a new one's name, or are replaced.
    """
    for name in os.listdir(os.path.join(folder, inside)):
        path = os.path.join(inside, name)
        inner = f"{path}{os.sep}"
        is_folder = _is_real_folder(os.path.join(folder, path))
        if is_folder and (inner in new or is_replaced(inner)):
            yield from _kept(folder, new, is_replaced, path)
        elif new.isdisjoint((path, inner)) and (is_folder or not is_replaced(path)):
            yield path


def _with_folder(path: str) -> str:
    """Return a path, whose folder is made if it is not there."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
    return path


def _is_real_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def check_replaceable(folder: str) -> None:
    """Refuses a folder that is a mount point, or has one: it cannot be exchanged."""
    if not os.path.isdir(folder):
        return
    with storage_errors("cannot look at what is to be replaced", folder):
        device = os.lstat(os.path.dirname(folder)).st_dev
        for root, _, _ in os.walk(folder):
            if os.path.ismount(root) or os.lstat(root).st_dev != device:
                raise StorageError(
                    "a file system is mounted there, so the folder cannot be replaced as a whole",
                    file=root,
                    expected="a folder on the file system of its parent",
                    hint="Save to a new folder in it.",
                )


@contextlib.contextmanager
def claimed(folder: str) -> Iterator[Claim]:
    """Claims a folder (a real path) to be replaced; settles the remains of a crash beside it."""
    path = lock_file(folder)
    with storage_errors("cannot begin to save", path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = _locked(path)
    claim = Claim(folder, fd)
    try:
        claim.finish_former()
        yield claim
    finally:
        claim.release()


def finish_interrupted(folder: str) -> None:
    """Removes the remains of a killed save to a real path."""
    if os.path.exists(lock_file(folder)):
        with claimed(folder):
            pass


def _locked(path: str) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with closed_on_error(fd):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StorageError(
                    "another save to this path is running",
                    file=path,
                    hint="Programs of several processes need `jax.distributed.initialize()`.",
                ) from error
            except OSError:
                return fd  # a file system without locks
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(fd)):
                    return fd
        os.close(fd)  # its holder has just removed it


def _replace(finished: str, folder: str) -> None:
    """Exchanges the new folder for the old one, by renames where the system can do no better."""
    rename = _renameat2()
    places = (_AT_FDCWD, os.fsencode(finished), _AT_FDCWD, os.fsencode(folder))
    if rename is not None and rename(*places, _RENAME_EXCHANGE) == 0:
        return
    aside = aside_folder(folder)
    try:
        os.rename(folder, aside)
        os.rename(finished, folder)
    except BaseException:  # an interrupt comes after the call in which it happened
        if os.path.isdir(aside) and not os.path.exists(folder):
            os.rename(aside, folder)
        raise
    os.rename(aside, finished)


def _remove_old(old: str, folder: str) -> None:
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(old):
        logging.warning("The new checkpoint is at %s, but %s cannot be removed.", folder, old)


def link_tree(source: str, target: str) -> None:
    """Makes a file or folder appear in a second place: by hard links, or else by durable copies."""
    if _is_real_folder(source):
        shutil.copytree(source, target, symlinks=True, copy_function=link_tree)
        for folder, _, _ in os.walk(target):
            flush_folder(folder)
        return
    with contextlib.suppress(OSError):
        os.link(source, target, follow_symlinks=False)
        return
    shutil.copy2(source, target, follow_symlinks=False)
    if not os.path.islink(target):
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def _bring(source: str, target: str) -> None:
    """Moves what came to a folder, or was replaced in it, after it was linked."""
    if _is_real_folder(source) and os.path.isdir(target):
        for name in os.listdir(source):
            _bring(os.path.join(source, name), os.path.join(target, name))
    elif not os.path.lexists(target) or _is_newer(source, target):
        os.rename(source, target)


def _is_newer(source: str, target: str) -> bool:
    new, old = os.lstat(source), os.lstat(target)
    return not os.path.samestat(new, old) and new.st_mtime_ns > old.st_mtime_ns


@functools.cache
def _renameat2() -> CFunction | None:
    path_types = (ctypes.c_int, ctypes.c_char_p)
    return libc_function("renameat2", *path_types, *path_types, ctypes.c_uint)
