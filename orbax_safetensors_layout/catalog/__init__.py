"""The tensors of a checkpoint and their bytes: files, headers, index and pieces as one catalog."""

from .catalog import ROTARY_BUFFER, Catalog, as_recorded, read_header
from .discover import (
    ORBAX_ITEM,
    CheckpointRef,
    Discovery,
    StepItems,
    checkpoint_beside,
    discover,
    find_step,
    holds_checkpoint,
    is_orbax_checkpoint,
    is_safetensors_checkpoint,
    read_manifest,
    resolve_checkpoint,
)
from .folder_names import is_beside, replaced_files
from .piece_catalog import ExtentDoubt, check_save, check_whole
from .quantization import QuantizedWeights, find_quantization
from .select import (
    added_prefixes,
    compile_pattern,
    nearest_names,
    patterns_of,
    select_names,
    suggest_names,
)
