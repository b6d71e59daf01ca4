"""Which tensors a checkpoint holds, and where: files, headers, index and pieces as one catalog."""

from .catalog import Catalog
from .discover import (
    USUAL_ITEMS,
    CheckpointRef,
    Discovery,
    discover,
    is_safetensors_checkpoint,
    read_manifest,
)
from .headers import read_header
from .patterns import compile_pattern
from .piece_catalog import check_save
from .quantization import Quantization, find_quantization
from .select import select_names, suggest_names
