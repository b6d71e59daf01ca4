"""Keeps the garbage collector from walking older objects during a load or save."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_FROZEN_AT_START = 2_000  # Python 3.12 begins with 375
_FULL = 2  # the generation of a full collection

_lock = threading.Lock()
_users = 0


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Keeps the garbage collector from walking what a block makes: half of the time of a header.

    Another thread may end this early, which costs time alone.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Keeps full collections from walking the objects that already exist.

    A load or save makes many objects and no garbage cycles. In a program that has imported JAX each
    full collection walks a million others: a third of the time of a save of 2,500 small tensors.
    New objects are collected as always, until another block begins inside, or a full collection has
    walked them: the plan of a large model makes millions, which later ones would walk again. A heap
    that the program itself has frozen stays as it is.
    """
    global _users
    with _lock:
        freezes = _users > 0 or gc.get_freeze_count() <= _FROZEN_AT_START
        if freezes:
            if not _users:
                gc.collect(1)  # recent garbage is freed before the load, not after it
                gc.callbacks.append(_freeze_survivors)
            gc.freeze()
        _users += freezes
    try:
        yield
    finally:
        with _lock:
            _users -= freezes
            if freezes and not _users:
                gc.callbacks.remove(_freeze_survivors)
                gc.unfreeze()


def _freeze_survivors(phase: str, info: dict[str, int]) -> None:
    """Freezes what a full collection has walked, unless another thread begins or ends a block."""
    if phase == "stop" and info["generation"] == _FULL and _lock.acquire(blocking=False):
        try:
            if _users:
                gc.freeze()
        finally:
            _lock.release()
