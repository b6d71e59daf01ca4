"""Host memory for shards, aligned so that JAX's CPU backend adopts it without a copy."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from orbax_safetensors_layout.plan.tiles import SLOT_ALIGNMENT

Bytes = npt.NDArray[np.uint8]


def allocate(nbytes: int, *, file_offset: int = 0) -> Bytes:
    """Uninitialised bytes at a 64-byte boundary.

    Where `file_offset` allows it, the address is congruent to it modulo the page size, so that a
    range that begins there in the file can be read past the page cache straight into its place.
    """
    phase = file_offset % mmap.PAGESIZE
    if phase % SLOT_ALIGNMENT or nbytes < 1 << 20:
        raw = np.empty(nbytes + SLOT_ALIGNMENT, np.uint8)
        shift = -raw.ctypes.data % SLOT_ALIGNMENT
    else:
        raw = np.empty(nbytes + mmap.PAGESIZE, np.uint8)
        shift = (phase - raw.ctypes.data) % mmap.PAGESIZE
    return raw[shift : shift + nbytes]


def align(offset: int) -> int:
    """The next offset at which a shard may begin."""
    return -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
