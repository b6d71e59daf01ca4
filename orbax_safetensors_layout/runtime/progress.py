"""Progress reports: a callback of the caller's, a bar on a terminal, or lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from orbax_safetensors_layout.options import OnProgress, Progress

from .text import seconds_text, size_text

_LINE_SECONDS = 10.0
_NAME_COLUMNS = 20


@contextlib.contextmanager
def progress_callback(
    progress: bool | Callable[[Progress], None], label: str = ""
) -> Iterator[OnProgress]:
    """Yields the function to call after each tensor.

    For True one that draws a bar where stderr is a terminal and tqdm is installed, else lines.
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield None
    elif sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        with contextlib.ExitStack() as bars:
            yield _ProgressBar(label, bars)
    else:
        lines = ProgressLines(sys.stderr, label=label)
        yield lines
        lines.close()


class _ProgressBar:
    """Draws a bar from the first report on."""

    def __init__(self, label: str, bars: contextlib.ExitStack) -> None:
        self._label = label or None
        self._bars = bars
        self._bar: Any = None

    def __call__(self, state: Progress) -> None:
        from tqdm import tqdm

        done, total, tensor = state
        if self._bar is None:
            bar = tqdm(desc=self._label, total=total, unit="B", unit_scale=True, dynamic_ncols=True)
            self._bar = self._bars.enter_context(bar)
        elif self._bar.total != total:  # a next phase
            self._bar.reset(total)
        # The names of a checkpoint differ at their ends, and leave the bar no room.
        short = tensor if len(tensor) <= _NAME_COLUMNS else f"…{tensor[1 - _NAME_COLUMNS :]}"
        self._bar.set_postfix_str(short, refresh=False)
        self._bar.update(done - self._bar.n)


class ProgressLines:
    """Writes a line every ten seconds, and one at the end of each phase, for logs."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, label: str = ""
    ) -> None:
        self._stream = stream
        self._prefix = f"{label}: " if label else ""
        self._clock = clock
        self._begun = self._written = clock()
        self._state: Progress | None = None

    def __call__(self, state: Progress) -> None:
        if self._state is not None and state.total_bytes != self._state.total_bytes:
            self.close()  # a next phase
            self._begun = self._written = self._clock()
        self._state = state
        if self._clock() - self._written >= _LINE_SECONDS:
            self._written = self._clock()
            self._write(state)

    def close(self) -> None:
        if self._state is not None:
            self._write(self._state)

    def _write(self, state: Progress) -> None:
        done, total, tensor = state
        seconds = max(self._clock() - self._begun, 1e-9)
        share = done / total if total else 1.0
        rest = f"in {seconds_text(seconds)}"
        if 0 < done < total:
            rest = f"{seconds_text(seconds / share - seconds)} left, {tensor}"
        self._stream.write(
            f"{self._prefix}{share:4.0%}  {size_text(done)} of {size_text(total)},"
            f" {size_text(done / seconds)}/s, {rest}\n"
        )
        self._stream.flush()


class ProgressReport:
    """Counts bytes that are done, from any thread, and calls `progress` after each addition."""

    def __init__(self, progress: OnProgress, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int, name: str) -> None:
        if self._progress is not None:
            with self._lock:
                self._done_bytes += nbytes
                self._progress(Progress(self._done_bytes, self._total_bytes, name))
