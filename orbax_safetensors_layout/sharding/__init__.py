"""The boxes of an array that each process and device holds: shardings, meshes, sharding rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_safetensors_layout.lazy import lazy_exports

from .holders import AddressableShards, GlobalShards, ReplicaGrid, Replicas
from .mesh_shape import MeshShape, Partition, Spec
from .sharding_rules import Misfit, Placed, ShardingRule, ShardingRules, parse_rules, spec_text

if TYPE_CHECKING:
    from .serialize import ShardingTable, decode_sharding
    from .shards import (
        Placement,
        ProcessShards,
        abstract_sharding,
        box_of,
        is_abstract,
        sharding_of,
        spec_of,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        ".serialize": "ShardingTable decode_sharding",
        ".shards": "Placement ProcessShards abstract_sharding box_of is_abstract sharding_of"
        " spec_of",
    },
)
