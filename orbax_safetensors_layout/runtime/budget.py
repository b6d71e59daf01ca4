"""The memory budget: host bytes of tiles that are not yet on their devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Budget:
    """Counts reserved bytes up to `most_bytes`, and waits for transfers where there is no room.

    A tile holds its bytes from the time its first region is scheduled until its arrays are on
    their devices.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._reserved_bytes = 0
        self._held: deque[tuple[Callable[[], object], int]] = deque()

    def reserve(self, nbytes: int, make_progress: Callable[[], bool]) -> None:
        """Waits until `nbytes` more fit the budget, or nothing is left to wait for.

        `make_progress` waits for a task in flight; it returns False if there is none.
        """
        while nbytes and self._reserved_bytes + nbytes > self._most_bytes:
            if self._held:
                self._release_oldest()
            elif not make_progress():
                break
        self._reserved_bytes += nbytes

    def hold(self, wait: Callable[[], object] | None, nbytes: int) -> None:
        """Releases reserved bytes once `wait` has returned."""
        if nbytes:
            self._held.append((wait or (lambda: None), nbytes))

    def release_all(self) -> None:
        """Waits for all held bytes."""
        while self._held:
            self._release_oldest()

    def _release_oldest(self) -> None:
        wait, nbytes = self._held.popleft()
        wait()
        self._reserved_bytes -= nbytes
