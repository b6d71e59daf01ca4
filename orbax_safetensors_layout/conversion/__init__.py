"""One checkpoint streamed into another: sources, targets, groups, and the journal between them."""

from .checkpoint_reader import (
    CHUNKS_IN_BUDGET,
    CheckpointReader,
    ReadableArrays,
    SafetensorsReader,
    SourceArray,
    arrays_of,
    check_chunks,
    chunk_bytes,
    renamed,
    rerooted,
    values_of,
)
from .consolidate import consolidate
from .files_target import FilesTarget
from .pipeline import Conversion, conversion_block_bytes
from .step_conversion import StepConversion, staged_step
from .target import FINISHED, LeafRegion, Target, TargetArray
from .target_tree import Topology, arrays_in, mapped_tree, plain_tree, target_expressions
