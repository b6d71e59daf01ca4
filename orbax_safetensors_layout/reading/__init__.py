"""Executes read plans: byte ranges into host memory, host memory into `jax.Array`s."""

from ._jax import DistributedStore
from .all_gather import exchange_turn
from .array_reader import ArrayReader
from .leaf_builder import LeafBuilder
from .plan_reader import ReadStats
from .replica_exchange import (
    LOADING,
    PLANNING,
    ExchangeStep,
    ReplicaExchange,
    exchanging,
    fingerprint_of,
    load_group,
    processes_per_host,
    steps_of,
)
from .resolve import (
    ResolvedLeaf,
    SourcedLeaf,
    adopts,
    check_holdable,
    registration,
    resolve_leaves,
    source_leaves,
)
from .saved_metadata import SavedMetadata
from .stored_values import check_bytes, has_all_values
from .verifying import VerifyingReader, file_blocks, file_crc32, read_digests
