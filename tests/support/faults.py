"""Faults of servers for tests, which run in processes of their own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fault:
    """Faults of requests.

    Attributes:
        kind: "status", "reset", "truncate" (half of the body), "delay", or "range" (another
            Content-Range than was asked for).
        method: HTTP method.
        key: A part of the object's name.
        times: How many requests fail.
        status: For "status".
        seconds: For "delay".
        skip: So many matching requests go well before.
    """

    kind: str
    method: str = "GET"
    key: str = ""
    times: int = 1
    status: int = 503
    seconds: float = 0.05
    skip: int = 0


class Faults:
    """Faults that are left to happen. Safe to use from many threads.

    Args:
        faults: Each as `dataclasses.asdict` gives it.
    """

    def __init__(self, faults: Sequence[dict[str, Any]] = ()) -> None:
        self._faults = [Fault(**fault) for fault in faults]
        self._lock = threading.Lock()

    def take(self, method: str, key: str) -> Fault | None:
        """Return the fault of a request, if any."""
        with self._lock:
            for number, fault in enumerate(self._faults):
                if fault.times > 0 and fault.method == method and fault.key in key:
                    name = "skip" if fault.skip else "times"
                    left = dataclasses.replace(fault, **{name: getattr(fault, name) - 1})
                    self._faults[number] = left
                    if name == "times":
                        return fault
        return None
