"""Read-only reports on checkpoints: inspect, verify, compare and cluster estimates."""

from .checkpoint_path import resolve_checkpoint
from .cluster_estimate import ClusterEstimate, LeafCost, estimate, estimate_save
from .inspect import Inspection, TensorFacts, Total, inspect
from .orbax_inspect import inspect_orbax
from .report import Finding, Report
from .tree_estimate import estimate_tree, mesh_of
from .verify import verify
