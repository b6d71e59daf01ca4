"""Executes read plans: byte ranges into host memory, host memory into `jax.Array`s."""

from ._jax import DistributedStore
from .decoding import check_booleans
from .leaf_builder import LeafBuilder
from .materialize import Materializer
from .read import ReadStats, read_leaves
from .replica_exchange import (
    LOADING,
    PLANNING,
    ReplicaExchange,
    fingerprint_of,
    load_group,
    steps_of,
)
from .resolve import (
    Fidelity,
    PlannedLeaf,
    ResolvedLeaf,
    adopts,
    host_leaves,
    plan_leaves,
    resolve_leaves,
)
from .saved_metadata import SavedMetadata
from .verifying import VerifyingReader, file_ranges, read_digests
