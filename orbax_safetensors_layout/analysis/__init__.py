"""Read-only reports on checkpoints: inspect, verify, compare and cluster estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_safetensors_layout.lazy import lazy_exports

from .checkpoint_path import resolve_checkpoint
from .cluster_estimate import ClusterEstimate, LeafCost, estimate, estimate_save
from .inspection import Inspection, TensorFacts, Total, inspect
from .report import Finding, Report

if TYPE_CHECKING:
    from .orbax_inspect import inspect_orbax
    from .tree_estimate import estimate_tree, mesh_of
    from .verification import verify

__getattr__ = lazy_exports(
    __name__,
    {
        ".orbax_inspect": "inspect_orbax",
        ".tree_estimate": "estimate_tree mesh_of",
        ".verification": "verify",
    },
)
