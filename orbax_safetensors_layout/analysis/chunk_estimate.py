"""Plans what Orbax reads of a checkpoint in its own format: whole chunks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from orbax_safetensors_layout.adapters import OrbaxReader
from orbax_safetensors_layout.conversion import arrays_of, rerooted
from orbax_safetensors_layout.plan import ChunkedArray, PlannedShares, plan_chunks
from orbax_safetensors_layout.sharding import MeshShape, ShardingRule, ShardingRules

from .inspection import dtype_code, files_below

_OCDBT_MANIFEST = "manifest.ocdbt"
_OCDBT_DATA = ("d", "ocdbt_data")  # folders of the files that OCDBT keeps chunks in


class OrbaxShares(NamedTuple):
    """The shares of all processes, and the size of the checkpoint."""

    shares: PlannedShares
    nbytes: int  # of its arrays
    files: int


def plan_orbax(path: str, mesh: MeshShape, rules: Sequence[ShardingRule]) -> OrbaxShares:
    """Plans the shares of all processes in all arrays of an item that Orbax saved."""
    with contextlib.closing(OrbaxReader(path)) as source:
        arrays = [*arrays_of(rerooted(source.tree, None)).values()]
        chunked = [
            ChunkedArray(
                array.name,
                array.shape,
                tuple(max(1, n) for n in source.chunk(array)),
                dtype_code(array.dtype),
                array.dtype.itemsize,
            )
            for array in arrays
        ]
    placer = ShardingRules(rules, mesh)
    placed = [placer.place(array.name, array.shape) for array in arrays]
    files = files_below(path)
    holders = None
    if _OCDBT_MANIFEST in files:
        holders = sum(os.path.basename(os.path.dirname(f)) in _OCDBT_DATA for f in files)
    shares = plan_chunks(chunked, placed, mesh, holders)
    return OrbaxShares(shares, sum(array.nbytes for array in arrays), len(files))
