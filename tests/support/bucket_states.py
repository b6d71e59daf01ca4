"""States that Orbax's own paths keep in buckets."""

from __future__ import annotations

import fsspec
import jax
import numpy as np
from cluster_trees import array_of
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

# fsspec, which epath needs for buckets, remembers listings and does not see what others write.
for kind in ("gs", "gcs", "s3"):
    fsspec.config.conf[kind] = {"use_listings_cache": False}


def make_state(step):
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8) + step
    return {"weight": array_of(value, mesh_of(x=len(jax.devices())), P("x")), "step": step}


def same(state, step):
    shards = state["weight"].addressable_shards
    pairs = zip(shards, make_state(step)["weight"].addressable_shards, strict=True)
    return state["step"] == step and all(
        np.array_equal(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs
    )
