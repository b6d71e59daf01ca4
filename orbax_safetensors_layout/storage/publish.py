"""A finished folder takes its place: at once, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
from collections.abc import Callable

from orbax_safetensors_layout.storage.local_write import flush_folder, storage_errors

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def publish_folder(finished: str, folder: str, *, is_replaced: Callable[[str], bool]) -> None:
    """Puts a finished folder in the place of another, which may exist.

    What the old folder holds besides the files that are replaced stands in the new one, too. A
    crash at any moment leaves the old or the new folder complete at `folder`; on systems that can
    not exchange two names, for an instant none, with both complete beside it.

    Args:
        finished: The new folder, beside the old one.
        folder: Where it goes.
        is_replaced: Whether a name in the old folder belongs to what is replaced.

    Raises:
        StorageError: A step failed; the old folder is as it was.
    """
    parent = os.path.dirname(folder)
    with storage_errors("can not put the finished folder in its place", folder):
        if not os.path.isdir(folder):
            os.rename(finished, folder)
        else:
            for name in os.listdir(folder):
                if not is_replaced(name):
                    _link(os.path.join(folder, name), os.path.join(finished, name))
            if _exchange(finished, folder):
                shutil.rmtree(finished)
            else:
                old = f"{finished}.old"
                os.rename(folder, old)
                os.rename(finished, folder)
                shutil.rmtree(old)
    flush_folder(parent)


def _link(source: str, target: str) -> None:
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True, copy_function=_link)
        return
    with contextlib.suppress(OSError):
        os.link(source, target, follow_symlinks=False)
        return
    shutil.copy2(source, target, follow_symlinks=False)


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
