"""Progress reports: a callback of the caller's, or a bar on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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
