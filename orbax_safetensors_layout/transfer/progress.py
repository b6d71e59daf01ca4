"""Progress reports: a callback of the caller's, or a bar on stderr."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

from orbax_safetensors_layout.options import Progress


@contextlib.contextmanager
def progress_callback(
    progress: bool | Callable[[Progress], None],
) -> Iterator[Callable[[Progress], None] | None]:
    """What to call after each tensor: the caller's function, a bar's, or nothing.

    Raises:
        ImportError: A bar is wanted and tqdm is not installed.
    """
    if callable(progress):
        yield progress
    elif progress:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "progress=True draws a bar with tqdm; install it with"
                " `pip install orbax-safetensors-layout[progress]`, or pass a function."
            ) from error
        with tqdm(unit="B", unit_scale=True, unit_divisor=1024) as bar:

            def update(state: Progress) -> None:
                bar.total = state.total_bytes
                bar.set_postfix_str(state.tensor, refresh=False)
                bar.update(state.done_bytes - bar.n)

            yield update
    else:
        yield None


def consecutive(
    progress: Callable[[Progress], None] | None, total_bytes: Sequence[int]
) -> Iterator[Callable[[Progress], None] | None]:
    """For steps that come one after the other, what each tells its progress to.

    Args:
        progress: What is told the progress of all together.
        total_bytes: The bytes of each.
    """

    def report(before: int, state: Progress) -> None:
        assert progress is not None
        progress(Progress(before + state.done_bytes, sum(total_bytes), state.tensor))

    before = 0
    for nbytes in total_bytes:
        yield None if progress is None else functools.partial(report, before)
        before += nbytes
