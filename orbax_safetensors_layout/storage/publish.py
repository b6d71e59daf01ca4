"""A finished folder takes its place: at once, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator

from absl import logging

from orbax_safetensors_layout.errors import SafetensorsLayoutError, StorageError
from orbax_safetensors_layout.storage.base import Rank, Storage
from orbax_safetensors_layout.storage.local_write import flush_folder, storage_errors

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_OLD_SUFFIX = ".old"


class FolderExchange:
    """A save that is written beside its folder, and exchanged for it when it is complete.

    Attributes:
        target: The folder, by the name that all processes know it by.
        folder: Where the files are written.

    Args:
        target: The folder.
        storage: Where it is.
        rank: Which names in it belong to what is replaced.
    """

    def __init__(self, target: str, storage: Storage, rank: Rank) -> None:
        self.target = os.path.realpath(target)
        self.folder = partial_folder(self.target)
        self._storage = storage
        self._rank = rank
        self._claim = contextlib.ExitStack()

    def begin(self) -> None:
        self._claim.enter_context(claimed(f"{self.folder}.lock"))
        self._claim.callback(self._remove_partial)
        restore_folder(self.target, self.folder)

    def prepare(self) -> None:
        check_replaceable(self.target)
        self._storage.remove(self.folder)
        self._storage.make_folder(self.folder)

    def publish(self) -> None:
        rank = self._rank
        publish_folder(self.folder, self.target, is_replaced=lambda name: rank(name) is not None)

    def end(self) -> None:
        self._claim.close()

    def _remove_partial(self) -> None:
        with contextlib.suppress(SafetensorsLayoutError):  # what failed before is what counts
            self._storage.remove(self.folder)


def publish_folder(finished: str, folder: str, *, is_replaced: Callable[[str], bool]) -> None:
    """Puts a finished folder in the place of another, which may exist.

    What the old folder holds besides the files that are replaced stands in the new one, too, also
    what somebody puts there meanwhile. A crash at any moment leaves the old or the new folder
    complete at `folder`; on systems that can not exchange two names, for an instant none, with
    both complete beside it.

    Args:
        finished: The new folder, beside the old one.
        folder: Where it goes.
        is_replaced: Whether a name in the old folder belongs to what is replaced.

    Raises:
        StorageError: A step failed; the old folder is as it was, unless only making the change
            durable failed.
    """
    parent = os.path.dirname(folder)
    with storage_errors("can not put the finished folder in its place", folder):
        if not os.path.isdir(folder):
            os.rename(finished, folder)
            flush_folder(parent)
            return
        os.chmod(finished, stat.S_IMODE(os.stat(folder).st_mode))
        for name in os.listdir(folder):
            if not is_replaced(name):
                link_tree(os.path.join(folder, name), os.path.join(finished, name))
        here = _current_folder()
        old = _replace(finished, folder)
        for name in os.listdir(old):
            if not is_replaced(name):
                _bring(os.path.join(old, name), os.path.join(folder, name))
        flush_folder(parent)  # before the old folder goes
        _remove_old(old, folder)
        # A program that works in the folder goes on in the new one.
        if here == folder or here.startswith(folder + os.sep):
            with contextlib.suppress(OSError):
                os.chdir(here)


def check_replaceable(folder: str) -> None:
    """Refuses a folder that can not be exchanged for another as a whole.

    Raises:
        StorageError: It is a mount point, or something is mounted below it.
    """
    if not os.path.isdir(folder):
        return
    device = os.lstat(os.path.dirname(folder)).st_dev
    for root, _, _ in os.walk(folder):
        if os.path.ismount(root) or os.lstat(root).st_dev != device:
            raise StorageError(
                "a file system is mounted there, so the folder can not be replaced as a whole",
                file=root,
                expected="a folder of one file system with the one that holds it",
                hint="Save to a new folder in it.",
            )


def partial_folder(folder: str, purpose: str = "save") -> str:
    """Where what will stand at `folder` is made: beside it, whatever the length of its name.

    Args:
        folder: The folder.
        purpose: What makes it; each has a folder of its own.
    """
    parent, name = os.path.split(folder)
    tag = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    return os.path.join(parent, f".{tag}.partial-{purpose}")


@contextlib.contextmanager
def claimed(path: str) -> Iterator[None]:
    """Holds a lock file, which goes with the process if it dies, and is removed at the end.

    Raises:
        StorageError: Another process, or thread, holds it.
    """
    with storage_errors("can not begin to save", path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = _locked(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(fd)


def _locked(path: str) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
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


def restore_folder(folder: str, partial: str) -> None:
    """Puts back a folder that a crash left beside its place, on systems without exchange.

    Args:
        folder: Where it belongs.
        partial: The folder of the save that crashed.
    """
    old = f"{partial}{_OLD_SUFFIX}"
    if os.path.isdir(old):
        with storage_errors("can not put back what a crash left", folder):
            if os.path.isdir(folder):
                shutil.rmtree(old)
            else:
                os.rename(old, folder)


def _replace(finished: str, folder: str) -> str:
    """Puts the new folder in the place of the old one, and tells where that is now."""
    if _exchange(finished, folder):
        return finished
    old = f"{finished}{_OLD_SUFFIX}"
    shutil.rmtree(old, ignore_errors=True)  # of a crash; the folder itself is there
    os.rename(folder, old)
    try:
        os.rename(finished, folder)
    except BaseException:
        os.rename(old, folder)
        raise
    return old


def _remove_old(old: str, folder: str) -> None:
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(old):
        logging.warning("The new checkpoint stands at %s, but %s can not be removed.", folder, old)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def link_tree(source: str, target: str) -> None:
    """Makes a file or folder stand in a second place: by hard links, or where that fails, copies.

    Args:
        source: The file or folder.
        target: The second place, in a folder that exists.
    """
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True, copy_function=link_tree)
        return
    with contextlib.suppress(OSError):
        os.link(source, target, follow_symlinks=False)
        return
    shutil.copy2(source, target, follow_symlinks=False)


def _bring(source: str, target: str) -> None:
    """Brings over what came to a folder, or was replaced in it, after it was linked."""
    if os.path.isdir(source) and not os.path.islink(source) and os.path.isdir(target):
        for name in os.listdir(source):
            _bring(os.path.join(source, name), os.path.join(target, name))
    elif not os.path.lexists(target) or _is_newer(source, target):
        os.rename(source, target)


def _is_newer(source: str, target: str) -> bool:
    one, other = os.lstat(source), os.lstat(target)
    return not os.path.samestat(one, other) and one.st_mtime_ns > other.st_mtime_ns


def _exchange(one: str, other: str) -> bool:
    rename = _renameat2()
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


@functools.cache
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux, or an old C library
        return None
    function.argtypes = [
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint,
    ]  # fmt: skip
    function.restype = ctypes.c_int
    return function
