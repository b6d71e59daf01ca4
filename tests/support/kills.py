"""The end of a process of a cluster."""

from __future__ import annotations

import os
import signal
import time


def die(*_: object, **__: object) -> None:
    """Kills this process, once a thread of it has given its first sign of life.

    Without one it never began, as far as the others can tell.
    """
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
