"""Read-only reports on checkpoints: inspect, verify, compare and cluster estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orbax_safetensors_layout.lazy import lazy_exports

from .cluster_estimate import ClusterEstimate, estimate, estimate_save
from .inspection import (
    InspectedTensor,
    Inspection,
    Total,
    inspect,
    inspect_dequantized,
    inspect_orbax,
)
from .report import Finding, Report

if TYPE_CHECKING:
    from .tree_estimate import mesh_of
    from .verification import verify

__getattr__ = lazy_exports(__name__, {".tree_estimate": "mesh_of", ".verification": "verify"})
