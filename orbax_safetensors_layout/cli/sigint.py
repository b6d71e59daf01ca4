"""Ctrl-C during an import ends the process at once, since modules do not survive one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130
_IMPORTING = "<frozen importlib"


@contextlib.contextmanager
def clean_interrupts(message: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt`; in an import it prints `message`, and ends the process."""

    # An interrupted import may swallow the interrupt, raise another error, or crash in native code
    # (each seen with numpy and jax); there is nothing to clean up yet.
    def interrupted(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(_IMPORTING):
                sys.stderr.write(f"{message()}\n")
                sys.stderr.flush()
                os._exit(INTERRUPTED)
            frame = frame.f_back
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # signals arrive there alone
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
