"""One checkpoint streamed into another: sources, targets, groups, and the journal between them."""

from .checkpoint_reader import (
    CheckpointReader,
    ReadableArrays,
    SafetensorsReader,
    SourceArray,
    arrays_of,
    rerooted,
    values_of,
)
from .consolidate import consolidate
from .pipeline import Conversion, conversion_limits
from .target import FINISHED, LeafRegion, Target, TargetLeaf, batches
from .target_tree import TargetArray, Topology, arrays_in, files_target, mapped_tree, plain_tree
