"""Limits that the system sets this process for a while."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    """Lowers one of `resource`'s soft limits."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def full_disk(nbytes: int = 4096) -> contextlib.AbstractContextManager[None]:
    """Files of this process cannot grow beyond a size, as on a disk that is full."""
    return limited(resource.RLIMIT_FSIZE, nbytes)


def few_descriptors(count: int) -> contextlib.AbstractContextManager[None]:
    """Files whose descriptors would be `count` or more cannot be opened."""
    return limited(resource.RLIMIT_NOFILE, count)
